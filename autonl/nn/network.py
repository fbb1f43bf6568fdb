"""ArchSpec -> network. Stem, blocks, head and the whole contract of a timm model are timm's EfficientNet."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models._efficientnet_blocks import SqueezeExcite
from timm.models.efficientnet import EfficientNet, EfficientNetFeatures
from torch import nn

from autonl.arch.spec import ArchSpec, BlockSpec, share_of
from autonl.nn.insertion import attach
from autonl.nn.nonlocal_zoo import BNSettings, create_operator


class Network(EfficientNet):
    """The classifier that an ArchSpec describes, with timm's contract.

    `forward_features`, `forward_head`, `feature_info`, `forward_intermediates`, `reset_classifier`,
    `set_grad_checkpointing`, `output_stride` by dilation and the weight names are timm's own, so a MobileNetV2 of
    timm and of this zoo exchange weights as they are. Where LightNL stands behind a projection, its `bn3` has become
    `bn3.0` and LightNL is `bn3.1`. The choice of an association order by shape cannot be traced by torch.fx nor
    scripted by TorchScript; torch.compile and torch.export can.
    """

    def __init__(self, spec: ArchSpec, **timm_arguments: Any) -> None:
        own = {"num_classes": spec.classes, "drop_rate": spec.dropout, "num_features": spec.head_chs}
        super().__init__(**(own | trunk_arguments(spec) | timm_arguments))
        self.spec = spec
        attach_nonlocal(self.blocks, spec)


class NetworkFeatures(EfficientNetFeatures):
    """The same network as a backbone: `features_only=True`."""

    def __init__(self, spec: ArchSpec, **timm_arguments: Any) -> None:
        levels = 1 + sum(block.stride == 2 for block in spec.blocks)
        own = {"out_indices": tuple(range(levels))}
        super().__init__(**(own | trunk_arguments(spec) | timm_arguments))
        self.spec = spec
        attach_nonlocal(self.blocks, spec)


def stages(spec: ArchSpec) -> list[list[BlockSpec]]:
    """Blocks in timm's stages: a new one where the stride is 2 or the width changes."""
    grouped: list[list[BlockSpec]] = []
    for block in spec.blocks:
        if not grouped or block.stride > 1 or block.out_chs != grouped[-1][-1].out_chs:
            grouped.append([])
        grouped[-1].append(block)
    return grouped


def trunk_arguments(spec: ArchSpec) -> dict[str, Any]:
    return {
        "block_args": [[block_arguments(block) for block in stage] for stage in stages(spec)],
        "stem_size": spec.stem_chs,
        "fix_stem": True,
        "round_chs_fn": int,  # the spec's channels are final
        "act_layer": spec.activation,
        "norm_layer": partial(nn.BatchNorm2d, eps=spec.bn_eps, momentum=spec.bn_momentum),
        "se_layer": partial(SqueezeExcite, rd_round_fn=squeezed),
    }


def block_arguments(block: BlockSpec) -> dict[str, Any]:
    """What timm's builder is given for a block. It changes the dictionary: a fresh one every time."""
    arguments: dict[str, Any] = {
        "block_type": "ir",
        "dw_kernel_size": block.kernel,
        "stride": block.stride,
        "exp_ratio": float(block.expand),
        "out_chs": block.out_chs,
        "se_ratio": block.se,
        "act_layer": None,
    }
    if block.expand == 1:  # timm's block without an expansion convolution
        arguments["block_type"] = "ds"
        del arguments["exp_ratio"]
    return arguments


def squeezed(chs: float) -> int:
    """timm hands over mid_chs * (ratio / expand), that is the block's input channels * ratio."""
    return share_of(1, chs)


def attach_nonlocal(trunk: nn.Sequential, spec: ArchSpec) -> None:
    """After timm's initialisation, which would set the zero gammas to one."""
    blocks = [block for stage in trunk.children() for block in stage.children()]
    for block, block_spec in zip(blocks, spec.blocks, strict=True):
        if place := block_spec.lightnl:
            bn = BNSettings(bn_eps=spec.bn_eps, bn_momentum=spec.bn_momentum)
            attach(block, create_operator(spec.operator, block_spec.out_chs, place.ratio, place.stride, **bn))

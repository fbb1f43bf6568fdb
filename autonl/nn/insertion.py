"""LightNL (or a rival) behind the projections of a network made of timm's inverted residuals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timm.models._efficientnet_blocks import DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from torch import nn

from autonl.arch.spec import paper_stride
from autonl.errors import AutoNLError, refuse, refuse_name
from autonl.nn.nonlocal_zoo import BNSettings, create_operator
from autonl.nn.shapes import output_sizes

# kind of block -> its projection and the BN behind it, which the operator follows, before the block's own skip
PROJECTION = {
    InvertedResidual: ("conv_pwl", "bn3"),
    DepthwiseSeparableConv: ("conv_pw", "bn2"),
    EdgeResidual: ("conv_pwl", "bn2"),
}


def has_projection(module: nn.Module) -> bool:
    return isinstance(module, tuple(PROJECTION))


def projection_norm(block: nn.Module) -> str:
    """The name of the BN behind the projection."""
    return next(norm for kind, (_, norm) in PROJECTION.items() if isinstance(block, kind))


def projection_chs(block: nn.Module) -> int:
    projection = next(conv for kind, (conv, _) in PROJECTION.items() if isinstance(block, kind))
    return int(getattr(block, projection).out_channels)


def attach(block: nn.Module, operator: nn.Module) -> None:
    """Put the operator behind the projection of a timm block: its BN becomes Sequential(BN, operator)."""
    norm = projection_norm(block)
    setattr(block, norm, nn.Sequential(getattr(block, norm), operator))


def insert_lightnl(
    model: nn.Module,
    places: Iterable[str] | None = None,
    *,
    ratio: float = 0.25,
    stride: int | None = None,
    operator: str = "lightnl",
) -> nn.Module:
    """Put LightNL behind the projections of a timm network, in place; returns the model.

    Works on every network made of timm's inverted residuals: MobileNetV2/V3, EfficientNet, MNASNet, MixNet, FBNet.
    The new blocks are the identity at birth, so a trained network keeps its outputs.

    places    module names of blocks, such as "blocks.3.1"; default: every block with a projection
    ratio     share of the channels that make the affinity
    stride    one position in stride x stride is attended to; default: the paper's rule at the model's
              nominal size, 2 where the map is larger than 14 and 1 elsewhere (not known for dilated networks)
    operator  a rival of Table 2 in LightNL's place

        model = autonl.insert_lightnl(timm.create_model("efficientnet_b0"))
    """
    blocks = {name: m for name, m in model.named_modules() if has_projection(m)}
    if not blocks:
        raise AutoNLError(f"{type(model).__name__} has no inverted residuals of timm to put LightNL behind")
    chosen = chosen_places(blocks, places)
    strides = dict.fromkeys(chosen, stride) if stride is not None else paper_strides(model, chosen)
    operators = {}
    for name in chosen:  # all made before the first is put in: an error leaves the model as it was
        norm = getattr(blocks[name], projection_norm(blocks[name]))
        bn = BNSettings(bn_eps=getattr(norm, "eps", 1e-5), bn_momentum=getattr(norm, "momentum", 0.1))
        new = create_operator(operator, projection_chs(blocks[name]), ratio, strides[name], **bn)
        operators[name] = new.to(norm.weight.device, norm.weight.dtype).train(norm.training)
    for name, new in operators.items():
        attach(blocks[name], new)
    return model


def chosen_places(blocks: dict[str, nn.Module], places: Iterable[str] | None) -> list[str]:
    if isinstance(places, str):
        refuse("places", places, f"a list of names, such as [{places!r}]")
    chosen = list(blocks) if places is None else list(places)
    for name in chosen:
        if name not in blocks:
            refuse_name("place", name, blocks)
        if isinstance(getattr(blocks[name], projection_norm(blocks[name])), nn.Sequential):
            raise AutoNLError(f"place {name!r} has a non-local block already")
        if chosen.count(name) > 1:
            raise AutoNLError(f"place {name!r} is given twice; allowed: once")
    return chosen


def paper_strides(model: Any, places: list[str]) -> dict[str, int]:
    """The paper's rule at the size that the model is made for. It goes by maps that no dilation has enlarged."""
    if any(max(m.dilation) > 1 for m in model.modules() if isinstance(m, nn.Conv2d)):
        raise AutoNLError("the maps of a dilated network do not tell the strides of LightNL; give stride=1 or 2")
    if not hasattr(model, "pretrained_cfg"):
        raise AutoNLError(f"{type(model).__name__} does not tell the image size it is made for; give stride=1 or 2")
    height, width = model.pretrained_cfg["input_size"][-2:]
    sizes = output_sizes(model, places, (height, width))
    return {name: paper_stride(*sizes[name][1:]) for name in places}

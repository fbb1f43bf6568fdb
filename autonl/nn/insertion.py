"""LightNL (or a rival) behind the projections of a network made of timm's inverted residuals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from timm.models._efficientnet_blocks import DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from torch import nn

from autonl.arch.spec import paper_stride
from autonl.errors import AutoNLError, refuse_name
from autonl.nn.nonlocal_zoo import BNSettings, create_operator
from autonl.nn.shapes import output_sizes

# kind of block -> the BN behind its projection, which the operator follows, before the block's own skip
PROJECTION_NORM = {InvertedResidual: "bn3", DepthwiseSeparableConv: "bn2", EdgeResidual: "bn2"}


def has_projection(module: nn.Module) -> bool:
    return isinstance(module, tuple(PROJECTION_NORM))


def projection_norm(block: nn.Module) -> str:
    return next(norm for kind, norm in PROJECTION_NORM.items() if isinstance(block, kind))


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
              nominal size, 2 where the map is larger than 14 and 1 elsewhere
    operator  a rival of Table 2 in LightNL's place

        model = autonl.insert_lightnl(timm.create_model("efficientnet_b0"))
    """
    blocks = {name: m for name, m in model.named_modules() if has_projection(m)}
    if not blocks:
        raise AutoNLError(f"{type(model).__name__} has no inverted residuals of timm to put LightNL behind")
    chosen = list(blocks) if places is None else list(places)
    for name in chosen:
        if name not in blocks:
            refuse_name("place", name, blocks)
        if isinstance(getattr(blocks[name], projection_norm(blocks[name])), nn.Sequential):
            raise AutoNLError(f"place {name!r} has a non-local block already")
    sizes = output_sizes(model, chosen, nominal_size(model))
    for name in chosen:
        chs, height, width = sizes[name]
        norm = getattr(blocks[name], projection_norm(blocks[name]))
        bn = BNSettings(bn_eps=norm.eps, bn_momentum=norm.momentum)
        new = create_operator(operator, chs, ratio, stride or paper_stride(height, width), **bn)
        attach(blocks[name], new.to(norm.weight.device, norm.weight.dtype).train(norm.training))
    return model


def nominal_size(model: Any) -> tuple[int, int]:
    """The height and width that a timm model is made for."""
    height, width = model.pretrained_cfg["input_size"][-2:]
    return height, width

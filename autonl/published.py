"""The PyTorch checkpoints that were published with the paper: their names, and the one thing they compute otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autonl.nn.light_nonlocal import LightNL
from autonl.nn.shapes import output_sizes

# of a block: ours -> theirs
EXPANDED = {"conv_pw": "expand_conv.0", "bn1": "expand_conv.1", "conv_dw": "depth_ops.0.1.0", "bn2": "depth_ops.0.1.1"}
EXPANDED |= {"conv_pwl": "project_conv.0", "bn3": "project_conv.1"}
SEPARABLE = {"conv_dw": "depth_ops.0.0.0", "bn1": "depth_ops.0.0.1", "conv_pw": "project_conv.0"}
SEPARABLE |= {"bn2": "project_conv.1"}
SQUEEZE = {"se.conv_reduce": "se_op.se_reduce", "se.conv_expand": "se_op.se_expand"}
NONLOCAL = {"depthwise": "nl_op.depthwise_conv", "bn": "nl_op.bn"}


def is_published(tensors: dict[str, Tensor]) -> bool:
    return "features.0.0.weight" in tensors and any(".project_conv." in name for name in tensors)


def published_names(module: Any) -> dict[str, str]:
    """Our name -> theirs, for every tensor of the network."""
    blocks = [(f"blocks.{i}.{j}", block) for i, stage in enumerate(module.blocks) for j, block in enumerate(stage)]
    parts = {"conv_stem": "features.0.0", "bn1": "features.0.1", "classifier": "classifier.1"}
    for number, (name, block) in enumerate(blocks, start=1):
        expanded = hasattr(block, "conv_pwl")
        for ours, theirs in ((EXPANDED if expanded else SEPARABLE) | SQUEEZE).items():
            parts[f"{name}.{ours}"] = f"features.{number}.{theirs}"
        norm = "bn3" if expanded else "bn2"
        if isinstance(getattr(block, norm), nn.Sequential):
            parts[f"{name}.{norm}.0"] = parts.pop(f"{name}.{norm}")
            for ours, theirs in NONLOCAL.items():
                parts[f"{name}.{norm}.1.{ours}"] = f"features.{number}.{theirs}"
    parts |= {"conv_head": f"features.{len(blocks) + 1}.0", "bn2": f"features.{len(blocks) + 1}.1"}

    def theirs_of(name: str) -> str:
        part, _, kind = name.rpartition(".")
        return f"{parts.get(part, part)}.{kind}"

    return {name: theirs_of(name) for name in module.state_dict()}


def from_published(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by our names; those that the network does not have keep theirs.

    The published code divides by H and multiplies by W, which is no normalisation on square maps. Ours divides by H W:
    the depthwise kernel behind it takes the factor, at the size that the network is made for.
    """
    ours = {theirs: name for name, theirs in published_names(module).items()}
    renamed = {ours.get(name, name): tensor for name, tensor in tensors.items()}
    blocks = [name for name, part in module.named_modules() if isinstance(part, LightNL)]
    for name, (_, height, width) in output_sizes(module, blocks, module.default_cfg["input_size"][-2:]).items():
        kernel = f"{name}.depthwise.weight"
        if kernel in renamed:
            renamed[kernel] = renamed[kernel].to(torch.float32) * (height * width)
    return renamed

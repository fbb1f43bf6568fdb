"""Super-network + choices -> the network on its own, with the weights that it had inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autonl.models import build
from autonl.search.space import Choice
from autonl.search.supernet import SuperNet

FIXED_PARTS = ("conv_stem", "bn1", "blocks.0.0", "conv_head", "bn2", "classifier")
BLOCK_PARTS = ("conv_pw", "bn1", "conv_dw", "bn2", "se", "conv_pwl")


@torch.no_grad()
def derive(supernet: SuperNet, choices: Sequence[Choice], name: str) -> Any:
    """The chosen network (its architecture is `.spec`) with weights and BN statistics cut out of the super-network."""
    network: Any = build(supernet.space.spec(choices, name))
    for part in FIXED_PARTS:
        copy_cut(network.get_submodule(part), supernet.network.get_submodule(part))
    kept = [block for block, choice in zip(supernet.searched(), choices, strict=True) if choice.expand]
    targets = [block for stage in network.blocks for block in stage][1:]
    for target, source in zip(targets, kept, strict=True):
        for part in BLOCK_PARTS:
            copy_cut(target.get_submodule(part), source.get_submodule(part))
        for target_part, source_part in zip(parts_of(target.bn3), parts_of(source.bn3), strict=False):
            copy_cut(target_part, source_part)  # the projection's BN, then LightNL where it stayed
    return network


def parts_of(norm: nn.Module) -> list[nn.Module]:
    return list(norm) if isinstance(norm, nn.Sequential) else [norm]


def copy_cut(target: nn.Module, source: nn.Module) -> None:
    weights = source.state_dict()
    for key, tensor in target.state_dict().items():
        tensor.copy_(cut(weights[key], tensor))


def cut(source: Tensor, target: Tensor) -> Tensor:
    """The first channels, and of a kernel the middle."""
    for dim, size in enumerate(target.shape):
        start = (source.shape[dim] - size) // 2 if dim >= 2 else 0
        source = source.narrow(dim, start, size)
    return source

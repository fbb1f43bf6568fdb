"""The size of the map at a place in a network."""

import copy
from collections.abc import Collection

import torch
from torch import nn


def output_sizes(
    model: nn.Module, names: Collection[str], resolution: tuple[int, int]
) -> dict[str, tuple[int, int, int]]:
    """(channels, height, width) that the named modules put out for an image of that height and width.

    Runs on meta tensors: nothing is computed, and neither the model nor its BN statistics are touched.
    """
    if not names:
        return {}
    probe = copy.deepcopy(model).to("meta").eval()
    sizes: dict[str, tuple[int, int, int]] = {}

    def note(name: str) -> None:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            _, chs, height, width = output.shape
            sizes[name] = chs, height, width

        probe.get_submodule(name).register_forward_hook(hook)

    for name in names:
        note(name)
    in_chs = next(m.in_channels for m in probe.modules() if isinstance(m, nn.Conv2d))
    dtype = next(probe.parameters()).dtype
    with torch.no_grad():
        probe(torch.empty(1, in_chs, *resolution, device="meta", dtype=dtype))
    return sizes

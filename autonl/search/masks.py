"""Gates -> masks over weights and features, for all blocks at once: a few launches a step, not hundreds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autonl.arch.spec import share_of
from autonl.search.gates import Reached
from autonl.search.space import Space


@dataclass(frozen=True)
class Candidates:
    """The sizes of one block's nested candidates: expanded channels, hidden SE units, compact channels."""

    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    widths: list[int]
    squeezed: list[int]
    compact: list[int]

    @classmethod
    def of(cls, space: Space, in_chs: int, out_chs: int) -> Candidates:
        return cls(
            space.kernels,
            space.strides,
            [in_chs * expand for expand in space.expands],
            [share_of(in_chs, ratio) for ratio in space.se],
            [share_of(out_chs, ratio) for ratio in space.ratios],
        )

    def levels(self) -> list[Tensor]:
        """For expansion, kernel, SE and ratio: the candidate that each element of a mask comes with."""
        return [prefix_levels(self.widths), ring_levels(self.kernels)] + [
            prefix_levels(sizes) for sizes in (self.squeezed, self.compact)
        ]


@dataclass(frozen=True)
class BlockMasks:
    """0 / 1 under hard gates. keep, squeeze and nonlocal_ are single numbers."""

    keep: Tensor
    squeeze: Tensor
    nonlocal_: Tensor
    stride: tuple[Tensor, ...]  # one a stride: whether its positions count
    mid: Tensor  # (mid, 1, 1): a mask over a 1x1 kernel's inputs
    kernel: Tensor  # (K, K)
    se: Tensor  # (se, 1, 1)
    ratio: Tensor  # (Cr,)


class Masks(nn.Module):
    """Every mask element is one reached candidate: a product with a 0 / 1 matrix spreads them all."""

    spread: Tensor

    def __init__(self, candidates: Sequence[Candidates]) -> None:
        super().__init__()
        levels = [block.levels() for block in candidates]
        # candidates of a block stand side by side: expansions, kernels, SE, ratios
        counts = [len(candidates[0].widths), len(candidates[0].kernels)]
        counts += [max(1, len(sizes)) for sizes in (candidates[0].squeezed, candidates[0].compact)]
        starts = [0, *itertools.accumulate(counts)]
        columns = [
            block * starts[-1] + start + level
            for block, block_levels in enumerate(levels)
            for start, level in zip(starts, block_levels, strict=False)
        ]
        sources = torch.cat(columns)
        spread = torch.zeros(len(sources), len(candidates) * starts[-1])
        spread[torch.arange(len(sources)), sources] = 1
        self.register_buffer("spread", spread, persistent=False)
        self.sizes = [len(level) for block_levels in levels for level in block_levels]
        self.side = candidates[0].kernels[-1]

    def forward(self, reached: Reached) -> list[BlockMasks]:
        flat = torch.cat([reached.expand, reached.kernel, reached.se, reached.ratio], 1).flatten()
        parts = iter((self.spread @ flat).split(self.sizes))
        masks = []
        for keep, squeeze, nonlocal_, stride in zip(
            reached.keep.unbind(), reached.squeeze.unbind(), reached.nonlocal_.unbind(), reached.stride, strict=True
        ):
            mid, kernel, se, ratio = (next(parts) for _ in range(4))
            mid, kernel, se = mid.view(-1, 1, 1), kernel.view(self.side, self.side), se.view(-1, 1, 1)
            masks.append(BlockMasks(keep, squeeze, nonlocal_, stride.unbind(), mid, kernel, se, ratio))
        return masks


def prefix_levels(sizes: list[int]) -> Tensor:
    """Sizes of nested prefixes (3, 5) -> the candidate that each element comes with (0, 0, 0, 1, 1)."""
    steps = [after - before for before, after in itertools.pairwise([0, *sizes])]
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(steps, dtype=torch.long))


def ring_levels(kernels: tuple[int, ...]) -> Tensor:
    """(K * K,): the smallest kernel that an element of the largest one belongs to."""
    offset = (torch.arange(kernels[-1]) - kernels[-1] // 2).abs()
    radius = torch.maximum(offset[:, None], offset[None, :]).flatten()  # distance from the middle
    return torch.stack([radius > kernel // 2 for kernel in kernels]).sum(0)

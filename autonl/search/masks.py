"""Gates -> masks over weights and features, for all blocks at once: a few launches a step, not hundreds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        """For expansion, SE and ratio: the candidate that each element of a mask comes with."""
        return [prefix_levels(sizes) for sizes in (self.widths, self.squeezed, self.compact)]


@dataclass(frozen=True)
class BlockMasks:
    """0 / 1 under hard gates, and weights behind such masks. keep and squeeze are single numbers."""

    keep: Tensor
    squeeze: Tensor
    stride: tuple[Tensor, ...]  # one a stride: whether its positions count
    mid: Tensor  # (mid, 1, 1): a mask over a 1x1 kernel's inputs
    kernel: Tensor  # (K, K)
    se: Tensor  # (se, 1, 1)
    ratio: Tensor  # (Cr,)
    affine: tuple[Tensor, ...]  # gamma and beta of LightNL's BN: the gate on them is the gate on the whole branch


class Masks(nn.Module):
    """Every mask element is one reached candidate: products with 0 / 1 matrices spread them all."""

    spread: Tensor
    ring: Tensor
    affine_rows: Tensor

    def __init__(self, candidates: Sequence[Candidates], out_chs: Sequence[int]) -> None:
        super().__init__()
        levels = [block.levels() for block in candidates]
        # candidates of a block stand side by side: expansions, SE, ratios
        counts = [max(1, len(sizes)) for sizes in (candidates[0].widths, candidates[0].squeezed, candidates[0].compact)]
        starts = [0, *itertools.accumulate(counts)]
        columns = [
            block * starts[-1] + start + level
            for block, block_levels in enumerate(levels)
            for start, level in zip(starts, block_levels, strict=False)
        ]
        self.sizes = [len(level) for block_levels in levels for level in block_levels]
        self.out_chs = list(out_chs)
        self.side = candidates[0].kernels[-1]
        kernels = candidates[0].kernels
        for name, sources, count in (
            ("spread", torch.cat(columns), len(candidates) * starts[-1]),
            ("ring", ring_levels(kernels), len(kernels)),
            ("affine_rows", prefix_levels(list(itertools.accumulate(out_chs))).repeat(2), len(candidates)),
        ):
            self.register_buffer(name, F.one_hot(sources, count).float(), persistent=False)

    def forward(self, reached: Reached, affine: Sequence[tuple[Tensor, Tensor]]) -> list[BlockMasks]:
        """affine: gamma and beta of every block's LightNL, or none at all."""
        flat = torch.cat([reached.expand, reached.se, reached.ratio], 1).flatten()
        parts = iter((self.spread @ flat).split(self.sizes))
        strides = zip(*(column.unbind() for column in reached.stride.unbind(1)), strict=True)

        kernels = (reached.kernel @ self.ring.T).view(-1, self.side, self.side).unbind()
        affines: Iterable[tuple[Tensor, ...]] = itertools.repeat(())
        if affine:
            both = torch.cat([gamma for gamma, _ in affine] + [beta for _, beta in affine])
            gated = (both * (self.affine_rows @ reached.nonlocal_)).split(self.out_chs * 2)
            affines = zip(gated[: len(affine)], gated[len(affine) :], strict=True)

        masks = []
        for keep, squeeze, stride, kernel, pair in zip(
            reached.keep.unbind(), reached.squeeze.unbind(), strides, kernels, affines, strict=False
        ):
            mid, se, ratio = (next(parts) for _ in range(3))
            masks.append(BlockMasks(keep, squeeze, stride, mid.view(-1, 1, 1), kernel, se.view(-1, 1, 1), ratio, pair))
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

"""What speaks for a larger candidate, measured on weights and features. The columns are those of gates.Columns.

A norm behind a BN says nothing: the BN scales it away. What counts is the kernel that acts, with its BN folded in.
In units of what its input makes of it, that kernel's norm is |gamma|, the standard deviation that the BN gives its
output; at birth LightNL's gamma is zero and it grows only where the branch helps.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from autonl.search.masks import Candidates

FLOOR = 1e-4  # in the logarithms: a ratio of energies below it is none


@torch.no_grad()
def weight_evidence(block: Any, candidates: Candidates) -> Tensor:
    """log energy ratios for keep, wider expansions, larger kernels: (expansions + kernels - 1,)."""
    gamma = block.bn2.weight.float().square()  # (mid,)
    projection_bn = block.bn3[0] if candidates.compact else block.bn3
    keep = projection_bn.weight.float().square().mean()
    energy = gamma * block.conv_pwl.weight.float().square().sum((0, 2, 3))  # (mid,): through the projection
    expand = group_means(energy, candidates.widths)
    kernel = block.conv_dw.weight.float().square().squeeze(1)  # (mid, K, K)
    kernel = (kernel * (gamma / kernel.sum((1, 2)).clamp(min=1e-12))[:, None, None]).sum(0)  # (K, K)
    side = kernel.shape[-1]
    cores = []  # the energy of every kernel's middle part
    for size in candidates.kernels:
        edge = (side - size) // 2
        cores.append(kernel[edge : side - edge, edge : side - edge].sum())
    inner = torch.stack(cores)
    ratios = [keep[None], expand[1:] / expand[0], inner.diff() / inner[0]]
    return torch.log(torch.cat(ratios) + FLOOR)


@torch.no_grad()
def squeeze_evidence(scale: Tensor, hidden: Tensor, weight: Tensor, widths: list[int]) -> Tensor:
    """log ratios for SE and for its wider candidates: (candidates,).

    SE that scales every image alike could be folded into the weights: its spread over images speaks for it.
    """
    scale = scale.float().flatten(1)  # (N, mid)
    spread = scale.var(0, unbiased=False).mean() / scale.square().mean()
    energy = hidden.float().flatten(1).square().mean(0) * weight.float().square().sum((0, 2, 3))  # (se,)
    groups = group_means(energy, widths)
    return torch.log(torch.cat([spread[None], groups[1:] / groups[0].clamp(min=1e-12)]) + FLOOR)


@torch.no_grad()
def location_evidence(projection_bn: Any, lightnl_bn: Any) -> Tensor:
    """log energy of LightNL's branch over that of what it is added to: (1,). Eq. 10 with the BN folded in."""
    ratio = lightnl_bn.weight.float().square().mean() / projection_bn.weight.float().square().mean()
    return torch.log(ratio + FLOOR)[None]


@torch.no_grad()
def affinity_distances(grams: list[Tensor], counts: list[int], compact: list[int]) -> Tensor:
    """How far the affinity of every smaller candidate is from the largest one's (Eq. 12), ratios then strides.

    grams   K_s = X_s^T X_s of (N, Cr, Cr), one a stride from the fewest positions to all, X_s of positions x Cr
    counts  the number of positions in each
    compact the channels of each ratio

    Ratio: |X_r X_r^T - X X^T| / |X X^T|. The difference is A A^T of the channels A that r leaves out, and its norm is
    that of the small matrix A^T A, a corner of K. Nothing of H W x H W is made.

    Stride: a sum over fewer positions is smaller whatever they hold, so each is divided by its own number of
    positions. With M = K_s / S - K / (H W), what the block makes of x_c differs by X M, and as an affinity between
    positions |X M X^T| / |X K X^T / (H W)|, whose square is tr(M K M K) over tr(K K K K) / (H W)^2.
    """
    full = grams[-1].float() if grams[-1].dtype != torch.float64 else grams[-1]
    norm = full.square().sum((1, 2)).sqrt().clamp(min=1e-30)  # (N,)
    ratios = [full[:, chs:, chs:].square().sum((1, 2)).sqrt() / norm for chs in compact[:-1]]
    product = full @ full / counts[-1]  # (N, Cr, Cr)
    reference = (product * product.mT).sum((1, 2)).clamp(min=1e-30)
    strides = []
    for gram, count in zip(grams[:-1], counts[:-1], strict=True):
        moved = (gram.to(full.dtype) / count - full / counts[-1]) @ full  # M K
        strides.append(((moved * moved.mT).sum((1, 2)).clamp(min=0) / reference).sqrt())
    return torch.stack([d.mean() for d in (*ratios, *strides)]) if ratios or strides else norm.new_zeros(0)


def group_means(values: Tensor, ends: list[int]) -> Tensor:
    """The mean of each stretch between nested prefixes; 0 where two of them coincide, as near ratios of few do."""
    stretches = [values[start:end] for start, end in itertools.pairwise([0, *ends])]
    return torch.stack([stretch.mean() if len(stretch) else values.new_zeros(()) for stretch in stretches])

"""Tile sizes, buffers and launches of the kernels. Plain functions of tensors: `ops` makes operators of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from autonl.nn.kernels.backward import depthwise_backward, input_backward, norm_backward_sums, sum_rows
from autonl.nn.kernels.forward import batch_statistics, gram_kernel, lightnl_forward, normalise_add

# How a kernel is called: directly, or through torch.library.wrap_triton where torch.compile has to see it
Wrap: TypeAlias = Callable[[Any], Any]

ROWS_BELOW = 2  # the end of range(-1, 2) over the rows of a 3x3 kernel, handed over at run time


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work."""

    positions: int  # a step
    channels: int
    warps: int
    bands: int = 1  # programs that share an image's positions
    gram_first: bool = False  # G by a kernel of its own instead of by every band
    stages: int = 3  # of the software pipeline of loads that feed products


def power_of_two(value: int, low: int, high: int) -> int:
    """The smallest power of two that holds value, within the bounds."""
    return min(max(triton.next_power_of_2(value), low), high)


def compact_width(compact_chs: int) -> int:
    return power_of_two(compact_chs, 16, 128)


def forward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    """Chosen by timing on an H200 at batch 256."""
    if dtype == torch.float32:  # products without matrix units: small tiles, or the registers spill
        return Tile(positions=32, channels=power_of_two(chs, 16, 32), warps=4)
    if positions <= 64:
        return Tile(power_of_two(positions, 16, 64), power_of_two(chs, 16, 64), warps=4, stages=1)
    if positions <= 256:
        return Tile(positions=64, channels=power_of_two(chs, 16, 32), warps=4, stages=2)
    if positions <= 1024:
        return Tile(positions=128, channels=16 if chs % 32 else 32, warps=4)
    return Tile(64, power_of_two(chs, 16, 32), warps=4, bands=-(-positions // 256), gram_first=True)


def depthwise_backward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    """Chosen by timing on an H200 at batch 512."""
    if dtype == torch.float32:
        return Tile(positions=16, channels=power_of_two(chs, 16, 32), warps=4)
    if positions <= 64:
        return Tile(power_of_two(positions, 16, 64), power_of_two(chs, 16, 64), warps=4, stages=1)
    if positions <= 256 or positions > 1024:
        return Tile(64, power_of_two(chs, 16, 32), warps=4, bands=-(-positions // 512), stages=1)
    return Tile(128, 16 if chs % 32 else 32, warps=4, stages=1)


def input_backward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(positions=16, channels=power_of_two(chs, 16, 32), warps=4)
    return Tile(
        power_of_two(positions, 16, 64), 32 if 64 < chs <= 128 else power_of_two(chs, 16, 64), warps=4, stages=1
    )


def pass_tile(chs: int, positions: int) -> Tile:
    """For kernels that only pass over memory: 4096 values a program."""
    channels = power_of_two(chs, 16, 64)
    return Tile(positions=power_of_two(positions, 16, 4096 // channels), channels=channels, warps=4)


def is_channels_last(x: Tensor) -> bool:
    """Channels-last in memory. A map that is both (one channel, one position) counts as contiguous."""
    return not x.is_contiguous()


def like(tensor: Tensor, x: Tensor) -> Tensor:
    """The tensor in x's memory format."""
    return tensor.contiguous(memory_format=torch.channels_last if is_channels_last(x) else torch.contiguous_format)


def banded(positions: int, width: int, tile: Tile) -> tuple[int, int, int]:
    """(bands, positions a band, positions it sees before and after)."""
    band = tile.positions * -(-positions // (tile.positions * tile.bands))
    bands = -(-positions // band)
    return bands, band, width + 1 if bands > 1 else 0


def as_one_image(x: Tensor) -> tuple[int, int]:
    """(images, positions) for kernels that treat positions alike: channels-last maps are one long image."""
    images, _, height, width = x.shape
    return (1, images * height * width) if is_channels_last(x) else (images, height * width)


def straight(kernel: Any) -> Any:
    return kernel


def product_dtype(x: Tensor) -> torch.dtype:
    """Of the scratches: float16 where x has 16 bits, their values scaled to fit, for its 3 bits more than bfloat16."""
    return torch.float32 if x.dtype == torch.float32 else torch.float16


def float_buffer(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, device=x.device, dtype=torch.float32)


def inference(
    x: Tensor,
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    variance: Tensor,
    compact_chs: int,
    stride: int,
    eps: float,
    wrap: Wrap = straight,
    tile: Tile | None = None,
) -> Tensor:
    """z = BN(DepthwiseConv3x3(y)) + x with the BN's running statistics."""
    z = torch.empty_like(x)
    tile = tile or forward_tile(x.shape[1], x.shape[2] * x.shape[3], x.dtype)
    gram = None
    if tile.gram_first:
        gram = float_buffer(x, x.shape[0], compact_chs, x.shape[1])
    norm = (gamma, beta, mean, variance)
    launch_forward(x, z, weight, norm, gram, None, compact_chs, stride, eps, wrap, tile)
    return z


def launch_forward(
    x: Tensor,
    out: Tensor,
    weight: Tensor,
    norm: tuple[Tensor | None, ...],
    gram: Tensor | None,
    moments: Tensor | None,
    compact_chs: int,
    stride: int,
    eps: float,
    wrap: Wrap,
    tile: Tile,
) -> None:
    images, chs, height, width = x.shape
    blocks = -(-chs // tile.channels)
    bands, band, halo = banded(height * width, width, tile)
    sizes = {"CHS": chs, "COMPACT": compact_chs, "STRIDE": stride, "CHANNELS_LAST": is_channels_last(x)}
    tiling = {"CB": tile.channels, "RP": compact_width(compact_chs), "num_warps": tile.warps, "num_stages": tile.stages}
    if tile.gram_first:
        wrap(gram_kernel)[(images, blocks)](x, gram, height, width, **sizes, P=min(2 * tile.positions, 128), **tiling)
    programs = images * bands * blocks
    scratch = x.new_empty(programs, band + 2 * halo, tile.channels, dtype=product_dtype(x))
    taps_scratch = scratch.new_empty(programs, 9, tile.channels)
    wrap(lightnl_forward)[(blocks, bands, images)](
        x,
        out,
        scratch,
        taps_scratch,
        weight,
        *norm,
        gram,
        moments,
        height,
        width,
        band,
        halo,
        eps,
        ROWS_BELOW,
        **sizes,
        TRAINING=moments is not None,
        GRAM_READY=tile.gram_first,
        P=tile.positions,
        **tiling,
    )


def training(
    x: Tensor,
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    compact_chs: int,
    stride: int,
    eps: float,
    running: tuple[Tensor, Tensor, Tensor] | None = None,
    momentum: float = 0.0,
    wrap: Wrap = straight,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z with batch statistics, and what the backward pass needs: u, G, mean and biased variance.

    running  the BN's running_mean, running_var and num_batches_tracked, to be moved in place
    """
    images, chs, height, width = x.shape
    tile = tile or forward_tile(chs, height * width, x.dtype)
    bands, band, _ = banded(height * width, width, tile)
    u, z = torch.empty_like(x), torch.empty_like(x)
    gram = float_buffer(x, images, compact_chs, chs)
    moments = float_buffer(x, images * bands, 2, chs)
    launch_forward(x, u, weight, (None, None, None, None), gram, moments, compact_chs, stride, eps, wrap, tile)
    mean, variance = float_buffer(x, chs), float_buffer(x, chs)
    running_mean, running_variance, batches_tracked = running or (None, None, None)
    wrap(batch_statistics)[(-(-chs // 8),)](
        moments,
        mean,
        variance,
        running_mean,
        running_variance,
        batches_tracked,
        images * bands,
        bands,
        band,
        height * width,
        momentum,
        CHS=chs,
        UPDATE=running is not None,
        ROWS=256,
        CB=8,
        num_warps=8,
    )
    long_images, positions = as_one_image(x)
    wide = pass_tile(chs, positions)
    wrap(normalise_add)[(-(-positions // wide.positions), -(-chs // wide.channels), long_images)](
        x,
        u,
        z,
        gamma,
        beta,
        mean,
        variance,
        positions,
        eps,
        CHS=chs,
        CHANNELS_LAST=is_channels_last(x),
        P=wide.positions,
        CB=wide.channels,
        num_warps=wide.warps,
    )
    return z, u, gram, mean, variance


def column_sums(matrices: Tensor, wrap: Wrap) -> Tensor:
    """Sums over the first of three axes. torch.sum takes three times as long for a few thousand columns."""
    rows, *shape = matrices.shape
    columns = shape[0] * shape[1]
    out = float_buffer(matrices, *shape)
    wrap(sum_rows)[(-(-columns // 32),)](matrices, out, rows, columns, ROWS=128, COLUMNS=32, num_warps=8)
    return out


CHUNKS = 512  # programs that share the sums of the BN's backward pass, about four a multiprocessor


def training_backward(
    dz: Tensor,
    x: Tensor,
    u: Tensor,
    gram: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    gamma: Tensor,
    stride: int,
    eps: float,
    wrap: Wrap = straight,
    tile: Tile | None = None,
    input_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and weight, and (3, C): of beta, of gamma, and the sum of dz^2."""
    dz = like(dz, x)
    images, chs, height, width = x.shape
    compact_chs = gram.shape[1]
    last = is_channels_last(x)
    long_images, positions = as_one_image(x)
    wide = pass_tile(chs, positions)
    chunk = wide.positions * -(-positions // (wide.positions * CHUNKS)) if long_images == 1 else positions
    chunks = -(-positions // chunk)
    partial_sums = float_buffer(x, long_images * chunks, 3, chs)
    wrap(norm_backward_sums)[(chunks, -(-chs // wide.channels), long_images)](
        dz,
        u,
        mean,
        variance,
        partial_sums,
        positions,
        chunk,
        eps,
        CHS=chs,
        CHANNELS_LAST=last,
        P=wide.positions,
        CB=wide.channels,
        num_warps=wide.warps,
    )
    sums = column_sums(partial_sums, wrap)  # (3, C): d_beta, d_gamma, sum of dz^2

    tile = tile or depthwise_backward_tile(chs, height * width, x.dtype)
    blocks = -(-chs // tile.channels)
    bands, band, halo = banded(height * width, width, tile)
    dx = torch.empty_like(x)
    d_gram = float_buffer(x, images, bands, compact_chs, chs)
    d_taps = float_buffer(x, images * bands, 9, chs)
    programs = images * bands * blocks
    wrap(depthwise_backward)[(blocks, bands, images)](
        dz,
        u,
        x,
        gram,
        weight,
        gamma,
        mean,
        variance,
        sums,
        dx,
        d_gram,
        d_taps,
        x.new_empty(programs, band + 2 * halo, tile.channels, dtype=product_dtype(x)),
        x.new_empty(programs, band, tile.channels, dtype=product_dtype(x)),
        x.new_empty(programs, 9, tile.channels, dtype=product_dtype(x)),
        height,
        width,
        band,
        halo,
        images * height * width,
        eps,
        ROWS_BELOW,
        CHS=chs,
        COMPACT=compact_chs,
        CHANNELS_LAST=last,
        P=tile.positions,
        CB=tile.channels,
        RP=compact_width(compact_chs),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    input_tile = input_tile or input_backward_tile(chs, height * width, x.dtype)
    wrap(input_backward)[(-(-height * width // input_tile.positions), images)](
        dz,
        x,
        gram,
        d_gram,
        dx,
        height,
        width,
        bands,
        CHS=chs,
        COMPACT=compact_chs,
        STRIDE=stride,
        CHANNELS_LAST=last,
        P=input_tile.positions,
        CB=input_tile.channels,
        RP=compact_width(compact_chs),
        num_warps=input_tile.warps,
        num_stages=input_tile.stages,
    )
    d_weight = column_sums(d_taps, wrap).t().contiguous().view(weight.shape)  # (9, C) -> (C, 1, 3, 3)
    return dx, d_weight.to(weight.dtype), sums

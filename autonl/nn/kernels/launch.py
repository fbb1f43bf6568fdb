"""Buffers, grids and launches of the kernels. Plain functions of tensors: `ops` makes operators of them.

What can be known from shapes and dtypes is settled once, in a plan; a call then makes its buffers and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.library import wrap_triton

from autonl.nn.kernels.backward import depthwise_backward, input_backward, norm_backward_sums, sum_rows
from autonl.nn.kernels.forward import batch_statistics, gram_kernel, lightnl_forward, normalise_add, spatial_forward
from autonl.nn.kernels.tiles import (
    Tile,
    compact_width,
    depthwise_backward_tile,
    forward_tile,
    input_backward_tile,
    pass_tile,
)

ROWS_BELOW = 2  # the end of range(-1, 2) over the rows of a 3x3 kernel, handed over at run time
CHUNKS = 512  # programs that share the sums of the BN's backward pass, about four a multiprocessor
PLANS = 1024  # plans that are kept
FUSION = {"enable_fp_fusion": True}  # multiply-adds, which Triton leaves out from 3.10 on unless asked


class Launch:
    """A kernel with everything settled but its tensors, which come first among its parameters."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], scalars: tuple[Any, ...], constants: dict[str, Any], tile: Tile
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.scalars = scalars
        self.constants = constants
        self.options = {"num_warps": tile.warps, "num_stages": tile.stages}
        # as the kernel orders them
        self.values = (*scalars, *(constants[name] for name in kernel.arg_names if name in constants))
        self.compiled: Any = None


# How a launch is made: one of the next three
Run: TypeAlias = Callable[..., Any]


def run_bound(launch: Launch, *tensors: Tensor | None) -> Any:
    """Through Triton's binder, which looks at the dtype and the alignment of every argument and may compile."""
    return launch.kernel[launch.grid](*tensors, *launch.scalars, **launch.constants, **launch.options, **FUSION)


def run_again(launch: Launch, *tensors: Tensor | None) -> None:
    """The first time as above, then without the binder, which costs more than the launch itself.

    Right only where the binder would find what it found the first time: plans are kept by dtypes and device, and the
    tensors' addresses are multiples of 16.
    """
    if launch.compiled is None:
        launch.compiled = run_bound(launch, *tensors)
    else:
        launch.compiled[launch.grid](*tensors, *launch.values)


def run_traced(launch: Launch, *tensors: Tensor | None) -> None:
    """Where torch.compile has to see the kernel; of the options it knows these two."""
    wrap_triton(launch.kernel)[launch.grid](*tensors, *launch.scalars, **launch.constants, **launch.options)


class Problem(NamedTuple):
    """What a plan is made for."""

    images: int
    chs: int
    height: int
    width: int
    channels_last: bool
    dtype: torch.dtype
    compact_chs: int
    stride: int
    eps: float

    @property
    def positions(self) -> int:
        return self.height * self.width

    @property
    def samples(self) -> int:
        return -(-self.height // self.stride) * -(-self.width // self.stride)

    def as_one_image(self) -> tuple[int, int]:
        """(images, positions) for kernels that treat positions alike: channels-last maps are one long image."""
        return (1, self.images * self.positions) if self.channels_last else (self.images, self.positions)

    def constants(self, tile: Tile) -> dict[str, Any]:
        return {"CHS": self.chs, "CHANNELS_LAST": self.channels_last, "P": tile.positions, "CB": tile.channels}

    def product_constants(self, tile: Tile) -> dict[str, Any]:
        """For kernels with products of compact channels."""
        return self.constants(tile) | {"COMPACT": self.compact_chs, "RP": compact_width(self.compact_chs)}


def problem_of(x: Tensor, compact_chs: int, stride: int, eps: float) -> Problem:
    images, chs, height, width = x.shape
    channels_last = not x.is_contiguous()  # a map that is both (one channel, one position) counts as contiguous
    return Problem(images, chs, height, width, channels_last, x.dtype, compact_chs, stride, eps)


def plan_for(make: Any, run: Run, x: Tensor, others: tuple[Tensor | None, ...], *key: Any) -> tuple[Any, Run]:
    """The plan that `make` makes of a key, and how to run it.

    x, others  tensors that come from outside: their dtypes and alignment are part of how kernels are compiled
    """
    if run is run_traced:  # sizes may be symbols
        return make.__wrapped__(*key, ()), run
    address, kinds = x.data_ptr(), [x.device, x.dtype]
    for tensor in others:
        if tensor is not None:
            address |= tensor.data_ptr()
            kinds.append(tensor.dtype)
    return make(*key, tuple(kinds)), run_bound if address % 16 else run


def product_dtype(x: Tensor) -> torch.dtype:
    """Of the scratches: float16 where x has 16 bits, their values scaled to fit, for its 3 bits more than bfloat16."""
    return torch.float32 if x.dtype == torch.float32 else torch.float16


def banded(positions: int, width: int, tile: Tile) -> tuple[int, int, int]:
    """(bands, positions a band, positions it sees before and after)."""
    band = tile.positions * -(-positions // (tile.positions * tile.bands))
    bands = -(-positions // band)
    return bands, band, width + 1 if bands > 1 else 0


class ForwardPlan(NamedTuple):
    forward: Launch
    scratch: tuple[int, int, int]
    bands: int
    band: int
    gram: Launch | None = None  # the next two where G has a kernel of its own
    gram_parts: tuple[int, int, int, int] = (0, 0, 0, 0)


def forward_plan(problem: Problem, training: bool, tile: Tile | None) -> ForwardPlan:
    images, chs, height, width, *_ = problem
    positions, samples = problem.positions, problem.samples
    tile = tile or forward_tile(chs, positions, problem.dtype, training)
    blocks = -(-chs // tile.channels)
    constants = problem.product_constants(tile) | {"STRIDE": problem.stride, "STEP": tile.step or tile.positions}
    if tile.spatial and not training:
        scalars: tuple[Any, ...] = (height, width, problem.eps, ROWS_BELOW)
        del constants["RP"]
        forward = Launch(spatial_forward, (blocks, 1, images), scalars, constants, tile)
        return ForwardPlan(forward, (images * blocks, positions + 9, tile.channels), 1, positions)
    gram, parts = None, 0
    if tile.gram_parts:
        # of more than 64 compact channels, 256 positions a step would not fit into shared memory
        step = min(tile.gram_positions, 128) if compact_width(problem.compact_chs) > 64 else tile.gram_positions
        gram_tile = replace(tile, positions=step, bands=tile.gram_parts, stages=tile.gram_stages)
        parts, part, _ = banded(samples, width, gram_tile)
        gram_constants = problem.product_constants(gram_tile) | {"STRIDE": problem.stride}
        gram = Launch(
            gram_kernel, (blocks, parts, images), (height, width, samples, part), gram_constants, gram_tile
        )  # fmt: skip
    bands, band, halo = banded(positions, width, tile)
    forward = Launch(
        lightnl_forward,
        (blocks, bands, images),
        (height, width, samples, band, halo, problem.eps, ROWS_BELOW),
        constants | {"TRAINING": training, "GRAM_PARTS": parts},
        tile,
    )
    scratch = (images * bands * blocks, band + 2 * halo + 9, tile.channels)
    return ForwardPlan(forward, scratch, bands, band, gram, (images, parts, problem.compact_chs, chs))


@lru_cache(PLANS)
def inference_plan(problem: Problem, tile: Tile | None, kinds: tuple[Any, ...]) -> ForwardPlan:
    return forward_plan(problem, False, tile)


def run_forward(
    plan: ForwardPlan, run: Run, x: Tensor, out: Tensor, weight: Tensor, norm: tuple[Tensor | None, ...],
    gram: Tensor | None = None, moments: Tensor | None = None,
) -> None:  # fmt: skip
    scratch = x.new_empty(plan.scratch, dtype=product_dtype(x))
    if plan.forward.kernel is spatial_forward:
        run(plan.forward, x, out, scratch, weight, *norm)
        return
    parts = None
    if plan.gram is not None:
        parts = x.new_empty(plan.gram_parts, dtype=torch.float32)
        run(plan.gram, x, parts)
    run(plan.forward, x, out, scratch, weight, *norm, parts, gram, moments)


def inference(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor, Tensor, Tensor], compact_chs: int, stride: int, eps: float,
    run: Run = run_again, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """z = BN(DepthwiseConv3x3(y)) + x; norm: the BN's gamma and beta, running mean and variance."""
    plan, run = plan_for(inference_plan, run, x, (weight, *norm), problem_of(x, compact_chs, stride, eps), tile)
    z = torch.empty_like(x)
    run_forward(plan, run, x, z, weight, norm)
    return z


class Saved(NamedTuple):
    """What the backward pass needs."""

    x: Tensor
    u: Tensor  # DepthwiseConv3x3(y)
    gram: Tensor  # (N, Cr, C) float32
    statistics: Tensor  # (2, C) float32: mean and biased variance of u
    weight: Tensor
    gamma: Tensor


class TrainingPlan(NamedTuple):
    forward: ForwardPlan
    statistics: Launch
    normalise: Launch


@lru_cache(PLANS)
def training_plan(
    problem: Problem, momentum: float, update: bool, tile: Tile | None, kinds: tuple[Any, ...]
) -> TrainingPlan:
    forward = forward_plan(problem, True, tile)
    chs = problem.chs
    scalars = (problem.images * forward.bands, forward.bands, forward.band, problem.positions, momentum)
    merging = Tile(positions=256, channels=8, warps=8)
    constants = {"CHS": chs, "UPDATE": update, "ROWS": merging.positions, "CB": merging.channels}
    statistics = Launch(batch_statistics, (-(-chs // merging.channels), 1, 1), scalars, constants, merging)
    images, positions = problem.as_one_image()
    wide = pass_tile(chs, positions)
    grid = (-(-positions // wide.positions), -(-chs // wide.channels), images)
    normalise = Launch(normalise_add, grid, (positions, problem.eps), problem.constants(wide), wide)
    return TrainingPlan(forward, statistics, normalise)


def training(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, compact_chs: int, stride: int, eps: float,
    running: tuple[Tensor, Tensor, Tensor] | None = None, momentum: float = 0.0,
    run: Run = run_again, tile: Tile | None = None,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """z with batch statistics, and what the backward pass needs.

    running  the BN's running_mean, running_var and num_batches_tracked, to be moved in place
    """
    problem = problem_of(x, compact_chs, stride, eps)
    moved = running or (None, None, None)
    outside = (weight, gamma, beta, *moved)
    plan, run = plan_for(training_plan, run, x, outside, problem, momentum, running is not None, tile)
    images, chs = x.shape[:2]
    u, z = torch.empty_like(x), torch.empty_like(x)
    gram = x.new_empty((images, compact_chs, chs), dtype=torch.float32)
    moments = gram.new_empty((images * plan.forward.bands, 2, chs))
    run_forward(plan.forward, run, x, u, weight, (None, None, None, None), gram, moments)
    statistics = gram.new_empty((2, chs))
    run(plan.statistics, moments, statistics, *moved)
    run(plan.normalise, x, u, z, gamma, beta, statistics)
    return z, Saved(x, u, gram, statistics, weight, gamma)


class BackwardPlan(NamedTuple):
    sums: Launch
    sum_chunks: Launch
    chunks: int
    depthwise: Launch
    bands: int
    scratch: tuple[int, int, int]
    input: Launch
    sum_taps: Launch


def sum_launch(rows: int, columns: int, inner: int) -> Launch:
    """Sums over the first axis. torch.sum takes three times as long for a few thousand columns."""
    tile = Tile(positions=128, channels=32, warps=8)
    constants = {"ROWS": tile.positions, "COLUMNS": tile.channels}
    return Launch(sum_rows, (-(-columns // tile.channels), 1, 1), (rows, columns, inner), constants, tile)


@lru_cache(PLANS)
def backward_plan(problem: Problem, tile: Tile | None, input_tile: Tile | None, kinds: tuple[Any, ...]) -> BackwardPlan:
    images, chs, height, width, *_ = problem
    positions = problem.positions
    long_images, long_positions = problem.as_one_image()
    wide = pass_tile(chs, long_positions)
    chunk = long_positions
    if long_images == 1:
        chunk = wide.positions * -(-long_positions // (wide.positions * CHUNKS))
    chunks = -(-long_positions // chunk)
    grid = (chunks, -(-chs // wide.channels), long_images)
    sums = Launch(norm_backward_sums, grid, (long_positions, chunk, problem.eps), problem.constants(wide), wide)

    tile = tile or depthwise_backward_tile(chs, positions, problem.dtype)
    blocks = -(-chs // tile.channels)
    bands, band, halo = banded(positions, width, tile)
    depthwise = Launch(
        depthwise_backward,
        (blocks, bands, images),
        (height, width, band, halo, images * positions, problem.eps, ROWS_BELOW),
        problem.product_constants(tile) | {"STEP": tile.step or tile.positions},
        tile,
    )
    scratch = (images * bands * blocks, 2 * band + 2 * halo + 9, tile.channels)

    input_tile = input_tile or input_backward_tile(chs, positions, problem.dtype)
    grid = (-(-positions // input_tile.positions), images, 1)
    constants = problem.product_constants(input_tile) | {"STRIDE": problem.stride}
    inputs = Launch(input_backward, grid, (height, width, bands), constants, input_tile)
    chunks *= long_images
    sum_chunks, sum_taps = sum_launch(chunks, 3 * chs, 3 * chs), sum_launch(images * bands, 9 * chs, chs)
    return BackwardPlan(sums, sum_chunks, chunks, depthwise, bands, scratch, inputs, sum_taps)


def training_backward(
    dz: Tensor, saved: Saved, stride: int, eps: float,
    run: Run = run_again, tile: Tile | None = None, input_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and weight, and (3, C): of beta, of gamma, and the sum of dz^2."""
    x, u, gram, statistics, weight, gamma = saved
    images, compact_chs, chs = gram.shape
    problem = problem_of(x, compact_chs, stride, eps)
    dz = dz.contiguous(memory_format=torch.channels_last if problem.channels_last else torch.contiguous_format)
    plan, run = plan_for(backward_plan, run, x, (dz, u, weight, gamma), problem, tile, input_tile)
    partial_sums = gram.new_empty((plan.chunks, 3, chs))
    run(plan.sums, dz, u, statistics, partial_sums)
    sums = gram.new_empty((3, chs))  # d_beta, d_gamma, sum of dz^2
    run(plan.sum_chunks, partial_sums, sums)

    dx = torch.empty_like(x)
    d_gram = gram.new_empty((images, plan.bands, compact_chs, chs))
    d_taps = gram.new_empty((images * plan.bands, 9, chs))
    scratch = x.new_empty(plan.scratch, dtype=product_dtype(x))
    run(plan.depthwise, dz, u, x, gram, weight, gamma, statistics, sums, dx, d_gram, d_taps, scratch)
    run(plan.input, dz, x, gram, d_gram, dx)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    run(plan.sum_taps, d_taps, d_weight)  # (9, C) -> (C, 1, 3, 3)
    return dx, d_weight, sums

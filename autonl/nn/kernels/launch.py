"""What a pass launches: grids, buffers and tiles. Plain functions of tensors: `ops` makes operators of them.

What can be known from shapes and dtypes is settled once, in a plan, which `passes` carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autonl.nn.kernels.backward import (
    depthwise_backward,
    input_backward,
    norm_backward_sums,
    sum_norm_gradients,
)
from autonl.nn.kernels.forward import batch_statistics, gram_kernel, lightnl_forward, normalise_add, spatial_forward
from autonl.nn.kernels.gathered import gathered_forward, gathered_weights
from autonl.nn.kernels.gathered_backward import gathered_backward, gathered_input_backward
from autonl.nn.kernels.passes import PLANS, Buffers, Launch, Plan, Run, carry_out, plan_for, run_again, run_traced
from autonl.nn.kernels.tiles import (
    Tile,
    compact_width,
    depthwise_backward_tile,
    forward_tile,
    input_backward_tile,
    pass_tile,
    power_of_two,
)

ROWS_BELOW = 2  # the end of range(-1, 2) over the rows of a 3x3 kernel, handed over at run time
CHUNKS = 512  # programs that share the sums of the BN's backward pass, about four a multiprocessor
TILES = 4  # a step of theirs: loads that are under way at once


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
    energy_eps: float  # what is added to the energy that G is divided by; 0: G is not divided

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
        width = compact_width(self.compact_chs)
        known = {"COMPACT": self.compact_chs, "STRIDE": self.stride, "ENERGY_EPS": self.energy_eps, "RP": width}
        return self.constants(tile) | known

    def gathered_constants(self, tile: Tile) -> dict[str, Any]:
        """For kernels with products of the compact channels around a position."""
        few = {"RP": power_of_two(self.compact_chs, 8, 128), "WIDE": compact_width(self.compact_chs)}
        return self.product_constants(tile) | few


def problem_of(x: Tensor, compact_chs: int, stride: int, eps: float, energy_eps: float) -> Problem:
    images, chs, height, width = x.shape
    channels_last = not x.is_contiguous()  # a map that is both (one channel, one position) counts as contiguous
    return Problem(images, chs, height, width, channels_last, x.dtype, compact_chs, stride, eps, energy_eps)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the scratches: float16 where x has 16 bits, their values scaled to fit, for its 3 bits more than bfloat16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def banded(positions: int, width: int, tile: Tile) -> tuple[int, int, int]:
    """(bands, positions a band, positions it sees before and after)."""
    band = tile.positions * -(-positions // (tile.positions * tile.bands))
    bands = -(-positions // band)
    return bands, band, width + 1 if bands > 1 else 0


class Forward(NamedTuple):
    """The launches that make z for inference, u with its moments for training."""

    launches: list[Launch]
    buffers: Buffers
    bands: int
    band: int


def forward_launches(problem: Problem, training: bool, tile: Tile | None) -> Forward:
    images, chs, height, width, *_ = problem
    positions, samples = problem.positions, problem.samples
    tile = tile or forward_tile(images, chs, problem.compact_chs, positions, problem.dtype, training)
    if tile.gathered:
        return gathered_launches(problem, training, tile)
    blocks = -(-chs // tile.channels)
    constants = problem.product_constants(tile) | {"STEP": tile.step or tile.positions}
    scratch_dtype = product_dtype(problem.dtype)
    if tile.spatial and not training:
        scalars: tuple[Any, ...] = (height, width, problem.eps, ROWS_BELOW)
        tensors = "x out scratch weight gamma beta mean variance"
        forward = Launch(spatial_forward, tensors, (blocks, 1, images), scalars, constants, tile)
        shape = (images * blocks, positions + 9, tile.channels)
        return Forward([forward], {"scratch": (shape, scratch_dtype)}, 1, positions)
    launches, parts = [], 0
    buffers: Buffers = {}
    if tile.gram_parts:
        # of more than 64 compact channels, 256 positions a step would not fit into shared memory
        step = min(tile.gram_positions, 128) if compact_width(problem.compact_chs) > 64 else tile.gram_positions
        gram_tile = replace(tile, positions=step, bands=tile.gram_parts, registers=0)
        parts, part, _ = banded(samples, width, gram_tile)
        scalars, known = (height, width, samples, part), problem.product_constants(gram_tile)
        launches.append(Launch(gram_kernel, "x gram_parts", (blocks, parts, images), scalars, known, gram_tile))
        buffers["gram_parts"] = ((images, parts, problem.compact_chs, chs), torch.float32)
    bands, band, halo = banded(positions, width, tile)
    norm, moments = ("- - - -", "gram moments") if training else ("gamma beta mean variance", "- -")
    launches.append(
        Launch(
            lightnl_forward,
            f"x out scratch weight {norm} {'gram_parts' if parts else '-'} {moments}",
            (blocks, bands, images),
            (height, width, samples, band, halo, problem.eps, ROWS_BELOW),
            constants | {"TRAINING": training, "GRAM_PARTS": parts},
            tile,
        )
    )
    buffers["scratch"] = ((images * bands * blocks, band + 2 * halo + 9, tile.channels), scratch_dtype)
    return Forward(launches, buffers, bands, band)


def gathered_launches(problem: Problem, training: bool, tile: Tile) -> Forward:
    """The same with the depthwise kernel inside the product."""
    images, chs, height, width, *_ = problem
    norm = "- - - - gram" if training else "gamma beta mean variance -"
    tile = replace(tile, channels=power_of_two(chs, 16, 1024))
    gram_tile = replace(tile, positions=tile.gram_positions, registers=0)
    launches, made = [], "- -"
    buffers: Buffers = {}
    known = {"TRAINING": training, "GRAM_PARTS": tile.gram_parts, "GRAM_P": tile.gram_positions}
    if tile.gram_parts:
        made = "products factors"
        scalars: tuple[Any, ...] = (height, width, problem.samples, problem.eps)
        constants = problem.gathered_constants(gram_tile) | known
        tensors = f"x weight {norm} {made}"
        launches.append(Launch(gathered_weights, tensors, (1, 1, images), scalars, constants, gram_tile))
        rows = 9 * constants["RP"]
        buffers = {"products": ((images, rows, chs), problem.dtype), "factors": ((images,), torch.float32)}
    bands, band, _ = banded(problem.positions, width, tile)
    tensors = f"x out {made} weight {norm} {'moments' if training else '-'}"
    constants = problem.gathered_constants(tile) | known
    scalars = (height, width, problem.samples, band, problem.eps)
    launches.append(Launch(gathered_forward, tensors, (1, bands, images), scalars, constants, tile))
    return Forward(launches, buffers, bands, band)


@lru_cache(PLANS)
def inference_plan(problem: Problem, tile: Tile | None, kinds: tuple[Any, ...]) -> Plan:
    launches, buffers, *_ = forward_launches(problem, False, tile)
    return Plan("x out weight gamma beta mean variance", buffers, launches)


def inference(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor, Tensor, Tensor], compact_chs: int, stride: int, eps: float,
    energy_eps: float, run: Run = run_again, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """z = BN(DepthwiseConv3x3(y)) + x; norm: the BN's gamma and beta, running mean and variance."""
    problem = problem_of(x, compact_chs, stride, eps, energy_eps)
    plan = plan_for(inference_plan, run, x, (weight, *norm), problem, tile)
    z = torch.empty_like(x)
    carry_out(plan, run, (x, z, weight, *norm))
    return z


class Saved(NamedTuple):
    """What the backward pass needs."""

    x: Tensor
    u: Tensor  # DepthwiseConv3x3(y)
    gram: Tensor  # (N, Cr, C) float32, not divided by an energy
    statistics: Tensor  # (2, C) float32: mean and biased variance of u
    weight: Tensor
    gamma: Tensor


@lru_cache(PLANS)
def training_plan(
    problem: Problem, momentum: float, update: bool, normalise: bool, tile: Tile | None, kinds: tuple[Any, ...]
) -> Plan:
    """update: move the running statistics too; normalise: make z too."""
    launches, buffers, bands, band = forward_launches(problem, True, tile)
    chs = problem.chs
    buffers["moments"] = ((problem.images * bands, 2, chs), torch.float32)
    scalars = (problem.images * bands, bands, band, problem.positions, momentum)
    merging = Tile(positions=256, channels=8, warps=8)
    constants = {"CHS": chs, "UPDATE": update, "ROWS": merging.positions, "CB": merging.channels}
    tensors = "moments statistics running_mean running_variance batches_tracked"
    launches.append(Launch(batch_statistics, tensors, (-(-chs // merging.channels), 1, 1), scalars, constants, merging))
    if normalise:
        images, positions = problem.as_one_image()
        wide = pass_tile(chs, positions)
        grid = (-(-positions // wide.positions), -(-chs // wide.channels), images)
        tensors = "x out z gamma beta statistics"
        launches.append(Launch(normalise_add, tensors, grid, (positions, problem.eps), problem.constants(wide), wide))
    outside = "x out z gram statistics weight gamma beta running_mean running_variance batches_tracked"
    return Plan(outside, buffers, launches)


def training(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, compact_chs: int, stride: int, eps: float,
    energy_eps: float, running: Sequence[Tensor] | None = None, momentum: float = 0.0,
    run: Run = run_again, tile: Tile | None = None,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """z with batch statistics, and what the backward pass needs.

    running  the BN's running_mean, running_var and num_batches_tracked, to be moved in place
    """
    problem = problem_of(x, compact_chs, stride, eps, energy_eps)
    outside = (weight, gamma, beta, *(running or (None, None, None)))
    traced = run is run_traced  # torch.compile then makes z together with what is added to it next
    plan = plan_for(training_plan, run, x, outside, problem, momentum, running is not None, not traced, tile)
    u, z = torch.empty_like(x), None if traced else torch.empty_like(x)
    gram = x.new_empty((problem.images, compact_chs, problem.chs), dtype=torch.float32)
    statistics = x.new_empty((2, problem.chs), dtype=torch.float32)
    carry_out(plan, run, (x, u, z, gram, statistics, *outside))
    if z is None:
        z = normalised(x, u, gamma, beta, statistics, eps)
    return z, Saved(x, u, gram, statistics, weight, gamma)


def normalised(x: Tensor, u: Tensor, gamma: Tensor, beta: Tensor, statistics: Tensor, eps: float) -> Tensor:
    """What `normalise_add` does."""
    mean, variance = statistics.unbind()
    scale = gamma.float() * torch.rsqrt(variance + eps)  # (C,)
    shift = beta.float() - mean * scale
    branch = u.float() * scale[:, None, None] + shift[:, None, None]  # (N, C, H, W)
    return (x.float() + branch).to(x.dtype)


@lru_cache(PLANS)
def backward_plan(problem: Problem, tile: Tile | None, input_tile: Tile | None, kinds: tuple[Any, ...]) -> Plan:
    images, chs, height, width, *_ = problem
    positions = problem.positions
    long_images, long_positions = problem.as_one_image()
    wide = pass_tile(chs, long_positions, 1024)
    step = wide.positions * TILES
    chunk = step * -(-long_positions // (step * CHUNKS)) if long_images == 1 else long_positions
    chunks = -(-long_positions // chunk)
    grid = (chunks, -(-chs // wide.channels), long_images)
    scalars: tuple[Any, ...] = (long_positions, chunk, problem.eps)
    tensors = "dz u statistics partial_sums"
    constants = problem.constants(wide) | {"TILES": TILES}
    sums = Launch(norm_backward_sums, tensors, grid, scalars, constants, wide)
    chunks *= long_images
    summing = Tile(positions=128, channels=32, warps=8)  # torch.sum takes three times as long
    constants = {"CHS": chs, "ROWS": summing.positions, "COLUMNS": summing.channels}
    tensors = "partial_sums sums d_beta d_gamma"
    grid = (-(-3 * chs // summing.channels), 1, 1)
    sum_chunks = Launch(sum_norm_gradients, tensors, grid, (chunks,), constants, summing)

    tile = tile or depthwise_backward_tile(chs, problem.compact_chs, positions, problem.dtype)
    input_tile = input_tile or input_backward_tile(chs, positions, problem.dtype)
    blocks = -(-chs // tile.channels)
    bands, band, halo = banded(positions, width, tile)
    buffers: Buffers = {
        "partial_sums": ((chunks, 3, chs), torch.float32),
        "sums": ((3, chs), torch.float32),
        "d_gram": ((images, bands, problem.compact_chs, chs), torch.float32),
        "d_taps": ((images * bands, 9, chs), torch.float32),
    }
    if tile.gathered:
        buffers["du"] = ((images, positions, chs), product_dtype(problem.dtype))
        buffers["taps"] = ((9, chs), product_dtype(problem.dtype))
        buffers["steepness"] = ((chs,), torch.float32)
        depthwise = Launch(
            gathered_backward,
            "dz u x gram weight gamma statistics sums du taps steepness d_gram d_taps",
            (blocks, bands, images),
            (height, width, band, images * positions, problem.eps),
            problem.gathered_constants(tile),
            tile,
        )
        whole = replace(input_tile, channels=power_of_two(chs, 16, 1024))
        input_bands, input_band, _ = banded(positions, width, whole)
        constants, scalars = problem.product_constants(whole), (height, width, bands, input_band, ROWS_BELOW)
        tensors = "dz x gram d_gram du taps steepness d_taps dx d_weight"
        inputs = Launch(gathered_input_backward, tensors, (1, input_bands, images), scalars, constants, whole)
    else:
        shape = (images * bands * blocks, 2 * band + 2 * halo + 9, tile.channels)
        buffers["scratch"] = (shape, product_dtype(problem.dtype))
        depthwise = Launch(
            depthwise_backward,
            "dz u x gram weight gamma statistics sums dx d_gram d_taps scratch",  # dy lies where dx will
            (blocks, bands, images),
            (height, width, band, halo, images * positions, problem.eps, ROWS_BELOW),
            problem.product_constants(tile) | {"STEP": tile.step or tile.positions},
            tile,
        )
        grid = (-(-positions // input_tile.positions), images, 1)
        constants, scalars = problem.product_constants(input_tile), (height, width, bands)
        inputs = Launch(input_backward, "dz x gram d_gram d_taps dx d_weight", grid, scalars, constants, input_tile)
    outside = "x dz u gram statistics weight gamma dx d_weight d_gamma d_beta"
    return Plan(outside, buffers, [sums, sum_chunks, depthwise, inputs])


def training_backward(
    dz: Tensor, saved: Saved, stride: int, eps: float, energy_eps: float,
    run: Run = run_again, tile: Tile | None = None, input_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, gamma and beta."""
    x, u, gram, statistics, weight, gamma = saved
    problem = problem_of(x, gram.shape[1], stride, eps, energy_eps)
    dz = dz.contiguous(memory_format=torch.channels_last if problem.channels_last else torch.contiguous_format)
    plan = plan_for(backward_plan, run, x, (dz, weight, gamma), problem, tile, input_tile)
    dx = torch.empty_like(x)
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    d_gamma, d_beta = torch.empty_like(gamma), torch.empty_like(gamma)
    carry_out(plan, run, (x, dz, u, gram, statistics, weight, gamma, dx, d_weight, d_gamma, d_beta))
    return dx, d_weight, d_gamma, d_beta

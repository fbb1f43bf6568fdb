"""BN with its activation, for training: plans of `norm_act`'s kernels, and the operators made of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import triton_op

from autonl.nn.kernels.norm_act import (
    moment_sums,
    norm_act_input,
    norm_gradients,
    norm_statistics,
    normalise_act,
    slope_sums,
)
from autonl.nn.kernels.passes import (
    PLANS,
    Buffers,
    Launch,
    Plan,
    Run,
    carry_out,
    is_plain,
    plan_for,
    run_again,
    run_traced,
)
from autonl.nn.kernels.tiles import Tile, power_of_two

SUMMING = Tile(positions=512, channels=8, warps=8)
PROGRAMS = 528  # that share a sum over all rows: four a multiprocessor of an H200
VALUES, SUM_VALUES, SUM_TILES = 4096, 4096, 1


class Problem(NamedTuple):
    rows: int
    chs: int
    act: str
    eps: float

    @property
    def total(self) -> int:
        return self.rows * self.chs


class Division(NamedTuple):
    """How rows of channels are cut into tiles, see `norm_act`."""

    line: int  # rows a line
    width: int  # columns a tile
    blocks: int  # tiles that are a line
    lines: int

    def grid(self, tile_rows: int) -> tuple[int, int, int]:
        return (self.blocks * -(-self.lines // tile_rows), 1, 1)  # the first axis of a CUDA grid is the long one


def division_of(problem: Problem) -> Division:
    """The narrowest tile that is 80 % full, of whole cache lines."""
    rows, chs, *_ = problem
    if chs % 64 == 0:
        width = 128 if chs % 128 == 0 else 64
        return Division(1, width, chs // width, rows)
    fullest = [(width // chs * chs / width, width) for width in (128, 256, 512, 1024, 2048) if chs <= width]
    width = next((width for full, width in fullest if full > 0.8), max(fullest)[1]) if fullest else 1024
    line = max(width // chs, 1)
    return Division(line, width, -(-chs * line // width), -(-rows // line))


def chunks_of(division: Division, tile_rows: int) -> tuple[int, int]:
    """(lines a program, programs)."""
    most = max(PROGRAMS // division.blocks, 1)
    chunk = tile_rows * -(-division.lines // (most * tile_rows))
    return chunk, -(-division.lines // chunk)


@lru_cache(PLANS)
def training_plan(problem: Problem, momentum: float, update: bool, kinds: tuple[Any, ...]) -> Plan:
    rows, chs, act, eps = problem
    division = division_of(problem)
    tile = Tile(power_of_two(1, SUM_VALUES // division.width, SUM_VALUES), division.width, warps=4)
    chunk, chunks = chunks_of(division, tile.positions * SUM_TILES)
    constants = {"R": tile.positions, "W": tile.channels, "TILES": SUM_TILES, "ACT": act}
    scalars: tuple[Any, ...] = (problem.total // 8, chs // 8, division.line, chunk)
    sums = Launch(moment_sums, "x partial_sums", (division.blocks, chunks, 1), scalars, constants, tile)
    merging = {"UPDATE": update, "ROWS": SUMMING.positions, "CB": SUMMING.channels}
    tensors = "x partial_sums statistics running_mean running_variance batches_tracked"
    scalars = (chunks * division.line, division.line, chs // 8, rows, momentum)
    merge = Launch(norm_statistics, tensors, (-(-chs // SUMMING.channels), 1, 1), scalars, merging, SUMMING)
    wide = Tile(power_of_two(1, VALUES // division.width, VALUES), division.width, warps=4)
    constants = {"R": wide.positions, "W": wide.channels, "ACT": act}
    scalars = (problem.total // 8, chs // 8, division.line, division.blocks, eps)
    make = Launch(normalise_act, "x y gamma beta statistics", division.grid(wide.positions), scalars, constants, wide)
    buffers: Buffers = {"partial_sums": ((chunks, 2, division.line * chs), torch.float32)}
    outside = "x y statistics gamma beta running_mean running_variance batches_tracked"
    return Plan(outside, buffers, [sums, merge, make])


def training(
    x: Tensor, gamma: Tensor, beta: Tensor, act: str, eps: float,
    running: tuple[Tensor, Tensor, Tensor] | None = None, momentum: float = 0.0, run: Run = run_again,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and (2, C) mean and biased variance."""
    problem = problem_of(x, act, eps)
    outside = (gamma, beta, *(running or (None, None, None)))
    plan = plan_for(training_plan, run, x, outside, problem, momentum, running is not None)
    y = torch.empty_like(x)
    statistics = x.new_empty((2, problem.chs), dtype=torch.float32)
    carry_out(plan, run, (x, y, statistics, *outside))
    return y, statistics


def problem_of(x: Tensor, act: str, eps: float) -> Problem:
    images, chs, height, width = x.shape
    return Problem(images * height * width, chs, act, eps)


@lru_cache(PLANS)
def backward_plan(problem: Problem, kinds: tuple[Any, ...]) -> Plan:
    rows, chs, act, eps = problem
    division = division_of(problem)
    tile = Tile(power_of_two(1, SUM_VALUES // division.width, SUM_VALUES), division.width, warps=4)
    chunk, chunks = chunks_of(division, tile.positions * SUM_TILES)
    constants = {"R": tile.positions, "W": tile.channels, "TILES": SUM_TILES, "ACT": act}
    scalars: tuple[Any, ...] = (problem.total // 8, chs // 8, division.line, chunk, eps)
    tensors = "dy x gamma beta statistics partial_sums"
    slopes = Launch(slope_sums, tensors, (division.blocks, chunks, 1), scalars, constants, tile)
    merging = {"ROWS": SUMMING.positions, "CB": SUMMING.channels}
    scalars = (chunks * division.line, division.line, chs // 8)
    tensors = "partial_sums sums d_beta d_gamma"
    merge = Launch(norm_gradients, tensors, (-(-chs // SUMMING.channels), 1, 1), scalars, merging, SUMMING)
    wide = Tile(power_of_two(1, VALUES // division.width, VALUES), division.width, warps=4)
    constants = {"R": wide.positions, "W": wide.channels, "ACT": act}
    scalars = (problem.total // 8, chs // 8, division.line, division.blocks, rows, eps)
    tensors = "dy x dx gamma beta statistics sums"
    inputs = Launch(norm_act_input, tensors, division.grid(wide.positions), scalars, constants, wide)
    buffers: Buffers = {
        "partial_sums": ((chunks, 2, division.line * chs), torch.float32),
        "sums": ((2, chs), torch.float32),
    }
    return Plan("x dy gamma beta statistics dx d_gamma d_beta", buffers, [slopes, merge, inputs])


def training_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, statistics: Tensor, act: str, eps: float, run: Run = run_again
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gamma and beta."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    plan = plan_for(backward_plan, run, x, (dy, gamma, beta), problem_of(x, act, eps))
    dx, d_gamma, d_beta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(beta)
    carry_out(plan, run, (x, dy, gamma, beta, statistics, dx, d_gamma, d_beta))
    return dx, d_gamma, d_beta


def norm_act(x: Tensor, bn: nn.BatchNorm2d, act: str) -> Tensor:
    running: Any = (bn.running_mean, bn.running_var, bn.num_batches_tracked)
    momentum = bn.momentum or 0.0
    if is_plain(x):
        return Training.apply(x, bn.weight, bn.bias, Settings(running, momentum, act, bn.eps))
    # an operator with a gradient must not change its inputs: the running statistics move out here
    y, statistics = norm_act_training(x, bn.weight, bn.bias, act, bn.eps)
    count = x.shape[0] * x.shape[2] * x.shape[3]
    move(running, statistics, momentum, count)
    return y


def move(running: tuple[Tensor, Tensor, Tensor], statistics: Tensor, momentum: float, count: int) -> None:
    running_mean, running_variance, batches_tracked = running
    mean, variance = statistics.unbind()
    with torch.no_grad():
        batches_tracked.add_(1)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_variance.lerp_((variance * (count / (count - 1))).to(running_variance.dtype), momentum)


class Settings(NamedTuple):
    running: tuple[Tensor, Tensor, Tensor]
    momentum: float
    act: str
    eps: float


class Training(torch.autograd.Function):
    """Eager mode: one node, and running statistics moved by the kernel that has the new ones at hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, settings: Settings) -> Tensor:
        running, momentum, act, eps = settings
        y, statistics = training(x, gamma, beta, act, eps, running, momentum)
        ctx.save_for_backward(x, gamma, beta, statistics)
        ctx.known = act, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        function = once_differentiable(Training.gradients) if torch.is_grad_enabled() else Training.gradients
        return *function(ctx, dy), None

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return training_backward(dy, *ctx.saved_tensors, *ctx.known)


@triton_op("autonl::norm_act_training", mutates_args=())
def norm_act_training(x: Tensor, gamma: Tensor, beta: Tensor, act: str, eps: float) -> tuple[Tensor, Tensor]:
    return training(x, gamma, beta, act, eps, run=run_traced)


@triton_op("autonl::norm_act_training_backward", mutates_args=())
def norm_act_training_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, statistics: Tensor, act: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return training_backward(dy, x, gamma, beta, statistics, act, eps, run_traced)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, beta, *ctx.known = inputs
    ctx.save_for_backward(x, gamma, beta, output[1])
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, dy: Tensor, unused: Tensor) -> tuple[Any, ...]:
    return *norm_act_training_backward(dy, *ctx.saved_tensors, *ctx.known), None, None


norm_act_training.register_autograd(backward, setup_context=setup_context)

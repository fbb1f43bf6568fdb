"""BN with its activation, for training: plans of `norm_act`'s kernels, and the gradient made of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autonl.nn.kernels import norm_tensors
from autonl.nn.kernels.norm_act import (
    moments,
    norm_act_input,
    norm_gradients,
    norm_statistics,
    normalise_act,
    slope_sums,
)
from autonl.nn.kernels.passes import PLANS, Buffers, Launch, Plan, Run, carry_out, plan_for, run_again
from autonl.nn.kernels.tiles import Tile, power_of_two

MERGING = Tile(positions=512, channels=8, warps=8)
PROGRAMS = 528  # that share a sum over all rows: four a multiprocessor of an H200
VALUES = 4096  # a tile
MOST_VALUES = 2**30  # that a program sums over: it counts them in 32 bits


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

    @property
    def tile(self) -> Tile:
        return Tile(power_of_two(1, VALUES // self.width, VALUES), self.width, warps=4)

    @property
    def grid(self) -> tuple[int, int, int]:
        """For one tile a program: the first axis of a CUDA grid is the long one."""
        return (self.blocks * -(-self.lines // self.tile.positions), 1, 1)

    def chunks(self) -> tuple[int, int]:
        """(lines a program, programs) for a sum over all lines."""
        at_once, most = self.tile.positions, max(PROGRAMS // self.blocks, 1)
        steps = min(-(-self.lines // (most * at_once)), MOST_VALUES // (at_once * self.width * self.blocks))
        return at_once * steps, -(-self.lines // (at_once * steps))


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


def merging_launch(kernel: Any, tensors: str, chs: int, scalars: tuple[Any, ...]) -> Launch:
    """Of what all chunks have found: a program a block of channels."""
    constants = {"ROWS": MERGING.positions, "CB": MERGING.channels}
    return Launch(kernel, tensors, (-(-chs // MERGING.channels), 1, 1), scalars, constants, MERGING)


@lru_cache(PLANS)
def training_plan(problem: Problem, momentum: float, kinds: tuple[Any, ...]) -> Plan:
    rows, chs, act, eps = problem
    division, eighth, eighths = division_of(problem), chs // 8, problem.total // 8
    line, tile, (chunk, chunks) = division.line, division.tile, division.chunks()
    known: dict[str, Any] = {"R": tile.positions, "W": tile.channels}
    scalars: tuple[Any, ...] = (eighths, eighth, line, chunk)
    parts = Launch(moments, "x parts", (division.blocks, chunks, 1), scalars, known, tile)
    tensors = "parts statistics running_mean running_variance batches_tracked"
    merge = merging_launch(norm_statistics, tensors, chs, (chunks * line, line, chunk, eighth, rows, momentum))
    known |= {"ACT": act}
    scalars = (eighths, eighth, line, division.blocks, eps)
    make = Launch(normalise_act, "x y gamma beta statistics", division.grid, scalars, known, tile)
    buffers: Buffers = {"parts": ((chunks, 2, line * chs), torch.float32)}
    outside = "x y statistics gamma beta running_mean running_variance batches_tracked"
    return Plan(outside, buffers, [parts, merge, make])


def training(
    x: Tensor, gamma: Tensor, beta: Tensor, act: str, eps: float,
    running: Sequence[Tensor], momentum: float, run: Run = run_again,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and (2, C) mean and biased variance.

    running  the BN's running_mean, running_var and num_batches_tracked, which are moved in place
    """
    problem = problem_of(x, act, eps)
    outside = (gamma, beta, *running)
    plan = plan_for(training_plan, run, x, outside, problem, momentum)
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
    division, eighth, eighths = division_of(problem), chs // 8, problem.total // 8
    line, tile, (chunk, chunks) = division.line, division.tile, division.chunks()
    known = {"R": tile.positions, "W": tile.channels, "ACT": act}
    scalars: tuple[Any, ...] = (eighths, eighth, line, chunk, eps)
    parts = Launch(slope_sums, "dy x gamma beta statistics parts", (division.blocks, chunks, 1), scalars, known, tile)
    merge = merging_launch(norm_gradients, "parts sums d_beta d_gamma", chs, (chunks * line, line, eighth))
    scalars = (eighths, eighth, line, division.blocks, rows, eps)
    inputs = Launch(norm_act_input, "dy x dx gamma beta statistics sums", division.grid, scalars, known, tile)
    buffers: Buffers = {"parts": ((chunks, 2, line * chs), torch.float32), "sums": ((2, chs), torch.float32)}
    return Plan("x dy gamma beta statistics dx d_gamma d_beta", buffers, [parts, merge, inputs])


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
    """In eager mode: under torch.compile its own kernels do the same."""
    gamma, beta, *running = norm_tensors(bn)
    return Training.apply(x, gamma, beta, Settings(running, bn.momentum or 0.0, act, bn.eps))


class Settings(NamedTuple):
    running: Sequence[Tensor]  # mean, variance, number of batches
    momentum: float
    act: str
    eps: float


class Training(torch.autograd.Function):
    """One node, and running statistics moved by the kernel that has the new ones at hand."""

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

"""A depthwise convolution for training: plans of `depthwise`'s kernels, and the operators made of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import triton_op

from autonl.nn.kernels import is_plain
from autonl.nn.kernels.depthwise import (
    depthwise_forward,
    depthwise_input,
    depthwise_sums,
    depthwise_weight,
    transposed_taps,
)
from autonl.nn.kernels.passes import PLANS, Buffers, Launch, Plan, Run, carry_out, plan_for, run_again, run_traced
from autonl.nn.kernels.tiles import Tile


class Problem(NamedTuple):
    images: int
    chs: int
    height: int
    width: int
    kernel: int
    stride: int

    @property
    def out_size(self) -> tuple[int, int]:
        return -(-self.height // self.stride), -(-self.width // self.stride)


class Choice(NamedTuple):
    """How the kernels divide their work."""

    rows: int  # of y, or of dx where the stride is 1, that a program makes
    warps: int  # with 32 vectors of a row each
    pairs: int  # of rows of dx that a program makes where the stride is 2
    weight_rows: int  # of dy at once
    columns: int  # of dy at once
    channels: int  # of dw that a program makes; eight values of a row of dy are a thread's
    wide: int  # columns of taps a program
    programs: int  # that share dw, about


def problem_of(x: Tensor, weight: Tensor, stride: int) -> Problem:
    images, chs, height, width = x.shape
    return Problem(images, chs, height, width, weight.shape[-1], stride)


def choice_for(problem: Problem) -> Choice:
    """Chosen on an H200 at batch 512, in bf16."""
    rows, columns = problem.out_size
    simple, small = problem.stride == 1, problem.kernel == 3
    large = columns > 14
    return Choice(
        rows=least_over(rows, (14, 7, 8, 6) if simple and small else (7, 8, 6)),
        warps=2,
        pairs=least_over(rows, (7, 4)),
        weight_rows=7 if simple and not small else 4,
        columns=32 if large else 16 if columns > 7 else 8,
        channels=64 if columns <= 7 else 16 if large and problem.chs % 32 else 32,
        wide=3 if small else 1 if simple else 2,
        programs=2112 if simple and not small else 1056,  # 16 or 8 a multiprocessor of an H200
    )


def least_over(rows: int, choices: tuple[int, ...]) -> int:
    """The first of those numbers of rows at once that take a map with the fewest rows too many."""
    return min(choices, key=lambda at_once: -(-rows // at_once) * at_once)


def taps_launch(problem: Problem, flipped: bool = False) -> Launch:
    tile = Tile(positions=32, channels=32, warps=4)
    constants = {"TAPS": problem.kernel**2, "FLIPPED": flipped, "CB": tile.channels}
    grid = (-(-problem.chs // tile.channels), 1, 1)
    return Launch(transposed_taps, "weight taps", grid, (problem.chs // 8,), constants, tile)


def map_launch(problem: Problem, choice: Choice, tensors: str = "x taps y") -> Launch:
    images, chs, height, width, kernel, stride = problem
    out_height, out_width = problem.out_size
    tile = Tile(32 * choice.warps, 8, choice.warps)
    grid = (-(-out_width * chs // (8 * tile.positions)), -(-out_height // choice.rows), images)
    constants = {"KS": kernel, "S": stride, "R": choice.rows, "V8": tile.positions}
    scalars = (chs // 8, height, width, out_height, out_width)
    return Launch(depthwise_forward, tensors, grid, scalars, constants, tile)


def input_launches(problem: Problem, choice: Choice) -> list[Launch]:
    images, chs, height, width, kernel, stride = problem
    if stride == 1:  # the forward pass's kernel, and the last of its pass as there: compiled once
        return [taps_launch(problem, flipped=True), map_launch(problem, choice, "dy taps dx")]
    out_height, out_width = problem.out_size
    tile = Tile(32 * choice.warps, 8, choice.warps)
    grid = (-(-out_width * chs // (8 * tile.positions)), -(-out_height // choice.pairs), images)
    constants = {"KS": kernel, "R": choice.pairs, "V8": tile.positions}
    scalars = (chs // 8, height, width, out_height, out_width)
    return [taps_launch(problem), Launch(depthwise_input, "dy taps dx", grid, scalars, constants, tile)]


def weight_launches(problem: Problem, choice: Choice) -> tuple[list[Launch], tuple[int, ...]]:
    """dw in two launches, and the shape of what is between them."""
    images, chs, height, width, kernel, stride = problem
    out_height, out_width = problem.out_size
    tile = Tile(choice.columns, choice.channels, max(choice.columns * choice.channels // 256, 1))
    blocks, band = -(-chs // tile.channels), choice.weight_rows * -(-14 // choice.weight_rows)
    bands = -(-out_height // band)
    blocks *= -(-kernel // choice.wide)
    share = max(1, images * bands * blocks // choice.programs)
    groups = -(-images // share)
    constants = {"KS": kernel, "S": stride, "R": choice.weight_rows, "TW": tile.positions, "CB": tile.channels}
    scalars: tuple[Any, ...] = (chs // 8, height, width, out_height, out_width)
    scalars += (images, share, band, -(-out_width // tile.positions))
    constants["WIDE"] = choice.wide
    products = Launch(depthwise_weight, "x dy parts", (blocks, bands, groups), scalars, constants, tile)
    summing = Tile(positions=32, channels=32, warps=4)
    constants = {"TAPS": kernel**2, "ROWS": summing.positions, "CB": summing.channels}
    grid, entries = (-(-chs // summing.channels), kernel**2, 1), groups * bands
    sums = Launch(depthwise_sums, "parts d_weight", grid, (chs // 8, entries), constants, summing)
    return [products, sums], (entries, kernel**2, chs)


@lru_cache(PLANS)
def forward_plan(problem: Problem, choice: Choice | None, kinds: tuple[Any, ...]) -> Plan:
    choice = choice or choice_for(problem)
    buffers: Buffers = {"taps": ((problem.kernel**2, problem.chs), torch.float32)}
    return Plan("x weight y", buffers, [taps_launch(problem), map_launch(problem, choice)])


@lru_cache(PLANS)
def backward_plan(problem: Problem, choice: Choice | None, kinds: tuple[Any, ...]) -> Plan:
    choice = choice or choice_for(problem)
    weight, parts = weight_launches(problem, choice)
    buffers: Buffers = {"taps": ((problem.kernel**2, problem.chs), torch.float32), "parts": (parts, torch.float32)}
    return Plan("x dy weight dx d_weight", buffers, [*weight, *input_launches(problem, choice)])


def forward(x: Tensor, weight: Tensor, stride: int, run: Run = run_again, choice: Choice | None = None) -> Tensor:
    problem = problem_of(x, weight, stride)
    plan = plan_for(forward_plan, run, x, (weight,), problem, choice)
    shape = (problem.images, problem.chs, *problem.out_size)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    carry_out(plan, run, (x, weight, y))
    return y


def backward(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, run: Run = run_again, choice: Choice | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x and the weight."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    plan = plan_for(backward_plan, run, x, (dy, weight), problem_of(x, weight, stride), choice)
    dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
    carry_out(plan, run, (x, dy, weight, dx, d_weight))
    return dx, d_weight


def depthwise(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if is_plain(x):
        return Depthwise.apply(x, weight, stride)
    return depthwise_convolution(x, weight, stride)


class Depthwise(torch.autograd.Function):
    """Eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return forward(x, weight, stride)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        # with create_graph=True alone gradients are on here; the wrapper costs as much as a launch
        function = once_differentiable(Depthwise.gradients) if torch.is_grad_enabled() else Depthwise.gradients
        return *function(ctx, dy), None

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return backward(x, dy, weight, ctx.stride)


@triton_op("autonl::depthwise", mutates_args=())
def depthwise_convolution(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return forward(x, weight, stride, run_traced)


@triton_op("autonl::depthwise_backward", mutates_args=())
def depthwise_gradients(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return backward(x, dy, weight, stride, run_traced)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return *depthwise_gradients(x, dy, weight, ctx.stride), None


depthwise_convolution.register_autograd(gradients, setup_context=setup_context)

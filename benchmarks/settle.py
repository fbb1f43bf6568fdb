"""What one GPU call of four minutes can settle about LightNL's kernels: which tiles are fastest, and are they right.

Through `python -m benchmarks.lightnl --settle`, which then times every shape with the fastest. What matters most comes
first, and rows are written as they come, so that a call that is cut short leaves what it found:

    settle_tiles.csv    where the table of tiles has alternatives, at ratio 0.25 and stride 1: times in a CUDA graph of
                        the chosen tile, which comes first, and of each alternative; inference at batch 256 with its
                        limit, forward and backward of training at batch 512, the latter twice: "input" has
                        alternatives for its last kernel; nan where this Triton refuses a tile
    settle_errors.csv   every shape with its fastest tiles against float64, forward and all gradients, twice: through
                        Triton's binder and without it
    settle_lightnl.csv  what speed_lightnl.csv holds, with the fastest tiles in place of the table's
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autonl.arch.spec import LightNLSpec
from autonl.nn.kernels import eager, launch, tiles
from autonl.nn.kernels.tiles import Tile
from benchmarks import compile_ahead, graph_us
from benchmarks.lightnl import (
    BATCH,
    COMPILED,
    SHAPES,
    Rows,
    Shape,
    compile_mode,
    limit_us,
    poison,
    random_block,
    random_inputs,
    time_blocks,
)
from tests.nn.test_kernels import BOUNDS, errors

MaybeTile = Tile | None  # None: the table's own
PASSES = {"inference": BATCH, "backward": 512, "input": 512, "forward": 512}  # and the batch each is timed at


class Fastest(dict[tuple[tuple[int, int], str], tuple[float, MaybeTile]]):
    """The time and the tile of what was fastest so far, by map, channels and pass: the table knows no strides."""

    def offer(self, shape: Shape, what: str, us: float, tile: MaybeTile) -> None:
        if us < self.get((shape[:2], what), (inf, None))[0]:
            self[shape[:2], what] = us, tile

    def tile(self, shape: Shape, what: str) -> MaybeTile:
        return self.get((shape[:2], what), (inf, None))[1]


def settle(folder: Path, deadline: float, compiled: bool) -> None:
    """All of it; nothing new is begun after the deadline."""
    times, found = Rows("settle_tiles", folder), Rows("settle_errors", folder)
    fastest = Fastest()
    simple = [shape for shape in SHAPES if shape[2:] == (0.25, 1)]
    open_ones = [(shape, what) for what in PASSES for shape in simple if alternatives(*shape, what)]

    def work(*calls: tuple[Callable[..., None], Any]) -> None:
        for function, *arguments in calls:
            if time.monotonic() > deadline:
                print(f"out of time before {function.__name__} {arguments[0]}")
                return
            function(*arguments)

    jobs: list[tuple[str, Shape, MaybeTile]]  # the longest first
    jobs = [(f"compiled {mode}", shape, None) for mode in COMPILED for shape in SHAPES] if compiled else []
    jobs += [(what, shape, tile) for shape, what in open_ones for tile in alternatives(*shape, what)]
    jobs += [(what, shape, None) for shape in SHAPES for what in PASSES]
    jobs += [("bfloat16", shape, None) for shape in SHAPES]
    compile_ahead(compile_job, jobs)
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    work(*((time_tiles, shape, what, times, fastest) for shape, what in open_ones))
    print_fastest(times)
    work(*((check, shape, found, fastest, "bfloat16") for shape in SHAPES))
    time_blocks(Rows("settle_lightnl", folder), deadline, compiled, lambda shape: table(by_pass(shape, fastest)))
    if time.monotonic() < deadline:
        others = [(dtype, shape, None) for dtype in ("float16", "float32") for shape in SHAPES]
        compile_ahead(compile_job, others)
    work(*((check, shape, found, fastest, "float16") for shape in SHAPES))
    work(*((check, shape, found, Fastest(), "float32") for shape in SHAPES))
    wrong = [row for row in found if not row["worst"] < BOUNDS[row["dtype"]]]
    print(f"{len(wrong)} of {len(found)} rows are beyond their bound:", *wrong, sep="\n")


@contextmanager
def table(found: Mapping[str, MaybeTile]) -> Iterator[None]:
    """These tiles, by pass, in place of the table's."""
    before = launch.forward_tile, launch.depthwise_backward_tile, launch.input_backward_tile

    def forward(*sizes: Any) -> Tile:
        training = sizes[-1]
        return found.get("forward" if training else "inference") or before[0](*sizes)

    launch.forward_tile = forward
    launch.depthwise_backward_tile = lambda *sizes: found.get("backward") or before[1](*sizes)
    launch.input_backward_tile = lambda *sizes: found.get("input") or before[2](*sizes)
    forget_plans()
    try:
        yield
    finally:
        launch.forward_tile, launch.depthwise_backward_tile, launch.input_backward_tile = before
        forget_plans()


def forget_plans() -> None:
    for plans in (launch.inference_plan, launch.training_plan, launch.backward_plan):
        plans.cache_clear()
    eager.KNOWN.clear()


def alternatives(size: int, chs: int, ratio: float, stride: int, what: str) -> list[Tile]:
    """Tiles for 16-bit inputs that may beat the table's for a pass: mostly its neighbours with less work a program.

    What lost on an H200 everywhere is not here: wider blocks of channels, other stages.
    """
    positions = size**2
    sizes = chs, LightNLSpec(ratio, stride).compact_chs(chs), positions
    if what == "input":
        chosen = tiles.input_backward_tile(chs, positions, torch.bfloat16)
    elif what == "backward":
        chosen = tiles.depthwise_backward_tile(*sizes, torch.bfloat16)
    else:
        chosen = tiles.forward_tile(PASSES[what], *sizes, torch.bfloat16, what == "forward")
    found = [replace(chosen, registers=0 if chosen.registers else 96)]
    gathered = chosen.gathered or (what == "input" and tiles.depthwise_backward_tile(*sizes, torch.bfloat16).gathered)
    if gathered:
        found += [replace(chosen, bands=bands) for bands in (chosen.bands - 1, chosen.bands + 1) if bands]
        if what in ("inference", "forward"):  # what makes G waits for what it loads: more of it at once
            found += [replace(chosen, gram_positions=step) for step in (64, 128, 256)]
            narrow, wide = (replace(chosen, positions=16 * warps, warps=warps) for warps in (4, 8))
            found += [replace(tile, bands=1, gram_parts=0) for tile in (narrow, wide)]
            found += [replace(narrow, bands=bands, gram_parts=1) for bands in (1, 2, 3)]
    else:
        found += [replace(chosen, bands=chosen.bands - 1)] if chosen.bands > 1 and what != "input" else []
        found += [replace(chosen, channels=chosen.channels // 2)] if chosen.channels > 16 else []
        found += [replace(chosen, warps=2 if chosen.warps == 4 else 4)]
        step = chosen.step or chosen.positions
        found += [replace(chosen, step=step // 2)] if what != "input" and step > 16 else []
    return [tile for tile in dict.fromkeys(found) if tile != chosen]


def by_pass(shape: Shape, fastest: Fastest) -> dict[str, MaybeTile]:
    return {what: fastest.tile(shape, what) for what in PASSES}


def compile_job(kind: str, shape: Shape, tile: MaybeTile) -> None:
    """For the compilers' caches: a pass with a tile, the step by torch.compile, or what a check in a dtype needs."""
    if kind.startswith("compiled"):
        compile_mode(kind.split()[1], shape)
    elif kind in PASSES:
        for dtype in (torch.bfloat16, torch.float32):  # of the weights: as timed, and as checked
            run, inputs = prepare(shape, kind, 16, dtype)
            run(inputs[0], tile)
    else:
        block_errors(shape, kind, {})


def block_errors(shape: Shape, dtype: str, found: dict[str, MaybeTile]) -> dict[str, float]:
    size, chs, ratio, stride = shape
    with table(found):
        poison()
        errors(16, chs, size, size, ratio, stride, "channels_last", getattr(torch, dtype), "cuda", energy=False)
        poison()  # and once more without the binder
        return errors(16, chs, size, size, ratio, stride, "channels_last", getattr(torch, dtype), "cuda", energy=False)


def check(shape: Shape, rows: Rows, fastest: Fastest, dtype: str) -> None:
    """The fastest tiles of all passes."""
    chosen = by_pass(shape, fastest)
    found = block_errors(shape, dtype, chosen)
    forward, backward = (
        ", ".join(dict.fromkeys(describe(chosen[what]) for what in both))
        for both in (("inference", "forward"), ("backward", "input"))
    )
    rows.add(shape, dtype=dtype, forward=forward, backward=backward, worst=max(found.values()), **found)


def describe(tile: MaybeTile) -> str:
    """What a tile says beyond its defaults."""
    if tile is None:
        return "chosen"
    default = asdict(Tile(0, 0, 0))
    return " ".join(f"{key}={value}" for key, value in asdict(tile).items() if value != default[key])


def prepare(shape: Shape, what: str, batch: int, dtype: torch.dtype) -> tuple[Callable[..., Any], list[Any]]:
    """A pass as a function of an input and a tile, and inputs for it; dtype: of the weights in inference."""
    size, chs, ratio, stride = shape
    block = random_block(chs, ratio, stride)
    inputs: list[Any] = random_inputs(size, chs, batch)
    if what == "inference":
        block = block.eval().to(dtype)
    weight, gamma, beta, eps = block.depthwise.weight, block.bn.weight, block.bn.bias, block.bn.eps
    running = (block.bn.running_mean, block.bn.running_var, block.bn.num_batches_tracked)

    def inference(x: Tensor, tile: MaybeTile) -> Tensor:
        return launch.inference(x, weight, (gamma, beta, *running[:2]), block.compact_chs, stride, eps, 0.0, tile=tile)

    def forward(x: Tensor, tile: MaybeTile) -> Any:
        return launch.training(x, weight, gamma, beta, block.compact_chs, stride, eps, 0.0, running, 0.1, tile=tile)

    def backward(saved: tuple[Tensor, launch.Saved], tile: MaybeTile) -> Any:
        which = "tile" if what == "backward" else "input_tile"
        return launch.training_backward(*saved, stride, eps, 0.0, **{which: tile})

    if what in ("backward", "input"):
        inputs = [(torch.randn_like(x), forward(x, None)[1]) for x in inputs]
    return {"inference": inference, "forward": forward}.get(what, backward), inputs


@torch.no_grad()
def time_tiles(shape: Shape, what: str, rows: Rows, fastest: Fastest) -> None:
    batch = PASSES[what]
    limit = limit_us(*shape[:2]) if what == "inference" else ""
    run, inputs = prepare(shape, what, batch, torch.bfloat16)
    for tile in (None, *alternatives(*shape, what)):
        try:
            us = graph_us(lambda value, tile=tile: run(value, tile), inputs)
        except Exception as problem:  # one tile that does not compile must not cost the whole call
            print("refused:", describe(tile), repr(problem)[:300])
            us = nan
        rows.add(shape, what=what, batch=batch, tile=describe(tile), us=us, limit_us=limit)
        fastest.offer(shape, what, us, tile)


def print_fastest(rows: Rows) -> None:
    """Where an alternative beats the chosen tile by more than 2 %."""
    chosen: dict[Any, dict[str, Any]] = {}
    best: dict[Any, dict[str, Any]] = {}
    for row in rows:
        key = (*list(row.values())[:4], row["what"])
        chosen.setdefault(key, row)
        if row["us"] < best.setdefault(key, row)["us"]:
            best[key] = row
    print("map channels ratio stride what: chosen -> best (limit), tile")
    for key, row in best.items():
        before = chosen[key]["us"]
        if row["us"] < 0.98 * before:
            print(*key, f"{before:.1f} -> {row['us']:.1f} us ({row['limit_us']}) {row['tile']}")
        else:
            print(*key, f"{before:.1f} us ({row['limit_us']}): the chosen tile stays")

"""What one GPU call of three minutes can settle about LightNL's kernels: which tiles are fastest, are they right, and
what the block then costs as a user runs it.

Through `python -m benchmarks.lightnl --settle`. What matters most comes first, and rows are written as they come, so
that a call that is cut short leaves what it found:

    settle_tiles.csv    where the table of tiles has alternatives, at ratio 0.25 and stride 1: times in a CUDA graph of
                        the chosen tile, which comes first, and of each alternative; inference at batch 256 with its
                        limit, forward and backward of training at batch 512, the latter twice: "input" has
                        alternatives for its last kernel; nan where this Triton refuses a tile
    settle_user.csv     every shape with its fastest tiles at batch 256, plain and with the kernels: inference and the
                        training step, of one block and in a chain, as a user runs them and in a CUDA graph
    settle_compiled.csv the same steps by torch.compile, the chain's with the kernels too
    settle_errors.csv   every shape with its fastest tiles against float64, forward and all gradients, twice: through
                        Triton's binder and without it
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
from autonl.nn.kernels import launch, tiles
from autonl.nn.kernels.tiles import Tile
from benchmarks import compile_ahead, graph_us, write_rows
from benchmarks.lightnl import BATCH, SHAPES, floor_us, functions_of, poison, random_block, random_inputs, time_mode
from tests.nn.test_kernels import BOUNDS, errors

Shape = tuple[int, int, float, int]
MaybeTile = Tile | None  # None: the table's own
COMPILED = {"chain": ("compiled", "compiled_fused"), "step": ("compiled",)}
PASSES = {"inference": BATCH, "backward": 512, "input": 512, "forward": 512}  # and the batch each is timed at


class Rows(list[dict[str, Any]]):
    """Rows of a CSV that is written anew with each."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self.name, self.folder = name, folder

    def add(self, shape: Shape, **values: Any) -> None:
        row = dict(zip(("map", "channels", "ratio", "stride"), shape, strict=True)) | values
        self.append({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()})
        write_rows(self.name, self, self.folder)
        print(self.name, *self[-1].values(), flush=True)


class Fastest(dict[tuple[tuple[int, int], str], tuple[float, MaybeTile]]):
    """The time and the tile of what was fastest so far, by map, channels and pass: the table knows no strides."""

    def offer(self, shape: Shape, what: str, us: float, tile: MaybeTile) -> None:
        if us < self.get((shape[:2], what), (inf, None))[0]:
            self[shape[:2], what] = us, tile

    def tile(self, shape: Shape, what: str) -> MaybeTile:
        return self.get((shape[:2], what), (inf, None))[1]


def settle(folder: Path, seconds: float) -> None:
    """All of it; nothing new is begun after so many seconds."""
    deadline = time.monotonic() + seconds
    torch.manual_seed(0)
    times, users, compiled, found = (Rows(f"settle_{name}", folder) for name in ("tiles", "user", "compiled", "errors"))
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
    jobs = [(mode, shape, None) for mode in COMPILED for shape in SHAPES]
    jobs += [(what, shape, tile) for shape, what in open_ones for tile in alternatives(*shape, what)]
    jobs += [(what, shape, None) for shape in SHAPES for what in PASSES]
    jobs += [("bfloat16", shape, None) for shape in SHAPES]
    compile_ahead(compile_job, jobs)
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    work(*((time_tiles, shape, what, times, fastest) for shape, what in open_ones))
    print_fastest(times)
    work(*((check, shape, found, fastest, "bfloat16") for shape in SHAPES))
    work(*((time_user, shape, users, fastest) for shape in SHAPES))
    print_verdicts(users)
    work(*((time_compiled, shape, compiled) for shape in SHAPES))
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


def alternatives(size: int, chs: int, ratio: float, stride: int, what: str) -> list[Tile]:
    """Tiles for 16-bit inputs that may beat the table's for a pass.

    What lost on an H200 is not here any more: 8 warps, blocks of channels wider than the table's, most other steps on
    maps above 64 positions, other stages, and of the `gathered` kernels' loops all but the table's.
    """
    positions = size**2
    sizes = chs, LightNLSpec(ratio, stride).compact_chs(chs), positions
    if positions > 1024 and not tiles.gathered_fits(*sizes):
        return []
    if what == "input":
        chosen = tiles.input_backward_tile(chs, positions, torch.bfloat16)
        narrow = replace(chosen, channels=chosen.channels // 2)
        few = [replace(chosen, registers=registers) for registers in (72, 64)]
        return [narrow] if positions <= 64 else few[1:] if positions > 1024 else [narrow, *few]
    if what == "backward":
        chosen = tiles.depthwise_backward_tile(*sizes, torch.bfloat16)
    else:
        chosen = tiles.forward_tile(*sizes, torch.bfloat16, what == "forward")
    if positions > 1024:
        most = {"inference": 64, "forward": 96, "backward": 128}[what]
        return [replace(chosen, registers=most), replace(chosen, bands=3)]
    if positions > 64:
        return {
            "inference": [],
            "forward": [replace(chosen, registers=160 if chosen.gathered else 96)],
            "backward": [Tile(64, 16, warps=4, stages=1), Tile(64, 32, warps=4, step=16, stages=1)],
        }[what]
    if what == "inference":
        return [replace(chosen, registers=72)]
    # narrow blocks and short steps: programs with half the registers
    found = [Tile(64, 32, warps=4, step=step, stages=1) for step in (16, 32)]
    found += [replace(chosen, registers=80 if what == "forward" else 128)] if chs <= 256 else []
    return found if what == "forward" else [*found, Tile(64, 64, warps=4, step=16, stages=1)]


def by_pass(shape: Shape, fastest: Fastest) -> dict[str, MaybeTile]:
    return {what: fastest.tile(shape, what) for what in PASSES}


def compile_job(kind: str, shape: Shape, tile: MaybeTile) -> None:
    """For the compilers' caches: a pass with a tile, the step by torch.compile, or what a check in a dtype needs."""
    if kind in COMPILED:
        block, inputs = user_block(shape)
        for function in functions_of(block, inputs, kind, COMPILED[kind]):
            function(inputs[0])
    elif kind in PASSES:
        for dtype in (torch.bfloat16, torch.float32):  # of the weights: as timed, and as checked
            run, inputs = prepare(shape, kind, 16, dtype)
            run(inputs[0], tile)
    else:
        block_errors(shape, kind, {})


def user_block(shape: Shape) -> tuple[Any, list[Tensor]]:
    size, chs, ratio, stride = shape
    block = random_block(chs, ratio, stride)
    block.fused = False
    return block, random_inputs(size, chs)


def block_errors(shape: Shape, dtype: str, found: dict[str, MaybeTile]) -> dict[str, float]:
    size, chs, ratio, stride = shape
    with table(found):
        poison()
        errors(16, chs, size, size, ratio, stride, "channels_last", getattr(torch, dtype), "cuda")
        poison()  # and once more without the binder
        return errors(16, chs, size, size, ratio, stride, "channels_last", getattr(torch, dtype), "cuda")


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
        return launch.inference(x, weight, (gamma, beta, *running[:2]), block.compact_chs, stride, eps, tile=tile)

    def forward(x: Tensor, tile: MaybeTile) -> Any:
        return launch.training(x, weight, gamma, beta, block.compact_chs, stride, eps, running, 0.1, tile=tile)

    def backward(saved: tuple[Tensor, launch.Saved], tile: MaybeTile) -> Any:
        which = "tile" if what == "backward" else "input_tile"
        return launch.training_backward(*saved, stride, eps, **{which: tile})

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


def limit_us(size: int, chs: int) -> float:
    floor = floor_us(size, chs)
    return 5 * floor if floor > 5 else 25.0


def time_user(shape: Shape, rows: Rows, fastest: Fastest) -> None:
    block, inputs = user_block(shape)
    times: dict[str, float] = {}
    with table(by_pass(shape, fastest)):
        for mode in ("inference", "step", "chain"):
            times |= time_mode(block, inputs, mode, ("plain", "fused"))
    rows.add(shape, batch=BATCH, limit_us=limit_us(*shape[:2]), **times)


def time_compiled(shape: Shape, rows: Rows) -> None:
    times: dict[str, float] = {}
    for mode, names in COMPILED.items():
        times |= time_mode(*user_block(shape), mode, names)
    rows.add(shape, batch=BATCH, **times)


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


def print_verdicts(rows: Rows) -> None:
    """What is wanted: within the limit in a graph, 4 times plain as a user runs it, 1.5 in a graph; a step 3 times."""
    print(
        "map channels ratio stride: inference us in a graph (limit), times plain (4), in a graph (1.5); step, chain (3)"
    )
    for row in rows:
        ratios = {
            name: row[f"{name.replace('fused', 'plain')}_us"] / row[f"{name}_us"]
            for name in ("inference_fused", "inference_fused_graph", "step_fused", "chain_fused")
        }
        wanted = dict(zip(ratios, (4, 1.5, 3, 3), strict=True))
        missed = [name for name, ratio in ratios.items() if ratio < wanted[name]]
        missed += ["limit"] * (row["inference_fused_graph_us"] > row["limit_us"])
        print(
            *list(row.values())[:4],
            f"{row['inference_fused_graph_us']:.1f} ({row['limit_us']})",
            *(f"{ratio:.2f}" for ratio in ratios.values()),
            f"missed: {', '.join(missed)}" if missed else "all met",
        )

"""What one GPU call can settle about LightNL's kernels: are they right, and which tiles are fastest.

Through `python -m benchmarks.lightnl --settle`. Rows are written as they come, so that a call that is cut short leaves
what it found:

    settle_tiles.csv    times in a CUDA graph of the chosen tile, which comes first, and its alternatives: inference at
                        batch 256 with its limit, forward and backward of training at batch 512
    settle_python.csv   the step as a user runs it, with the kernels and plain: what launches cost
    settle_errors.csv   every shape in every dtype, forward and all gradients against float64, twice: through Triton's
                        binder and without it; then the shapes' alternative tiles in bfloat16
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autonl.nn.kernels import launch, tiles
from benchmarks import compile_ahead, eager_us, graph_us, write_rows
from benchmarks.lightnl import BANDWIDTH, BATCH, CACHE, SHAPES, poison, random_block, step_function
from tests.nn.test_kernels import BOUNDS, errors

Shape = tuple[int, int, float, int]
TRAINING_BATCH = 512


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


def settle(folder: Path, seconds: float) -> None:
    """All of it, in the order of what matters most; nothing new is begun after so many seconds."""
    deadline = time.monotonic() + seconds
    torch.manual_seed(0)
    found = Rows("settle_errors", folder)
    times = Rows("settle_tiles", folder)
    python = Rows("settle_python", folder)
    timed = ((time_inference, times), (time_training, times), (time_steps, python))
    first = [(function, (shape, rows)) for function, rows in timed for shape in SHAPES]
    then = [(function, (shape, found)) for function in (check, check_alternatives) for shape in SHAPES]
    for dtypes, work in ((["bfloat16"], first), (["float32", "float16"], then)):
        compile_ahead(compile_all, [(shape, dtype) for shape in SHAPES for dtype in dtypes])
        print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
        for function, arguments in work:
            if time.monotonic() > deadline:
                print(f"out of time before {function.__name__} {arguments[0]}")
                break
            function(*arguments)
    print_best(times)
    wrong = [row for row in found if row["worst"] >= BOUNDS[row["dtype"]]]
    print(f"{len(wrong)} of {len(found)} rows are beyond their bound:", *wrong, sep="\n")


@contextmanager
def table(forward: tiles.Tile | None = None, backward: tiles.Tile | None = None) -> Iterator[None]:
    """These tiles in place of the table's."""
    before = launch.forward_tile, launch.depthwise_backward_tile
    if forward is not None:
        launch.forward_tile = lambda *_: forward
    if backward is not None:
        launch.depthwise_backward_tile = lambda *_: backward
    forget_plans()
    try:
        yield
    finally:
        launch.forward_tile, launch.depthwise_backward_tile = before
        forget_plans()


def forget_plans() -> None:
    for plans in (launch.inference_plan, launch.training_plan, launch.backward_plan):
        plans.cache_clear()


def candidates(shape: Shape) -> tuple[list[tiles.Tile | None], list[tiles.Tile | None]]:
    """Forward and backward tiles, None for the table's own."""
    size, chs = shape[:2]
    return [None, *tiles.forward_alternatives(chs, size**2)], [None, *tiles.backward_alternatives(chs, size**2)]


def compile_all(shape: Shape, dtype: str) -> None:
    forward, backward = candidates(shape) if dtype == "bfloat16" else ([None], [None])
    for tile in forward:
        block_errors(shape, dtype, tile, None)
    for tile in backward[1:]:
        block_errors(shape, dtype, None, tile)


def block_errors(shape: Shape, dtype: str, forward: tiles.Tile | None, backward: tiles.Tile | None) -> dict[str, float]:
    size, chs, ratio, stride = shape
    with table(forward, backward):
        poison()
        errors(16, chs, size, size, ratio, stride, "channels_last", getattr(torch, dtype), "cuda")
        poison()  # and once more without the binder
        return errors(16, chs, size, size, ratio, stride, "channels_last", getattr(torch, dtype), "cuda")


def check(shape: Shape, rows: Rows) -> None:
    for dtype in BOUNDS:
        found = block_errors(shape, dtype, None, None)
        rows.add(shape, dtype=dtype, forward="chosen", backward="chosen", worst=max(found.values()), **found)


def check_alternatives(shape: Shape, rows: Rows) -> None:
    forward, backward = candidates(shape)
    pairs = [(tile, None) for tile in forward[1:]] + [(None, tile) for tile in backward[1:]]
    for one, other in pairs:
        found = block_errors(shape, "bfloat16", one, other)
        names = {"forward": describe(one), "backward": describe(other)}
        rows.add(shape, dtype="bfloat16", **names, worst=max(found.values()), **found)


def describe(tile: tiles.Tile | None) -> str:
    """What a tile says beyond its defaults."""
    if tile is None:
        return "chosen"
    default = asdict(tiles.Tile(0, 0, 0))
    return " ".join(f"{key}={value}" for key, value in asdict(tile).items() if value != default[key])


def random_inputs(shape: Shape, batch: int) -> list[Tensor]:
    """Fresh ones that together do not fit in the cache."""
    size, chs = shape[:2]
    count = max(4, int(CACHE / (batch * chs * size * size * 2)))
    x = torch.randn(batch * count, chs, size, size, device="cuda", dtype=torch.bfloat16)
    return list(x.to(memory_format=torch.channels_last).split(batch))


def time_inference(shape: Shape, rows: Rows) -> None:
    size, chs, ratio, stride = shape
    block = random_block(chs, ratio, stride).eval().bfloat16()
    norm = (block.bn.weight, block.bn.bias, block.bn.running_mean, block.bn.running_var)
    inputs = random_inputs(shape, BATCH)
    floor = 4 * BATCH * chs * size * size / BANDWIDTH * 1e6
    limit = 5 * floor if floor > 5 else 25.0

    def run(x: Tensor, tile: tiles.Tile | None) -> Tensor:
        return launch.inference(x, block.depthwise.weight, norm, block.compact_chs, stride, block.bn.eps, tile=tile)

    with torch.no_grad():
        for tile in candidates(shape)[0]:
            us = graph_us(lambda x, tile=tile: run(x, tile), inputs)
            rows.add(shape, what="inference", batch=BATCH, tile=describe(tile), us=us, limit_us=limit)


def time_training(shape: Shape, rows: Rows) -> None:
    _, chs, ratio, stride = shape
    block = random_block(chs, ratio, stride)
    weight, gamma, beta, eps = block.depthwise.weight, block.bn.weight, block.bn.bias, block.bn.eps
    running = (block.bn.running_mean, block.bn.running_var, block.bn.num_batches_tracked)
    inputs = random_inputs(shape, TRAINING_BATCH)

    def forward(x: Tensor, tile: tiles.Tile | None) -> Any:
        return launch.training(x, weight, gamma, beta, block.compact_chs, stride, eps, running, 0.1, tile=tile)

    with torch.no_grad():
        for tile in candidates(shape)[0]:
            if tile is not None and tile.spatial:
                continue  # training has the channel order alone
            us = graph_us(lambda x, tile=tile: forward(x, tile), inputs)
            rows.add(shape, what="forward", batch=TRAINING_BATCH, tile=describe(tile), us=us, limit_us="")
        saved = [(torch.randn_like(x), forward(x, None)[1]) for x in inputs]
        for tile in candidates(shape)[1]:
            us = graph_us(lambda s, tile=tile: launch.training_backward(*s, stride, eps, tile=tile), saved)
            rows.add(shape, what="backward", batch=TRAINING_BATCH, tile=describe(tile), us=us, limit_us="")


def time_steps(shape: Shape, rows: Rows) -> None:
    """Forward and backward as a user runs them."""
    _, chs, ratio, stride = shape
    block = random_block(chs, ratio, stride).train()
    inputs = [x.detach().requires_grad_() for x in random_inputs(shape, BATCH)]
    us = {}
    for name in ("plain", "fused"):
        block.fused = name == "fused"
        us[name] = eager_us(step_function(block, block), inputs)
    rows.add(shape, batch=BATCH, plain_us=us["plain"], fused_us=us["fused"], times=us["plain"] / us["fused"])


def print_best(rows: Rows) -> None:
    """Where an alternative beats the chosen tile by more than 2 %."""
    chosen: dict[Any, dict[str, Any]] = {}
    best: dict[Any, dict[str, Any]] = {}
    for row in rows:
        key = (*list(row.values())[:4], row["what"])
        chosen.setdefault(key, row)
        if row["us"] < best.get(key, row)["us"] or key not in best:
            best[key] = row
    print("map channels ratio stride what: chosen -> best (limit), tile")
    for key, row in best.items():
        before = chosen[key]["us"]
        if row["us"] < 0.98 * before:
            print(*key, f"{before:.1f} -> {row['us']:.1f} us ({row['limit_us']}) {row['tile']}")
        else:
            print(*key, f"{before:.1f} us ({row['limit_us']}): the chosen tile stays")

"""LightNL alone at AutoNL-L's eleven shapes: plain, compiled and fused against the memory floor.

    python -m benchmarks.lightnl [--out benchmarks/results] [--no-compile] [--seconds 240]
    python -m benchmarks.lightnl --settle       first which tiles are fastest, and are they right: see benchmarks.settle
    python -m benchmarks.lightnl --doc          the table in docs/speed.md from the CSV, without a GPU

bf16 (weights too in inference, autocast in training), channels-last, batch 256, medians, over fresh random inputs that
together exceed the cache. A step is forward and backward of one block with train-mode BN; `chain` is of four blocks, as
they follow each other in a network, a quarter of it: a call of autograd has its price whatever it goes through. `floor`
is the time to read x once and write z once at 4.3 TB/s; `error` is norm-wise against float64, of fused outputs written
over poisoned memory. Columns with `_graph` are timed in a CUDA graph, the others as a user runs it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autonl.nn.light_nonlocal import LightNL
from benchmarks import (
    RESULTS,
    compile_ahead,
    eager_us,
    graph_us,
    made_with,
    read_rows,
    require_cuda,
    table,
    write_doc,
    write_rows,
)

Shape = tuple[int, int, float, int]  # map, channels, ratio, stride
SHAPES: tuple[Shape, ...] = (
    (56, 24, 0.25, 1),
    (56, 24, 0.25, 2),
    (28, 40, 0.25, 1),
    (28, 40, 0.25, 2),
    (14, 80, 0.25, 1),
    (14, 80, 0.125, 2),
    (14, 96, 0.25, 1),
    (14, 96, 0.25, 2),
    (7, 192, 0.25, 1),
    (7, 192, 0.125, 1),
    (7, 320, 0.25, 1),
)
BATCH = 256
BANDWIDTH = 4.3e12  # bytes a second that a device-to-device copy moves on an H200, measured
CACHE = 200e6  # bytes, a few times the L2
CHAIN = 4


PLAIN = dict.fromkeys(("inference", "step", "chain"), ("plain", "fused"))
COMPILED = {"step": ("compiled",), "inference": ("compiled",), "chain": ("compiled", "compiled_fused")}
WANTED = {"inference": 4, "inference_graph": 1.5, "step": 3}  # times as fast as plain


class Rows(list[dict[str, Any]]):
    """Rows of a CSV that is written anew with each."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self.name, self.folder = name, folder

    def add(self, shape: Shape, **values: Any) -> None:
        """A new row."""
        self.append(dict(zip(("map", "channels", "ratio", "stride"), shape, strict=True)))
        self.fill(shape, **values)

    def fill(self, shape: Shape, **values: Any) -> None:
        """More columns for the shape's last row."""
        row = next(row for row in reversed(self) if tuple(row.values())[:4] == shape)
        row |= {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
        write_rows(self.name, self, self.folder)
        print(self.name, *shape, *(row[key] for key in values), flush=True)


def random_block(chs: int, ratio: float, stride: int) -> LightNL:
    block = LightNL(chs, ratio, stride).cuda()
    nn.init.normal_(block.bn.weight)
    nn.init.normal_(block.bn.bias)
    block.bn.running_var.uniform_(0.5, 2.0)
    block.fused = True
    return block


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an element nobody writes shows."""
    junk = torch.full((2**28,), float("nan"), device="cuda")
    del junk


def error(block: LightNL, x: Tensor) -> float:
    poison()
    out = block(x).double()
    plain = LightNL(block.bn.num_features, block.compactness.ratio, block.stride).cuda().double()
    plain.load_state_dict(block.state_dict())
    plain.fused = False
    expected = plain.eval()(x.double())
    return ((out - expected).norm() / expected.norm()).item()


def step_function(blocks: nn.Module, function: Any) -> Any:
    """Forward and backward of a function of x with the blocks' parameters."""
    parameters = tuple(blocks.parameters())

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # a cached cast would outlive a graph
            z = function(x)
        return torch.autograd.grad(z, (x, *parameters), x.detach())[0]

    return run


def floor_us(size: int, chs: int) -> float:
    return 4 * BATCH * chs * size * size / BANDWIDTH * 1e6


def random_inputs(size: int, chs: int, batch: int = BATCH) -> list[Tensor]:
    """Fresh ones that together do not fit in the cache."""
    count = max(4, int(CACHE / (batch * chs * size * size * 2)))
    x = torch.randn(batch * count, chs, size, size, device="cuda", dtype=torch.bfloat16)
    return [part.detach() for part in x.to(memory_format=torch.channels_last).split(batch)]


def limit_us(size: int, chs: int) -> float:
    """What inference in a graph may take."""
    floor = floor_us(size, chs)
    return 5 * floor if floor > 5 else 25.0


def functions_of(block: LightNL, inputs: list[Tensor], mode: str, names: tuple[str, ...]) -> list[Any]:
    """What is timed, functions of an input; mode: inference, step or chain; names: plain, fused, compiled and
    compiled_fused."""
    training = mode != "inference"
    block.train(training).to(torch.float32 if training else torch.bfloat16)
    for x in inputs:
        x.requires_grad_(training)
    torch.compiler.reset()
    functions = []
    for name in names:
        blocks = nn.Sequential(*(copy.deepcopy(block) for _ in range(CHAIN if mode == "chain" else 1)))
        for one in blocks:
            one.fused = name.endswith("fused")
        function: Any = torch.compile(blocks) if name.startswith("compiled") else blocks
        functions.append(step_function(blocks, function) if training else function)
    return functions


def time_mode(block: LightNL, inputs: list[Tensor], mode: str, names: tuple[str, ...]) -> dict[str, float]:
    """As a user runs it and in a CUDA graph, a block."""
    functions = functions_of(block, inputs, mode, names)
    count = CHAIN if mode == "chain" else 1
    with torch.set_grad_enabled(mode != "inference"):
        found = eager_us(functions, inputs, repeats=10 if mode == "chain" else 30)  # a chain is calmer
        times = {f"{mode}_{name}_us": us / count for name, us in zip(names, found, strict=True)}
        for name, function in zip(names, functions, strict=True):
            times[f"{mode}_{name}_graph_us"] = graph_us(function, inputs) / count
    return times


def user_block(shape: Shape) -> tuple[LightNL, list[Tensor]]:
    size, chs, ratio, stride = shape
    return random_block(chs, ratio, stride), random_inputs(size, chs)


def compile_mode(mode: str, shape: Shape) -> None:
    """For the compilers' caches."""
    block, inputs = user_block(shape)
    with torch.set_grad_enabled(mode != "inference"):
        for function in functions_of(block, inputs, mode, COMPILED[mode]):
            function(inputs[0])


def time_plain_and_fused(shape: Shape, rows: Rows) -> None:
    block, inputs = user_block(shape)
    with torch.no_grad():
        wrong = error(block.eval().to(torch.bfloat16), inputs[0])
    rows.add(shape, batch=BATCH, floor_us=floor_us(*shape[:2]), limit_us=limit_us(*shape[:2]), error=wrong)
    for mode, names in PLAIN.items():
        rows.fill(shape, **time_mode(block, inputs, mode, names))


def time_compiled(mode: str, shape: Shape, rows: Rows) -> None:
    rows.fill(shape, **time_mode(*user_block(shape), mode, COMPILED[mode]))


def time_blocks(
    rows: Rows,
    deadline: float,
    compiled: bool = True,
    tiles: Callable[[Shape], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Every shape, what matters most first; nothing is begun after the deadline. What is launched by torch.compile has
    the table's tiles, all else those that `tiles` sets."""
    work: list[tuple[str, Any, Any]] = [("plain and fused", time_plain_and_fused, tiles)]
    work += [(f"compiled {mode}", partial(time_compiled, mode), nullcontext) for mode in COMPILED if compiled]
    for (name, function, around), shape in itertools.product(work, SHAPES):
        if time.monotonic() > deadline:
            print(f"out of time before {name} {shape}")
            break
        with around(shape):
            function(shape, rows)
    print(rows.folder / f"{rows.name}.csv")


HEADER = (
    *("map x channels (ratio, stride)", "floor", "inference in a graph", "at most", "times plain in a graph"),
    *("inference", "compiled inference", "times plain", "step", "compiled step", "step: times plain", "of four"),
    *("step in a graph", "compiled step in a graph", "step: times plain in a graph"),
)
CLAIMS = {
    "limit": "Inference in a graph within its limit",
    "inference": "Inference 4 times as fast as plain, as a user runs it",
    "inference_graph": "Inference 1.5 times as fast as plain, in a graph",
    "step": "A step 3 times as fast as plain, as a user runs it",
    "step_compiled": "A step not slower than compiled, as a user runs it",
    "step_compiled_graph": "A step not slower than compiled, in a graph",
}


def document(rows: list[dict[str, str]]) -> str:
    """The table of docs/speed.md from the CSV, in microseconds, and what is met; without rows that were cut short."""
    lines, compiled_chains = [], []
    met: dict[str, dict[str, bool]] = {name: {} for name in CLAIMS}
    for row in rows:
        us = {key.removesuffix("_us"): float(value) for key, value in row.items() if key.endswith("_us") and value}
        if "chain_fused_graph" not in us:
            continue
        times = {
            f"{mode}{how}": us[f"{mode}_plain{how}"] / us[f"{mode}_fused{how}"]
            for mode in PLAIN
            for how in ("", "_graph")
        }
        shape = f"{row['map']} x {row['channels']} ({row['ratio']}, {row['stride']})"

        def whole(name: str, us: dict[str, float] = us) -> str:
            return f"{us[name]:.0f}" if name in us else "-"

        lines.append(
            [
                *(shape, f"{us['floor']:.1f}", f"{us['inference_fused_graph']:.1f}", f"{us['limit']:.1f}"),
                *(f"{times['inference_graph']:.1f}", whole("inference_fused"), whole("inference_compiled")),
                *(f"{times['inference']:.2f}", whole("step_fused"), whole("step_compiled")),
                *(f"{times['step']:.2f}", f"{times['chain']:.2f}"),
                *(whole("step_fused_graph"), whole("step_compiled_graph"), f"{times['step_graph']:.2f}"),
            ]
        )
        met["limit"][shape] = us["inference_fused_graph"] <= us["limit"]
        for name, wanted in WANTED.items():
            met[name][shape] = times[name] >= wanted
        for how in ("", "_graph"):
            if f"step_compiled{how}" in us:
                met[f"step_compiled{how}"][shape] = us[f"step_fused{how}"] <= us[f"step_compiled{how}"]
        if "chain_compiled_fused_graph" in us:
            compiled_chains.append(us["chain_compiled_graph"] / us["chain_compiled_fused_graph"])
    verdicts = [f"- {claim}: {verdict(met[name])}" for name, claim in CLAIMS.items()]
    if compiled_chains:
        low, high = min(compiled_chains), max(compiled_chains)
        verdicts.append(
            f"- Steps of four blocks compiled, in a graph: {low:.2f} to {high:.2f} times as fast with kernels."
        )
    return "\n".join([made_with(rows), "", table(HEADER, lines), "", *verdicts])


def verdict(met: dict[str, bool]) -> str:
    missed = [shape for shape, well in met.items() if not well]
    held = f"{len(met) - len(missed)} of {len(met)} shapes timed"
    return f"{held}; **missed** at {', '.join(missed)}." if missed else f"{held}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--settle", action="store_true", help="errors and tiles of the kernels first")
    parser.add_argument("--seconds", type=float, default=240.0, help="time nothing new after these")
    parser.add_argument("--doc", action="store_true", help="only write the table in docs/speed.md from the CSV")
    arguments = parser.parse_args()
    if arguments.doc:
        return write_doc("speed_lightnl", document(read_rows(arguments.out / "speed_lightnl.csv")))
    require_cuda()
    torch.manual_seed(0)
    deadline = time.monotonic() + arguments.seconds
    compiled = not arguments.no_compile
    if arguments.settle:
        from benchmarks.settle import settle

        return settle(arguments.out, deadline, compiled)
    if compiled:
        compile_ahead(compile_mode, [(mode, shape) for mode in COMPILED for shape in SHAPES])
    time_blocks(Rows("speed_lightnl", arguments.out), deadline, compiled)


if __name__ == "__main__":
    main()

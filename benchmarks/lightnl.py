"""LightNL alone at AutoNL-L's eleven shapes: plain, compiled and fused against the memory floor.

    python -m benchmarks.lightnl [--out benchmarks/results] [--no-compile]
    python -m benchmarks.lightnl --settle       are the kernels right, which tiles are fastest: see benchmarks.settle
    python -m benchmarks.lightnl --doc          the table in docs/speed.md from the CSV, without a GPU

bf16 (weights too in inference, autocast in training), channels-last, batch 256, medians, over fresh random inputs that
together exceed the cache. A step is forward and backward of one block with train-mode BN; `--settle` also times a chain
of four blocks, as they follow each other in a network, and tells a quarter of it: a call of autograd has its price
whatever it goes through. `floor` is the time to read x once and write z once at 4.3 TB/s; `error` is norm-wise against
float64, of fused outputs written over poisoned memory. Columns with `_graph` are timed in a CUDA graph, the others as a
user runs it.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autonl.nn.light_nonlocal import LightNL
from benchmarks import RESULTS, compile_ahead, eager_us, graph_us, require_cuda, write_rows, write_table

# map, channels, ratio, stride
SHAPES = (
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


TIMED = [f"{mode}_{name}_us" for mode in ("inference", "step") for name in ("plain", "compiled", "fused")]
TABLE = ("map", "channels", "ratio", "stride", "floor_us", "error", "inference_fused_graph_us", *TIMED)


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


def measure(size: int, chs: int, ratio: float, stride: int, compiled: bool) -> dict[str, Any]:
    block = random_block(chs, ratio, stride)
    inputs = random_inputs(size, chs)
    row: dict[str, Any] = {"map": size, "channels": chs, "ratio": ratio, "stride": stride, "batch": BATCH}
    row["floor_us"] = floor_us(size, chs)
    with torch.no_grad():
        row["error"] = error(block.eval(), inputs[0])
    names = ("plain", "fused", "compiled") if compiled else ("plain", "fused")
    row |= time_mode(block, inputs, "inference", names) | time_mode(block, inputs, "step", names)
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}


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
        found = eager_us(functions, inputs)
        times = {f"{mode}_{name}_us": us / count for name, us in zip(names, found, strict=True)}
        for name, function in zip(names, functions, strict=True):
            times[f"{mode}_{name}_graph_us"] = graph_us(function, inputs) / count
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--settle", action="store_true", help="errors and tiles of the kernels, nothing else")
    parser.add_argument("--seconds", type=float, default=170.0, help="with --settle: begin nothing new after these")
    parser.add_argument("--doc", action="store_true", help="only write the table in docs/speed.md from the CSV")
    arguments = parser.parse_args()
    if arguments.doc:
        return write_table("speed_lightnl", TABLE, arguments.out)
    require_cuda()
    if arguments.settle:
        from benchmarks.settle import settle

        return settle(arguments.out, arguments.seconds)
    calls = [(*shape, not arguments.no_compile) for shape in SHAPES]
    compile_ahead(measure, calls)
    torch.manual_seed(0)
    rows = []
    for *shape, compiled in calls:
        rows.append(row := measure(*shape, compiled))
        times = " ".join(f"{k.replace('_us', '')} {v:.1f}" for k, v in row.items() if k.endswith("_us"))
        print(*shape, f"error {row['error']:.1e}", times, flush=True)
    print(write_rows("speed_lightnl", rows, arguments.out))


if __name__ == "__main__":
    main()

"""LightNL's share of a CPU forward: 224 px, batch 1, one thread, by torch.profiler.

    python -m benchmarks.cpu [autonl_l] [--out benchmarks/results] [--repeats 30]

Every forward runs the same operators in the same order; of each operator the shortest of its own times counts, so that
a busy machine does not. Python between the operators counts where it stands. `plain_ms` is LightNL alone, without the
profiler, which makes every operator look dearer: the sum of the blocks' shortest times. `copies` is what LightNL copies
of maps, in thousands of numbers.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from autonl.models import create_model
from autonl.nn.light_nonlocal import LightNL
from benchmarks import RESULTS, put_rows

MARK = "LightNL"
FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}


def mark(block: LightNL, shortest: dict[LightNL, float]) -> None:
    """Let a block show in profiles, and keep its shortest time."""
    forward = block.forward

    def marked(x: Tensor) -> Tensor:
        with record_function(MARK):
            start = time.perf_counter()
            z = forward(x)
            shortest[block] = min(time.perf_counter() - start, shortest.get(block, math.inf))
            return z

    block.forward = marked  # type: ignore[method-assign]


def measure(ref: str, layout: str, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = create_model(ref).eval().to(memory_format=FORMATS[layout])
    shortest: dict[LightNL, float] = {}
    for block in [module for module in model.modules() if isinstance(module, LightNL)]:
        nn.init.ones_(block.bn.weight)  # as after training
        mark(block, shortest)
    x = torch.randn(1, 3, 224, 224).to(memory_format=FORMATS[layout])
    best: list[float] = []
    with torch.inference_mode():
        for _ in range(repeats):
            model(x)
        plain = sum(shortest.values())
        for _ in range(repeats):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
                model(x)
            events = profiler.events()
            times = [event.self_cpu_time_total for event in events]
            best = [min(pair) for pair in zip(best, times, strict=True)] if best else times
    spans = [event.time_range for event in events if event.name == MARK]
    ours = [any(s.start <= e.time_range.start and e.time_range.end <= s.end for s in spans) for e in events]
    copied = [e.input_shapes[0] for e, mine in zip(events, ours, strict=True) if mine and e.name == "aten::copy_"]
    lightnl = sum(value for value, mine in zip(best, ours, strict=True) if mine)
    return {
        "network": ref,
        "layout": layout,
        "total_ms": round(sum(best) / 1e3, 2),
        "lightnl_ms": round(lightnl / 1e3, 2),
        "share": round(lightnl / sum(best), 3),
        "plain_ms": round(plain * 1e3, 2),
        "copies": round(sum(math.prod(shape) for shape in copied if shape) / 1e3, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["autonl_l"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(ref, layout, arguments.repeats) for ref in arguments.networks for layout in FORMATS]
    put_rows(arguments.out / "speed_cpu.csv", list(rows[0]), rows)
    for row in rows:
        print(*(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()

"""Images a second and peak memory of whole networks, one run: AutoNL with kernels, without them, and a rival.

    python -m benchmarks.networks [autonl_l autonl_s ...] [--out benchmarks/results] [--batch 512]
        [--compile kernels bare]                which of the variants torch.compile does too; nothing behind it: none
    python -m benchmarks.networks --doc         the table in docs/speed.md from the CSV, without a GPU

Training (forward, cross-entropy, backward, SGD step) and inference at 224, bf16 (autocast in training, weights too in
inference), channels-last: medians over windows of steps that follow each other without a wait, as in a training.
torch.compile works side by side in processes, which then wait; nothing but what is timed runs.
`kernels` has LightNL's kernels, `layers` those of the layers around it too. `bare` is the network with its LightNL
blocks taken out: the ceiling.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autonl.models import create_model
from autonl.nn.kernels.layers import use_kernels, use_lightnl_kernels
from autonl.nn.light_nonlocal import LightNL
from benchmarks import (
    RESULTS,
    event_us,
    made_with,
    read_rows,
    require_cuda,
    table,
    write_doc,
    write_rows,
)

BASELINE = "timm:mobilenetv2_100"
AT_ONCE = 4  # networks that are compiled side by side: each takes the memory of a training step
Call = tuple[str, str, str, int, bool]  # network, variant, mode, batch, compiled

VARIANTS = ("layers", "kernels", "plain", "bare", "bare layers")
WINDOWS, STEPS = 5, 6
RATIOS = [  # name, column, over, under, wanted
    ("speed", "images_per_s", "kernels, compiled", "bare, compiled", "0.92"),
    ("speed", "images_per_s", "kernels, compiled", f"{BASELINE}, compiled", "0.88"),
    ("speed", "images_per_s", "bare, compiled", f"{BASELINE}, compiled", ""),
    ("speed", "images_per_s", "kernels, compiled", "plain, compiled", ""),
    ("speed", "images_per_s", "kernels, eager", "plain, eager", "1.5"),
    ("speed", "images_per_s", "layers, eager", "plain, eager", "1.5"),
    ("speed", "images_per_s", "bare, eager", "plain, eager", ""),
    ("speed", "images_per_s", "layers, compiled", "kernels, compiled", ""),
    ("speed", "images_per_s", "layers, compiled", "bare, compiled", "0.92"),
    ("speed", "images_per_s", "layers, compiled", f"{BASELINE}, compiled", "0.88"),
    ("speed", "images_per_s", "layers, compiled", "bare layers, compiled", ""),
    ("speed", "images_per_s", "layers, eager", "kernels, eager", ""),
    ("speed", "images_per_s", "layers, eager", "bare layers, eager", ""),
    ("memory", "peak_gib", "kernels, compiled", "bare, compiled", "at most 1.15"),
    ("memory", "peak_gib", "kernels, eager", "bare, eager", "at most 1.15"),
    ("memory", "peak_gib", "layers, compiled", "bare, compiled", "at most 1.15"),
    ("memory", "peak_gib", "layers, eager", "bare, eager", "at most 1.15"),
]
TABLE = ("network", "variant", "mode", "compiled", "batch", "images_per_s", "peak_gib")


def build(ref: str, variant: str) -> nn.Module:
    """A network with the kernels of a variant, and without LightNL where it says bare."""
    model = create_model(ref)
    for parent in list(model.modules()):
        for name, block in parent.named_children():
            if isinstance(block, LightNL):
                nn.init.ones_(block.bn.weight)  # as after training: at zero, the branch would be all zeros
                if variant.startswith("bare"):
                    setattr(parent, name, nn.Identity())
    if variant == "kernels":
        use_lightnl_kernels(model)
    elif variant.endswith("layers"):
        use_kernels(model)
    return model


def train_step(model: nn.Module, batch: int, compiled: bool) -> Callable[[], None]:
    model = model.cuda().to(memory_format=torch.channels_last).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    function: Any = torch.compile(model) if compiled else model

    def step() -> None:
        optimiser.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(function(images), labels)
        loss.backward()
        optimiser.step()

    return step


def inference(model: nn.Module, batch: int, compiled: bool) -> Callable[[], None]:
    model = model.cuda().to(memory_format=torch.channels_last, dtype=torch.bfloat16).eval()
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last)
    function: Any = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def run() -> None:
        function(images)

    return run


def function_of(ref: str, variant: str, mode: str, batch: int, compiled: bool) -> Callable[[], None]:
    """What is timed, after its first call."""
    function = (train_step if mode == "train" else inference)(build(ref, variant), batch, compiled)
    function()
    return function


def window_us(function: Callable[[], None]) -> float:
    """A step among others: one before them keeps the GPU busy until the first is launched."""
    function()
    return event_us(lambda: [function() for _ in range(STEPS)]) / STEPS


def measure(call: Call, function: Callable[[], None]) -> dict[str, Any]:
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step_us = median(window_us(function) for _ in range(WINDOWS))
    memory = torch.cuda.max_memory_allocated() / 2**30
    ref, variant, mode, batch, compiled = call
    return {
        "network": ref,
        "variant": variant,
        "mode": mode,
        "compiled": compiled,
        "batch": batch,
        "images_per_s": round(batch / step_us * 1e6),
        "peak_gib": round(memory, 2),
    }


def compile_and_measure(call: Call, slots: Any, threads: int, parent: Any) -> None:
    """In a process of its own, which says when it is ready and waits for its turn."""
    from torch._inductor import config

    config.compile_threads = threads
    with slots:
        function = function_of(*call)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    parent.send("ready")
    parent.recv()
    parent.send(measure(call, function))


def measure_compiled(calls: list[Call], at_once: int, patience: float) -> Iterator[dict[str, Any]]:
    """Compile them side by side, then time them one by one. What fails is told by its process, and left out; so is what
    is not ready after so many seconds."""
    spawn = multiprocessing.get_context("spawn")
    slots, threads = spawn.Semaphore(at_once), max((os.cpu_count() or 1) // at_once, 1)
    waiting: dict[Any, tuple[Call, Any]] = {}
    for call in calls:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=compile_and_measure, args=(call, slots, threads, theirs), daemon=False)
        process.start()
        theirs.close()
        waiting[ours] = call, process

    def answer(pipe: Any) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):  # it has ended
            return None

    ready = []
    deadline = time.monotonic() + patience
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), left):
            call, process = waiting.pop(pipe)
            if answer(pipe):
                ready.append((calls.index(call), pipe, process))
    for call, process in waiting.values():
        print("not compiled in time:", *call, flush=True)
        process.terminate()
        process.join()
    for _, pipe, process in sorted(ready, key=lambda one: one[0]):
        with suppress(OSError):
            pipe.send("go")
            if row := answer(pipe):
                yield row
        process.join()


def document(rows: list[dict[str, str]]) -> str:
    """The tables of docs/speed.md from the CSV: the rows, and the ratios of training that are wanted."""
    by_name = {(row["network"], row["variant"], row["compiled"]): row for row in rows if row["mode"] == "train"}
    networks = list(dict.fromkeys(row["network"] for row in rows if row["variant"]))
    variants = {row["variant"] for row in rows}

    def find(network: str, which: str) -> dict[str, str] | None:
        variant, how = which.rsplit(", ", 1)
        key = (BASELINE, "") if variant == BASELINE else (network, variant)
        return by_name.get((*key, str(how == "compiled")))

    def ratio(column: str, network: str, over: str, under: str) -> str:
        above, below = find(network, over), find(network, under)
        return f"{float(above[column]) / float(below[column]):.3f}" if above and below else "-"

    ratios = []
    for name, column, over, under, wanted in RATIOS:
        found = [ratio(column, network, over, under) for network in networks]
        timed = over.rsplit(", ", 1)[0] in variants
        if (wanted and timed) or {*found} != {"-"}:
            ratios.append([f"{name}: {over} / {under}", wanted, *found])
    measured = table(TABLE, [[row[key] for key in TABLE] for row in rows])
    return "\n\n".join([made_with(rows), measured, table(("training", "wanted", *networks), ratios)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["autonl_l", "autonl_s"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--modes", nargs="+", default=["train", "inference"])
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument(
        "--compile", nargs="*", default=VARIANTS, metavar="VARIANT", help="variants that are compiled too"
    )
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="networks that are compiled side by side")
    parser.add_argument("--patience", type=float, default=600, help="seconds that compiling may take, all together")
    parser.add_argument("--doc", action="store_true", help="only write the table in docs/speed.md from the CSV")
    arguments = parser.parse_args()
    if arguments.doc:
        return write_doc("speed_networks", document(read_rows(arguments.out / "speed_networks.csv")))
    require_cuda()
    kinds = [(BASELINE, ""), *((ref, variant) for ref in arguments.networks for variant in arguments.variants)]
    calls: list[Call] = [
        (*kind, mode, arguments.batch, compiled)
        for mode in arguments.modes
        for compiled in (True, False)
        for kind in kinds
        if not compiled or (arguments.compile and kind[1] in ("", *arguments.compile))
    ]
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(*row.values(), flush=True)
        write_rows("speed_networks", rows, arguments.out)

    for row in measure_compiled([call for call in calls if call[-1]], arguments.at_once, arguments.patience):
        note(row)
    for call in calls:
        if not call[-1]:
            try:
                note(measure(call, function_of(*call)))
            except Exception as problem:  # one network must not cost the others
                print("failed:", *call, repr(problem)[:300], flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

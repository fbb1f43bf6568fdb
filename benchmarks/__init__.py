"""How fast it is: `python -m benchmarks.lightnl` and `python -m benchmarks.networks`, both on a CUDA GPU."""

from __future__ import annotations

import csv
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
DOC = Path(__file__).parent.parent / "docs" / "speed.md"


def require_cuda() -> None:
    """One line and status 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU, and none is visible here", file=sys.stderr)
        raise SystemExit(2)


def environment() -> dict[str, str]:
    """What a number was measured with: columns of every row."""
    import triton

    values = (torch.cuda.get_device_name(), torch.__version__, triton.__version__, platform.python_version())
    return dict(zip(environment_keys(), values, strict=True))


def environment_keys() -> tuple[str, ...]:
    return ("gpu", "torch", "triton", "python")


def write_rows(name: str, rows: Sequence[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Into a CSV; a column that a row does not have (yet) is left empty."""
    path = folder / f"{name}.csv"
    columns = dict.fromkeys(column for row in rows for column in row) | environment()
    put_rows(path, list(columns), [row | environment() for row in rows])
    return path


def put_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Into a CSV, in place of what it had."""
    path.unlink(missing_ok=True)
    add_rows(path, columns, rows)


def add_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """To the end of a CSV; what a row has besides the columns is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of a CSV, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def made_with(rows: Sequence[dict[str, str]]) -> str:
    """The hardware and versions of a CSV's rows, a sentence."""
    row = rows[0]
    return f"{row['gpu']}, torch {row['torch']}, Triton {row['triton']}, Python {row['python']}."


def write_doc(name: str, text: str) -> None:
    """Put it into docs/speed.md, between its marks."""
    before, rest = DOC.read_text().split(f"<!-- {name} -->\n")
    after = rest.split(f"<!-- /{name} -->\n")[1]
    DOC.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->\n{after}")


def event_us(function: Callable[[], object]) -> float:
    """Time of one call by device events, launches included as a user sees them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def events_us(function: Callable[[], object], repeats: int = 20) -> float:
    return median(event_us(function) for _ in range(repeats))


def eager_us(functions: Sequence[Callable[[Any], object]], inputs: Sequence[Any], repeats: int = 10) -> list[float]:
    """Time a call of each as a user runs it, over inputs that together do not fit in the cache.

    Twenty calls and more without a wait between them, as in a network: alone, a call would be charged for the GPU's
    idling before its first kernel too. The functions take turns: where a machine is slow for a while, it is for all.
    """
    values = [*inputs] * -(-20 // len(inputs))

    def run(function: Callable[[Any], object]) -> None:
        for value in values:
            function(value)

    calls = [partial(run, function) for function in functions]
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = [[event_us(call) / len(values) for call in calls] for _ in range(repeats)]
    return [median(times) for times in zip(*rounds, strict=True)]


def graph_us(function: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    """The same inside one CUDA graph: device time without launch gaps."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for value in inputs:
            function(value)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [function(value) for value in inputs]
    graph.replay()
    torch.cuda.synchronize()
    time = events_us(graph.replay) / len(inputs)
    del kept
    return time


def compile_ahead(function: Callable[..., object], calls: Sequence[tuple[Any, ...]], most: int | None = None) -> None:
    """Make the calls in processes of their own, all or `most` at once, for the compilers' caches; results are dropped.

    One after the other the compilations take minutes. A call that fails here is told, and fails where it is timed.
    """
    processes = min(len(calls), most or os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(function, *call): call for call in calls}
        for future in as_completed(futures):
            if problem := future.exception():
                print("not compiled:", *futures[future], repr(problem)[:300], flush=True)

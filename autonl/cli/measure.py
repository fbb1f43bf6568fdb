"""autonl measure"""

from __future__ import annotations

import dataclasses
import json as json_format
import os
import shlex
from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from autonl.arch.codec import resolution_from
from autonl.arch.macs import milliseconds
from autonl.cli.train import resume_command


def measure(
    runtime: str = typer.Option("onnxruntime", help="torch, onnxruntime, openvino or executorch."),
    space: str = typer.Option("autonl", help="autonl, digits, or a .yaml file."),
    res: str | None = typer.Option(None, help="Image size: 128, or HEIGHTxWIDTH. Default: the space's own."),
    width: float = typer.Option(1.0, min=0.05, max=20, help="Times the space's channels."),
    classes: int | None = typer.Option(None, min=2, help="Of your images. Default: the space's own."),
    threads: int = typer.Option(1, min=1, max=os.cpu_count(), help="Threads of the runtime."),
    rounds: int = typer.Option(30, min=1, help="How often every block is timed, three runs each."),
    out: str = typer.Option("table.csv", metavar="FILE", help="The table."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the table in the file."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Time every candidate block of a search space on this machine: the table for a search to milliseconds.

    Example: autonl measure --runtime onnxruntime --space digits --out digits.csv
    """
    from autonl.latency_table import measure as measure_space
    from autonl.search.latency import LARGEST, SMALLEST
    from autonl.search.space import load_space

    found = load_space(space)
    found = found.scaled(width) if width != 1 else found
    if res is not None:
        resolution_from(res)  # refuses what is no size
        found = dataclasses.replace(found, resolution=res)
    if classes is not None:
        found = dataclasses.replace(found, classes=classes)
    columns = (TextColumn("places"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    bar = Bar(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task("places", total=None)
    with bar if console.is_terminal else nullcontext():  # without a terminal a bar is an empty line

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not console.is_terminal:  # no bar, a line a place
                console.print(f"{done} of {total} places", soft_wrap=True)

        try:
            rows = measure_space(
                found, runtime, Path(out), threads=threads, rounds=rounds, resume=resume, advance=advance
            )
        except (KeyboardInterrupt, SystemExit):  # the second by SIGTERM
            if console.is_terminal:
                bar.stop()
            told = f"go on with: {resume_command()}" if Path(out).exists() else "before a place was measured"
            console.print(f"stopped; {told}", markup=False, soft_wrap=True)
            raise
    whole = {row.block: row.milliseconds for row in rows if row.block in (SMALLEST, LARGEST)}
    if json:
        typer.echo(json_format.dumps({"table": out, "rows": len(rows), **whole}))
        return
    for name, taken in whole.items():
        typer.echo(f"{name:20s} {milliseconds(taken):>8s} ms")
    words = ["--space", space, *(["--res", res] if res else []), *(["--width", f"{width:g}"] if width != 1 else [])]
    words += ["--latency", "60%", "--table", out]
    told = f"{len(rows)} rows in {out}, with a classifier for {found.classes} classes"
    typer.echo(f"\n{told}\nnext: autonl search --data DIR {shlex.join(words)}")

"""autonl export"""

from __future__ import annotations

import json as json_format
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autonl.arch.codec import resolution_from
from autonl.arch.macs import milliseconds
from autonl.errors import refuse

if TYPE_CHECKING:
    from autonl.export.run import Exported

FORMATS_HELP = "onnx, openvino, executorch, coreml or litert."


def export(
    ref: str = typer.Argument(help="Zoo name, arch.yaml, run folder, or timm:NAME."),
    format: str = typer.Option("onnx", "--format", help=FORMATS_HELP),
    out: str | None = typer.Option(None, metavar="FILE", help="Default: exported/NAME with the format's ending."),
    res: str | None = typer.Option(None, help="Image size: 224, or HEIGHTxWIDTH. Default: the network's own."),
    dynamic_batch: bool = typer.Option(False, "--dynamic-batch", help="Any number of images at a time, not one."),
    quantize: str | None = typer.Option(None, metavar="int8", help="Smaller and coarser numbers (onnx, openvino)."),
    calibrate: str | None = typer.Option(None, metavar="DIR", help="Pictures that the ranges of int8 are taken from."),
    custom_op: bool = typer.Option(
        False, "--custom-op", help="LightNL as one operator, compiled here by a C++ compiler (onnx, openvino)."
    ),
    images: str | None = typer.Option(None, metavar="DIR", help="Pictures to judge the file by. Default: made ones."),
    count: int = typer.Option(100, min=1, help="How many of them."),
    weights: str | None = typer.Option(None, metavar="FILE", help="A safetensors or state_dict file."),
    threads: int = typer.Option(1, min=1, max=os.cpu_count(), help="Threads of the runtime when it is timed."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Write a network for a runtime, run the file there, and keep it only if it does what the network does.

    Example: autonl export runs/digits-demo --format onnx --out digits.onnx --images digits
    """
    from autonl.data.sources import SPLIT_NAMES, find_split, has_parts
    from autonl.export.formats import open_format
    from autonl.export.run import ExportError, Request
    from autonl.export.run import export as export_network

    if quantize not in (None, "int8"):
        refuse("--quantize", quantize, "int8")
    suffix = open_format(format).suffix
    path = Path(out or f"exported/{name_of(ref)}{suffix}")
    resolution = resolution_from(res) if res is not None else None
    int8 = quantize is not None
    request = Request(
        format, path, resolution, dynamic_batch, int8, calibrate, images, count, weights, threads, custom_op
    )
    try:
        exported = export_network(ref, request)
    except ExportError as failure:
        print(f"autonl: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    if exported.fresh:
        print(f"autonl: {ref} has no weights; the file holds fresh ones", file=sys.stderr)
    if json:
        files = [str(file) for file in exported.files]
        typer.echo(json_format.dumps({"file": str(path), "files": files, **asdict(exported.judged)}))
    else:
        held_out = images is None or has_parts(images) or find_split(images, SPLIT_NAMES["validation"]) is not None
        print_exported(exported, threads, held_out)


def name_of(ref: str) -> str:
    """A REF as the name of a file; a dot in it starts no suffix but that of an arch.yaml."""
    name = Path(ref).resolve().name if Path(ref).is_dir() else Path(ref.replace(":", "-")).name
    return name.removesuffix(".yaml").removesuffix(".yml")


def print_exported(exported: Exported, threads: int, held_out: bool) -> None:
    judged = exported.judged
    table = Table(box=None, pad_edge=False, show_header=False, title=escape(str(exported.path)))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("size", f"{judged.bytes / 1e6:.2f} MB")
    if judged.checked:
        table.add_row("not run here", f"needs macOS; the graph has {judged.checked}")
    if judged.verdict:
        verdict = judged.verdict
        table.add_row("largest difference", f"{verdict.difference:.1e} of the largest logit")
        table.add_row("same first class", f"{verdict.agreement:.1%} of {verdict.counted}")
        if verdict.file is not None:
            learned = "" if held_out else "; it may have learned from these images"
            table.add_row(verdict.score, f"{verdict.file:.2f}%, the network itself {verdict.network:.2f}%{learned}")
    for name, timing in (judged.timings or {}).items():
        low, median, high = (milliseconds(time) for time in (timing.low, timing.median, timing.high))
        table.add_row(f"{name}, {threads} thread(s)", f"{median} ms an image (quartiles {low} to {high})")
    if judged.outside is not None:
        table.add_row("left outside the accelerator", ", ".join(judged.outside) or "nothing")
    table.add_row("goes along", escape(", ".join(str(file) for file in exported.files)))
    console = Console(soft_wrap=True)
    console.print(table, highlight=False)
    script = next(file for file in exported.files if file.suffix == ".py")
    console.print(f"\nnext: python {shlex.quote(str(script))} IMAGE", highlight=False, markup=False)

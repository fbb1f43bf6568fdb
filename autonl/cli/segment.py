"""autonl segment"""

from __future__ import annotations

import csv
import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from autonl.cli.progress import TrainingBar
from autonl.cli.train import report_stop

if TYPE_CHECKING:
    from autonl.train.loop import Result


def segment(
    ref: str = typer.Argument(help="The backbone: zoo name, arch.yaml, run folder (with its weights), or timm:NAME."),
    data: str | None = typer.Option(
        None,
        metavar="DIR",
        help="A folder that holds VOCdevkit/VOC2012; or one with images/, masks/ and classes.txt, or with such folders "
        "as train/ and val/. A pixel of a mask is its class, 255 where nothing counts.",
    ),
    recipe: str = typer.Option("voc", help="voc, or a .yaml file."),
    output_stride: int | None = typer.Option(None, help="Image pixels a pixel of the last map: 8, 16 or 32."),
    set_: list[str] = typer.Option([], "--set", metavar="SECTION.NAME=VALUE", help="Change a setting of the recipe."),
    out: str | None = typer.Option(None, metavar="RUN", help="The run folder. Default: runs/NAME-segment."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in the folder."),
    seed: int | None = typer.Option(None, help="Seed of weights, data order and augmentation."),
    weights: str | None = typer.Option(None, metavar="FILE", help="Weights of the classifier to start from."),
    devices: int | None = typer.Option(None, min=1, help="GPUs, or processes on a CPU, a host."),
    num_nodes: int | None = typer.Option(None, min=1, help="Hosts."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Train DeepLabv3 on a network: a class for every pixel.

    Example: autonl segment runs/mobilenetv2_lightnl_100-tiny_imagenet --data VOC_ROOT
    """
    from autonl.segment.config import SegmentConfig
    from autonl.segment.run import train_segmenter
    from autonl.train.config import load_config, replace
    from autonl.train.run import Where

    settings = [*set_, *([f"segment.output_stride={output_stride}"] if output_stride is not None else [])]
    config = load_config(recipe, settings, SegmentConfig)
    config = replace(config, data={"path": data} if data else {}, seed=config.seed if seed is None else seed)
    folder = Path(out or f"runs/{Path(ref.replace(':', '-')).stem}-segment")
    result = train_segmenter(
        ref,
        config,
        folder,
        resume=resume,
        weights=weights,
        where=Where(devices, num_nodes),
        progress=TrainingBar,
        command=shlex.join(["autonl", *sys.argv[1:]]),
    )
    if result.stopped_by:
        report_stop(folder, result)
    elif result.first_process and json:
        typer.echo(json_format.dumps({"run": str(folder), "steps": result.step, **result.metrics}))
    elif result.first_process:
        print_result(folder, result)


def print_result(folder: Path, result: Result) -> None:
    from autonl.train.folder import IOU_FILE, OVERLAYS_FILE

    table = Table(box=None, pad_edge=False, title=f"{folder}: {result.step} steps")
    table.add_column("class", no_wrap=True)
    table.add_column("IoU %", justify="right")
    with open(folder / IOU_FILE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            table.add_row(row["class"], f"{float(row['iou']):.1f}" if row["iou"] else "-")
    metrics = result.metrics
    table.add_section()
    table.add_row("mean", f"{metrics['miou']:.2f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"{metrics['pixel_accuracy']:.2f}% of the pixels right, loss {metrics['val_loss']:.4f}", markup=False)
    if (folder / OVERLAYS_FILE).is_file():
        console.print(f"\npictures: {folder / OVERLAYS_FILE}", markup=False)
    console.print(f"next: autonl report {shlex.quote(str(folder))}", markup=False)

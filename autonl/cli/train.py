"""autonl train"""

from __future__ import annotations

import json as json_format
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from autonl.arch.spec import OPERATORS
from autonl.cli.progress import TrainingBar

if TYPE_CHECKING:
    from torch import nn

    from autonl.train.loop import Result

NL_HELP = (
    "A non-local operator at the network's non-local places, behind every projection where it has none: "
    + ", ".join(OPERATORS)
)
RECIPE_HELP = (
    "few (for a few hundred images), demo, tiny_imagenet, imagenet_mnas, or a .yaml file. "
    "Default: SGD, cosine, 30 epochs, batches of 256."
)


def train(
    ref: str = typer.Argument(help="Zoo name, arch.yaml, run folder, or timm:NAME."),
    data: str | None = typer.Option(
        None,
        metavar="DIR",
        help="A folder of class folders, a .tar of one, a root with a train and a val of either kind, wds/FOLDER, "
        "hfds/NAME, or digits, the embedded set.",
    ),
    recipe: str | None = typer.Option(None, help=RECIPE_HELP),
    set_: list[str] = typer.Option([], "--set", metavar="SECTION.NAME=VALUE", help="Change a setting of the recipe."),
    out: str | None = typer.Option(None, metavar="RUN", help="The run folder. Default: runs/NAME-RECIPE."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in the folder."),
    seed: int | None = typer.Option(None, help="Seed of weights, data order and augmentation."),
    weights: str | None = typer.Option(None, metavar="FILE", help="Start from a safetensors or state_dict file."),
    inherit: bool = typer.Option(False, "--inherit", help="Start from the weights of the run folder REF."),
    nl: str | None = typer.Option(None, metavar="OPERATOR", help=NL_HELP),
    devices: int | None = typer.Option(None, min=1, help="GPUs, or processes on a CPU, a host."),
    num_nodes: int | None = typer.Option(None, min=1, help="Hosts."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Train a network into a run folder.

    Example: autonl train digits --recipe demo
    """
    from autonl.models import with_operator
    from autonl.train.config import Config, load_config, replace
    from autonl.train.folder import run_colours
    from autonl.train.run import INHERITED, Where, train_classifier
    from autonl.weights import run_weights

    config: Config = load_config(recipe, set_)
    config = replace(config, data={"path": data} if data else {}, seed=config.seed if seed is None else seed)
    name = Path(ref.replace(":", "-")).stem + (f"-{nl}" if nl else "")
    folder = Path(out or f"runs/{name}-{Path(recipe or 'train').stem}")
    if nl and inherit and not weights:  # with an operator put in, the network is that of no run folder
        config = replace(config, data=run_colours(ref, config, INHERITED))
        weights = str(run_weights(ref))
    result = train_classifier(
        with_operator(ref, nl) if nl else ref,
        config,
        folder,
        resume=resume,
        weights=weights,
        inherit=inherit,
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


def resume_command() -> str:
    return shlex.join(["autonl", *sys.argv[1:], *(["--resume"] if "--resume" not in sys.argv else [])])


def report_stop(folder: Path, result: Result) -> None:
    name = signal.Signals(result.stopped_by or 0).name
    if result.saved is None:  # a stream has to begin its epoch again
        saved = "; nothing is saved yet; begin again with"
    elif result.saved < result.step:
        saved = f"; the last checkpoint in {folder} is of step {result.saved}, where an epoch began; go on with"
    else:
        saved = f", saved in {folder}; go on with"
    if result.first_process:
        print(f"stopped by {name} behind step {result.step}{saved}: {resume_command()}", file=sys.stderr)
    raise typer.Exit(128 + (result.stopped_by or 0))


def not_finite_warning(images: float, network: nn.Module) -> str:
    """What an accuracy alone would hide."""
    from autonl.nn.light_nonlocal import why_not_finite

    why = f" ({reason})" if (reason := why_not_finite(network)) else ""
    return f"warning: the outputs for {images:.0f} of the images are infinite or NaN, and count as wrong{why}"


def print_result(folder: Path, result: Result) -> None:
    from autonl.train.tasks import NOT_FINITE

    best = max((row for row in result.history if "top1" in row), key=lambda row: row["top1"])
    rows: list[tuple[str, Any, dict[str, Any]]] = [
        ("final", result.history[-1]["epoch"], result.metrics),
        ("best", best["epoch"], best),
    ]
    table = Table(box=None, pad_edge=False, title=f"{folder}: {result.step} steps")
    table.add_column("weights", no_wrap=True)
    for column in ("epoch", "top-1 %", "top-5 %", "loss"):
        table.add_column(column, justify="right")
    for name, epoch, row in rows:
        table.add_row(name, str(epoch), f"{row['top1']:.2f}", f"{row['top5']:.2f}", f"{row['val_loss']:.4f}")
    console = Console()
    console.print(table, highlight=False)
    if NOT_FINITE in result.metrics:
        warning = not_finite_warning(result.metrics[NOT_FINITE], result.module)
        console.print(warning, highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nnext: autonl evaluate {shlex.quote(str(folder))}", highlight=False, markup=False)

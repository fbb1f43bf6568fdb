"""autonl evaluate"""

from __future__ import annotations

import json as json_format
import shlex

import typer
from rich.console import Console
from rich.table import Table


def evaluate(
    ref: str = typer.Argument(help="Zoo name, arch.yaml, run folder, or timm:NAME."),
    data: str | None = typer.Option(
        None,
        metavar="DIR",
        help="A root with val/, or a folder of class folders, all of which is used; also .tar, wds/FOLDER, hfds/NAME, "
        "digits. Default: the validation images of the run.",
    ),
    weights: str | None = typer.Option(None, metavar="FILE", help="A safetensors or state_dict file."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="SECTION.NAME=VALUE", help="Change a setting, such as model.pad_type=same."
    ),
    devices: int | None = typer.Option(None, min=1, help="GPUs, or processes on a CPU, a host."),
    num_nodes: int | None = typer.Option(None, min=1, help="Hosts."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Top-1 and top-5 accuracy of a network.

    Example: autonl evaluate runs/digits-demo
    """
    from autonl.cli.train import not_finite_warning
    from autonl.models import create_model, run_folder
    from autonl.train.config import replace
    from autonl.train.folder import run_config
    from autonl.train.run import Where, evaluate_classifier

    config = replace(run_config(ref, set_), data={"path": data} if data else {})
    result = evaluate_classifier(ref, config, data is None, weights=weights, where=Where(devices, num_nodes))
    if not result:  # another process than the first
        return
    if json:
        typer.echo(json_format.dumps(result))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("top-1 %", "top-5 %", "images", "seconds"):
        table.add_column(column, justify="right")
    table.add_row(f"{result['top1']:.2f}", f"{result['top5']:.2f}", str(result["images"]), f"{result['seconds']:.1f}")
    console = Console()
    console.print(table, highlight=False)
    if result["not_finite"]:
        warning = not_finite_warning(result["not_finite"], create_model(ref))
        console.print(warning, highlight=False, markup=False, soft_wrap=True)
    folder = shlex.quote(ref)
    further = f"autonl report {folder}\n  or: autonl export {folder}" if run_folder(ref) else f"autonl profile {folder}"
    console.print(f"\nnext: {further}", highlight=False, markup=False, soft_wrap=True)

"""autonl models"""

import json as json_format
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from autonl.arch.codec import resolution_to_text
from autonl.arch.macs import count_macs, count_params
from autonl.arch.zoo import PAPER, ZOO, zoo_arch


def models(json: bool = typer.Option(False, "--json", help="One JSON object on standard output.")) -> None:
    """The networks of the zoo with their MACs and parameters, beside the paper's numbers.

    Example: autonl models
    """
    rows = [zoo_row(name) for name in ZOO]
    if json:
        typer.echo(json_format.dumps({"models": rows}))
    else:
        print_zoo(rows)


def zoo_row(name: str) -> dict[str, Any]:
    spec = zoo_arch(name)
    return {
        "name": name,
        "resolution": resolution_to_text(spec.resolution),
        "macs": count_macs(spec),
        "params": count_params(spec),
        "lightnl": sum(block.lightnl is not None for block in spec.blocks),
        "paper": asdict(PAPER[name]) if name in PAPER else None,
    }


def print_zoo(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, title="MACs and params in millions; p: as printed in the paper")
    table.add_column("network", no_wrap=True)
    for column in ("size", "MACs", "params", "LightNL", "p:MACs", "p:top-1", "p:top-5"):
        table.add_column(column, justify="right")
    for row in rows:
        paper = row["paper"] or {}
        figures = [f"{row['macs'] / 1e6:.2f}", f"{row['params'] / 1e6:.2f}", str(row["lightnl"] or "-")]
        printed = [str(paper.get(key) or "-") for key in ("macs", "top1", "top5")]
        table.add_row(row["name"], str(row["resolution"]), *figures, *printed)
    console = Console()
    console.print(table)
    console.print("\nnext: autonl profile autonl_l", highlight=False)

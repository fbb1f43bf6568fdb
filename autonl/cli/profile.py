"""autonl profile"""

import json as json_format

import typer
from rich.console import Console
from rich.table import Table

from autonl.arch.codec import resolution_from
from autonl.arch.spec import OPERATORS
from autonl.errors import refuse_name
from autonl.profile import Profile
from autonl.profile import profile as profile_network


def profile(
    ref: str = typer.Argument(help="Zoo name, arch.yaml, run folder, or timm:NAME."),
    res: str | None = typer.Option(None, help="Image size: 224, or HEIGHTxWIDTH. Default: the network's own."),
    nl: str | None = typer.Option(
        None,
        metavar="OPERATOR",
        help="A non-local operator at the network's non-local places, behind every projection where it has none: "
        + ", ".join(OPERATORS),
    ),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """MACs and parameters of a network, block by block.

    Example: autonl profile autonl_l --res 320x224
    """
    if nl is not None and nl not in OPERATORS:
        refuse_name("operator", nl, OPERATORS)
    result = profile_network(ref, resolution_from(res) if res is not None else None, nl)
    if json:
        typer.echo(json_format.dumps(result.to_json()))
    else:
        print_profile(result)


def print_profile(result: Profile) -> None:
    table = Table(box=None, pad_edge=False, title="MACs in millions, NL: the non-local part of them")
    for column in ("layer", "block"):
        table.add_column(column, no_wrap=True)
    for column in ("output", "MACs", "NL", "params"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.blocks:
        output = f"{row['out_chs']}x{row['height']}x{row['width']}" if "height" in row else ""
        nonlocal_macs = f"{row['nonlocal_macs'] / 1e6:.3f}" if row.get("nonlocal_macs") else ""
        macs, params = f"{row['macs'] / 1e6:.3f}", f"{row['params']:,}"
        table.add_row(row["name"], row.get("block", ""), output, macs, nonlocal_macs, params)
    console = Console()
    console.print(table, highlight=False)
    height, width = result.resolution
    console.print(
        f"\n{result.name} at {height}x{width}: {result.macs / 1e6:.2f}M MACs, {result.params:,} parameters",
        highlight=False,
        markup=False,
    )

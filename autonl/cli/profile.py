"""autonl profile"""

import json as json_format
import os
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autonl.arch.codec import resolution_from
from autonl.arch.macs import milliseconds
from autonl.arch.spec import OPERATORS
from autonl.cli.train import NL_HELP
from autonl.errors import AutoNLError, refuse_name
from autonl.profile import Profile
from autonl.profile import profile as profile_network


def profile(
    refs: list[str] = typer.Argument(
        metavar="REF...", help="Zoo name, arch.yaml, run folder, or timm:NAME; with --latency several."
    ),
    res: str | None = typer.Option(None, help="Image size: 224, or HEIGHTxWIDTH. Default: the network's own."),
    nl: str | None = typer.Option(None, metavar="OPERATOR", help=NL_HELP),
    latency: bool = typer.Option(False, "--latency", help="Time the networks on this machine instead."),
    runtime: str | None = typer.Option(
        None, help="For --latency: torch, onnxruntime, openvino or executorch. Default: torch."
    ),
    threads: int | None = typer.Option(None, min=1, max=os.cpu_count(), help="For --latency. Default: 1."),
    rounds: int | None = typer.Option(
        None, min=1, help="For --latency: how often every network is timed, three runs each. Default: 30."
    ),
    custom_op: bool = typer.Option(
        False, "--custom-op", help="For --latency on onnxruntime, openvino: LightNL as one operator, compiled here."
    ),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """MACs and parameters of a network, block by block; or the milliseconds of several, in turns.

    Example: autonl profile autonl_l --res 320x224

    Example: autonl profile mobilenetv2_100 mobilenetv2_lightnl_100 --latency --runtime onnxruntime
    """
    resolution = resolution_from(res) if res is not None else None
    if nl is not None and nl not in OPERATORS:
        refuse_name("operator", nl, OPERATORS)
    if latency:
        if nl is not None:
            raise AutoNLError("--nl and --latency exclude each other; give one")
        profile_latency(refs, runtime or "torch", resolution, threads or 1, rounds or 30, custom_op, json)
        return
    only_latency = {"--runtime": runtime, "--threads": threads, "--rounds": rounds, "--custom-op": custom_op or None}
    for flag, value in only_latency.items():
        if value is not None:
            raise AutoNLError(f"{flag}: is for --latency, which is not given")
    if len(refs) > 1:
        raise AutoNLError(f"{len(refs)} networks are given; allowed: one, or several with --latency")
    result = profile_network(refs[0], resolution, nl)
    if json:
        typer.echo(json_format.dumps(result.to_json()))
    else:
        print_profile(result)


def profile_latency(
    refs: list[str],
    runtime: str,
    resolution: tuple[int, int] | None,
    threads: int,
    rounds: int,
    custom_op: bool,
    json: bool,
) -> None:
    from autonl.latency import time_networks
    from autonl.weights import refuse_segmentation

    for ref in refs:
        refuse_segmentation(ref)
    timings = time_networks(list(dict.fromkeys(refs)), runtime, resolution, threads, rounds, custom_op)
    if json:
        networks = [{"name": name, **asdict(timing)} for name, timing in timings.items()]
        how = {"runtime": runtime, "threads": threads, "custom_op": custom_op}
        typer.echo(json_format.dumps(how | {"networks": networks}))
        return
    first = next(iter(timings.values()))
    operator = ", LightNL as one operator" if custom_op else ""
    title = f"milliseconds an image on {runtime}, {threads} thread(s){operator}, {first.runs} runs each, in turns"
    table = Table(box=None, pad_edge=False, title=title)
    table.add_column("network", no_wrap=True)
    for column in ("median", "quartiles", "of the first"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, timing in timings.items():
        spread = f"{milliseconds(timing.low)} to {milliseconds(timing.high)}"
        table.add_row(escape(name), milliseconds(timing.median), spread, f"{timing.median / first.median:.3f}")
    Console().print(table, highlight=False)


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

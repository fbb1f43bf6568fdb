"""autonl cam"""

from __future__ import annotations

import json as json_format
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autonl.errors import AutoNLError, refuse

if TYPE_CHECKING:
    from autonl.cam.run import Picture


def cam(
    ref: str = typer.Argument(help="Run folder; or zoo name, arch.yaml, timm:NAME with --weights."),
    images: list[str] = typer.Argument(None, metavar="IMAGE", help="Image files, and folders of them."),
    data: str | None = typer.Option(
        None, metavar="DIR", help="A set as for evaluate, for --index. Default: the validation images of the run."
    ),
    index: list[int] = typer.Option([], metavar="N", help="An image of the set; may be given again."),
    label: str | None = typer.Option(None, metavar="CLASS", help="The ground truth of the image files."),
    against: str | None = typer.Option(None, metavar="REF2", help="A second network, side by side."),
    affinity: bool = typer.Option(False, "--affinity", help="Where LightNL looks, instead of class activation maps."),
    at: list[str] = typer.Option(
        [], metavar="X,Y", help="Look from this pixel of the image as the network sees it; may be given again."
    ),
    block: list[int] = typer.Option(
        [], metavar="N", help="A block, numbered as by autonl profile; may be given again. Default: one a map size."
    ),
    classes: str | None = typer.Option(None, metavar="FILE", help="Class names, a line each."),
    weights: str | None = typer.Option(None, metavar="FILE", help="A safetensors or state_dict file."),
    against_weights: str | None = typer.Option(None, metavar="FILE", help="The same for REF2."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="SECTION.NAME=VALUE", help="Change a setting, such as model.pad_type=same."
    ),
    against_set: list[str] = typer.Option([], metavar="SECTION.NAME=VALUE", help="The same for REF2."),
    out: str = typer.Option("cam", metavar="DIR", help="Where the pictures go."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Draw what a network looks at: class activation maps, or the affinities of LightNL.

    Example: autonl cam runs/digits-demo --index 3 --index 500

    Example: autonl cam runs/digits-demo photo.jpg --affinity --at 10,20 --block 3
    """
    from autonl.cam import lightnl_blocks
    from autonl.cam.run import affinity_pictures, choose_images, map_pictures, open_trained, short_name
    from autonl.train.folder import run_config

    if affinity and against:
        raise AutoNLError("--affinity shows one network; leave out --against, or --affinity")
    if (at or block) and not affinity:
        raise AutoNLError("--at and --block say where LightNL is looked at; add --affinity")
    if (against_weights or against_set) and not against:
        raise AutoNLError("--against-weights and --against-set are for the second network; add --against REF2")
    positions = [position_from(text) for text in at]
    config = run_config(ref, set_)
    chosen = choose_images(ref, config, images or [], data=data, indices=index, label=label, classes_file=classes)
    full_names = against is not None and short_name(against) == short_name(ref)
    networks = [open_trained(ref, config, chosen, weights, ref if full_names else None)]
    if against:
        second = run_config(against, against_set)
        networks.append(open_trained(against, second, chosen, against_weights, against if full_names else None))
    if affinity:
        drawn = affinity_pictures(networks[0], chosen, Path(out), positions, block)
    else:
        drawn = map_pictures(networks, chosen, Path(out))
    pictures = list(with_progress(drawn, len(chosen.places)))
    if json:
        typer.echo(json_format.dumps({"pictures": [asdict(picture) for picture in pictures]}))
    else:
        print_pictures(pictures)
        shown = f"autonl profile {ref}" if affinity else shlex.join(["autonl", *sys.argv[1:], "--affinity"])
        if affinity or (not against and lightnl_blocks(networks[0].module)):
            typer.echo(f"\nnext: {shown}")


def position_from(text: str) -> tuple[int, int]:
    try:
        x, y = map(int, text.split(","))
        return x, y
    except ValueError:
        refuse("--at", text, "two whole numbers x,y, such as 10,20")


def with_progress(pictures: Iterator[Picture], count: int) -> Iterable[Picture]:
    console = Console(stderr=True)
    return track(pictures, "pictures", count, console=console, transient=True, disable=not console.is_terminal)


def print_pictures(pictures: list[Picture]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("image", "ground truth", "network", "prediction"):
        table.add_column(column, overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    for picture in pictures:
        for network in picture.networks:
            told = (picture.image, picture.truth or "", network["name"], network["prediction"])
            table.add_row(*told, f"{100 * network['probability']:.1f} %")
    console = Console(highlight=False, markup=False)
    console.print(table)
    written = f"{len(pictures)} pictures" if len(pictures) > 1 else "1 picture"
    console.print(f"\nwrote {written}:", soft_wrap=True)
    for picture in pictures:
        console.print(picture.file, soft_wrap=True)

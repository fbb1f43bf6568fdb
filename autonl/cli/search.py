"""autonl search"""

from __future__ import annotations

import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from autonl.cli.profile import print_profile
from autonl.cli.progress import TrainingBar
from autonl.cli.train import RECIPE_HELP, report_stop, resume_command

if TYPE_CHECKING:
    from autonl.search.run import Found


def search(
    data: str | None = typer.Option(None, metavar="DIR", help="As for train; digits is the embedded set."),
    space: str | None = typer.Option(None, help="autonl, digits, or a .yaml file. Default: autonl."),
    macs: str | None = typer.Option(None, help="The budget: 300M, or a share of the largest network. Default: 50%."),
    latency: str | None = typer.Option(None, help="Instead of MACs: 12ms, or a share of the largest network's, 60%."),
    table: str | None = typer.Option(None, metavar="FILE", help="For --latency: what autonl measure wrote."),
    cost_weight: float | None = typer.Option(None, min=0, help="Instead of a budget: the weight of log(MACs)."),
    res: str | None = typer.Option(None, help="Image size: 128, or HEIGHTxWIDTH."),
    width: float | None = typer.Option(None, help="Times the space's channels."),
    trials: int | None = typer.Option(
        None,
        min=0,
        help="Networks that are trained for a while to choose from. Default: 6; 20 beat chance, but take long.",
    ),
    recipe: str | None = typer.Option(None, help=RECIPE_HELP),
    set_: list[str] = typer.Option([], "--set", metavar="SECTION.NAME=VALUE", help="Change a setting."),
    out: str | None = typer.Option(None, metavar="RUN", help="The run folder. Default: runs/search-SPACE."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the search in the folder."),
    seed: int | None = typer.Option(None, help="Seed of weights, data order, augmentation and gates."),
    devices: int | None = typer.Option(None, min=1, help="GPUs, or processes on a CPU, a host."),
    num_nodes: int | None = typer.Option(None, min=1, help="Hosts."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """Find a network for your images and a budget of MACs: where LightNL pays, how compact, with all the rest.

    Example: autonl search --data digits --space digits --recipe demo --macs 50%
    """
    from autonl.search.config import SearchConfig
    from autonl.search.run import search as run_search
    from autonl.train.config import load_config, replace
    from autonl.train.run import Where
    from autonl.train.state import LAST

    flags = {
        "search.space": space,
        "search.macs": macs,
        "search.latency": latency,
        "search.table": table,
        "search.cost_weight": cost_weight,
        "search.resolution": res,
        "search.width": width,
        "search.trials": trials,
    }
    settings = [*set_, *(f"{name}={value}" for name, value in flags.items() if value is not None)]
    config = load_config(recipe, settings, SearchConfig)
    config = replace(config, data={"path": data} if data else {}, seed=config.seed if seed is None else seed)
    folder = Path(out or f"runs/search-{Path(config.search.space).stem}")
    try:
        found = run_search(
            config,
            folder,
            resume=resume,
            where=Where(devices, num_nodes),
            progress=TrainingBar,
            command=shlex.join(["autonl", *sys.argv[1:]]),
        )
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C or SIGTERM between two trainings: one that runs is asked to stop
        if (folder / LAST).exists():
            print(f"stopped, saved in {folder}; go on with: {resume_command()}", file=sys.stderr)
        raise
    if found.result.stopped_by:
        report_stop(folder, found.result)
    elif found.result.first_process and json:
        typer.echo(json_format.dumps(summary(folder, found)))
    elif found.result.first_process:
        print_found(folder, found, recipe, data, set_)


def summary(folder: Path, found: Found) -> dict[str, object]:
    from autonl.arch.codec import block_to_string

    assert found.spec is not None
    best = found.candidates[0]
    return {
        "run": str(folder),
        "name": found.spec.name,
        "macs": best.macs,
        "milliseconds": found.milliseconds[0] if found.milliseconds else None,
        "budget": found.budget,
        "unit": found.unit,
        "selection_top1": best.top1,
        "trial_top1": best.trained,
        "lightnl": sum(block.lightnl is not None for block in found.spec.blocks),
        "blocks": [block_to_string(block) for block in found.spec.blocks],
        "warnings": found.warnings,
    }


def print_found(folder: Path, found: Found, recipe: str | None, data: str | None, settings: list[str]) -> None:
    from autonl.arch.macs import amount
    from autonl.profile import profile

    assert found.spec is not None
    print_profile(profile(found.spec))
    console = Console(highlight=False, soft_wrap=True)
    best = found.candidates[0]
    of_budget = f" for a budget of {amount(found.budget, found.unit)}" if found.budget else ""
    took = f"{amount(found.milliseconds[0], 'milliseconds')} by the table, " if found.milliseconds else ""
    right = f"{best.top1:.2f}% of the selection images right with the super-network's weights"
    if best.trained is not None:
        tried = [candidate.trained for candidate in found.candidates if candidate.trained is not None]
        right += f" and {best.trained:.2f}% after a short training, taken from {len(tried)} so tried"
        if max(tried) > best.trained:
            right += f": the gates' own, since the best of them ({max(tried):.2f}%) is better by less than its error"
    console.print(
        f"{took}{amount(best.macs)} MACs{of_budget}; {right}; {len(found.candidates)} networks compared", markup=False
    )
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False)
    # what the search alone is about: the images that chose the network must not judge it
    kept = [("set", setting) for setting in settings if not setting.startswith(("search.", "data.selection"))]
    options = "".join(
        f" --{name} {shlex.quote(value)}" for name, value in (("recipe", recipe), ("data", data), *kept) if value
    )
    console.print(f"\npictures: {folder / 'arch.png'}, {folder / 'search.png'}", markup=False)
    console.print(f"next: autonl train {shlex.quote(str(folder))}{options}", markup=False)

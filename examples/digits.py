"""`make search`: find a network for the embedded digits, train it, and see whether the search was worth it.

    python examples/digits.py [--out runs/demo] [--seed 0]

The network found, the zoo's `digits` and a network drawn at random from the same space all cost what `digits` costs,
and are trained from scratch with one recipe. One seed and 1,000 validation images: a difference of less than two
standard errors of such a comparison is called a draw.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autonl.arch.macs import count_macs
from autonl.arch.spec import ArchSpec
from autonl.arch.zoo import zoo_arch
from autonl.cli.progress import TrainingBar
from autonl.search.chance import random_network
from autonl.search.config import SearchConfig
from autonl.search.run import search
from autonl.search.space import load_space
from autonl.train.config import load_config
from autonl.train.run import train_classifier

RECIPE = "demo"
SEARCH_EPOCHS, TRAIN_EPOCHS = 5, 6
RUNS = ("search", "found", "digits", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="where the runs go; those that are there are replaced"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    remove_runs(arguments.out)
    console = Console(stderr=True, highlight=False)
    reference = zoo_arch("digits")
    budget = count_macs(reference)

    console.print(f"searching for a network of at most {budget / 1e6:.2f}M MACs")
    settings = [
        f"seed={arguments.seed}",
        f"schedule.epochs={SEARCH_EPOCHS}",
        "search.space=digits",
        f"search.macs={budget}",
    ]
    config = load_config(RECIPE, settings, SearchConfig)
    found = search(config, arguments.out / "search", progress=TrainingBar, command="make search")
    if found.spec is None:
        raise SystemExit(130)  # Ctrl-C
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False)
    contenders = {
        "found": found.spec,
        "digits": reference,
        "random": random_network(load_space("digits"), budget, random.Random(arguments.seed)),
    }
    rows = {}
    for name, spec in contenders.items():
        console.print(f"training: {name}")
        rows[name] = train(name, spec, arguments)
    report(contenders, rows, arguments.out)


def remove_runs(out: Path) -> None:
    """Of this example, from before; a folder that holds anything else is left alone."""
    if not out.exists():
        return
    if not out.is_dir() or not all(run.name in RUNS and (run / "config.yaml").is_file() for run in out.iterdir()):
        raise SystemExit(
            f"--out {out}: holds more than runs of this example ({', '.join(RUNS)}); choose another folder"
        )
    shutil.rmtree(out)


def train(name: str, spec: ArchSpec, arguments: Any) -> dict[str, float]:
    config = load_config(RECIPE, [f"seed={arguments.seed}", f"schedule.epochs={TRAIN_EPOCHS}"])
    result = train_classifier(spec, config, arguments.out / name, progress=TrainingBar, command="make search")
    if result.stopped_by:
        raise SystemExit(128 + result.stopped_by)
    return result.metrics


def report(contenders: dict[str, ArchSpec], rows: dict[str, dict[str, float]], out: Path) -> None:
    table = Table(box=None, pad_edge=False, title="the same MACs, the same recipe, trained from scratch, one seed each")
    table.add_column("network")
    for column in ("MACs (M)", "LightNL blocks", "top-1 (%)"):
        table.add_column(column, justify="right")
    for name, spec in contenders.items():
        lightnl = str(sum(block.lightnl is not None for block in spec.blocks))
        table.add_row(name, f"{count_macs(spec) / 1e6:.2f}", lightnl, f"{rows[name]['top1']:.1f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    best = max(rows, key=lambda name: rows[name]["top1"])
    rival = max((name for name in rows if name != best), key=lambda name: rows[name]["top1"])
    difference = rows[best]["top1"] - rows[rival]["top1"]
    # the two networks' errors on the same images, taken as independent: an upper bound
    shares = [rows[name]["top1"] / 100 for name in (best, rival)]
    noise = 100 * math.sqrt(sum(p * (1 - p) / rows[best]["val_images"] for p in shares))
    verdict = f"{best} wins" if difference > 2 * noise else f"a draw: {best} is ahead"
    console.print(f"\n{verdict} by {difference:.1f} points of top-1; two standard errors are {2 * noise:.1f}")
    console.print(f"pictures: {out}/search/arch.png, {out}/search/search.png", markup=False)
    console.print(f"next: autonl profile {out}/search    autonl search --help", markup=False)


if __name__ == "__main__":
    main()

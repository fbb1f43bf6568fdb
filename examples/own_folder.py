"""Search on your own folder of images, train what is found, and write a report.

    python examples/own_folder.py flowers --macs 50% --res 96 --out runs/flowers

The folder holds a folder of images for every class. The same as `autonl search`, `train` and `report`, from Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from autonl.arch.macs import count_macs
from autonl.cli.progress import TrainingBar
from autonl.report.images import judge
from autonl.report.page import render, section
from autonl.report.runs import read_run
from autonl.search.config import SearchConfig
from autonl.search.run import search
from autonl.train.config import load_config, replace
from autonl.train.run import train_classifier


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder of class folders")
    parser.add_argument("--macs", default="50%", help="the budget: 20M, or a share of the largest network, 50%%")
    parser.add_argument("--res", default="96", help="side of the images")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="at most the number of training images")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="of both runs")
    parser.add_argument("--out", type=Path, default=Path("runs/own"))
    given = parser.parse_args(arguments)

    both = [f"schedule.epochs={given.epochs}", f"data.batch_size={given.batch_size}"]
    wanted = [f"search.macs={given.macs}", f"search.resolution={given.res}"]
    config = replace(load_config(None, [*both, *wanted, *given.set], SearchConfig), data={"path": given.data})
    found = search(config, given.out / "search", progress=TrainingBar)
    if found.spec is None:
        raise SystemExit("stopped; resume with `autonl search --resume`")
    print(f"found {found.spec.name}: {count_macs(found.spec) / 1e6:.2f}M MACs")
    for warning in found.warnings:
        print(f"warning: {warning}")

    # a setting of the search is none of a training
    settings = [*both, *(setting for setting in given.set if not setting.startswith("search."))]
    training = replace(load_config(None, settings), data={"path": given.data})
    result = train_classifier(found.spec, training, given.out / "trained", progress=TrainingBar)
    print(f"top-1 {result.metrics['top1']:.1f} % of {result.metrics['val_images']:.0f} validation images")

    trained = given.out / "trained"
    page = render([section(read_run(given.out / "search")), section(read_run(trained), judge(trained))])
    (given.out / "report.html").write_text(page, encoding="utf-8")
    print(f"next: open {given.out / 'report.html'} in a browser")


if __name__ == "__main__":
    main()

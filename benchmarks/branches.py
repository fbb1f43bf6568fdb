"""What LightNL's branches do in a trained network, on its validation images.

    python -m benchmarks.branches RUN [RUN ...] [--data DIR] [--count 2000] [--out benchmarks/results]

LightNL adds a branch BN(u) to x. A row of branches.csv a block, over images, each image a root mean square of its own:

    branch          of the branch over that of x, median: what the block does to an ordinary image
    ordinary        of u as the BN normalises it, median: 1 where images are alike, near 0 where a few set the scale
    largest         the same of the image with the largest u
    not_finite      images whose branch is not finite; the others are counted without them

In evaluation, with the running statistics: in training a batch is normalised by its own.

Rows of another call for the same run are replaced; docs/results.md is made from the file.
"""

from __future__ import annotations

import argparse
from datetime import date
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autonl.data.loaders import Loaders, view_of
from autonl.data.sources import open_source
from autonl.nn.light_nonlocal import LightNL
from autonl.train.config import replace
from autonl.train.folder import run_config
from autonl.train.run import known_classes
from autonl.weights import load
from benchmarks import RESULTS, put_rows, read_rows

COLUMNS = ("run", "block", "operator", "branch", "ordinary", "largest", "not_finite", "images", "torch", "date")


class Watch:
    """Takes down what a LightNL does, image by image."""

    def __init__(self, block: LightNL) -> None:
        self.x = torch.empty(0)
        self.branch: list[Tensor] = []
        self.normalised: list[Tensor] = []
        block.register_forward_pre_hook(self.note_input)
        block.bn.register_forward_hook(self.note_branch)

    def note_input(self, block: nn.Module, inputs: tuple[Tensor]) -> None:
        self.x = inputs[0]

    def note_branch(self, bn: Any, inputs: tuple[Tensor], branch: Tensor) -> None:
        mean, variance = (values.double().view(1, -1, 1, 1) for values in (bn.running_mean, bn.running_var))
        self.branch.append(rms(branch) / rms(self.x))
        self.normalised.append(rms((inputs[0].double() - mean) / (variance + bn.eps).sqrt()))


def rms(maps: Tensor) -> Tensor:
    """(N, C, H, W) -> (N,)"""
    return maps.double().square().mean((1, 2, 3)).sqrt()


@torch.no_grad()
def rows_of(run: Path, data: str | None, count: int) -> list[dict[str, Any]]:
    config = run_config(run)
    config = replace(config, data={"path": data or config.data.path})
    source = open_source(config.data, classes=known_classes(run))
    model: Any = load(run)
    blocks = {name: block for name, block in model.named_modules() if isinstance(block, LightNL)}
    watches = {name: Watch(block) for name, block in blocks.items()}
    loaders = Loaders(config.data, config.augment, view_of(model, config.data), model.num_classes, torch.device("cpu"))
    seen = 0
    for images, _ in loaders.evaluation(source.validation):
        model(images[: count - seen])
        seen += len(images[: count - seen])
        if seen == count:
            break
    rows = []
    for name, watch in watches.items():
        branch, normalised = torch.cat(watch.branch), torch.cat(watch.normalised)
        finite = branch.isfinite() & normalised.isfinite()
        figures = [nan] * 3
        if finite.any():
            figures = [branch[finite].median(), normalised[finite].median(), normalised[finite].max()]
        operator = "lightnl_energy" if blocks[name].energy else "lightnl"
        known = (run.name, name, operator, *(f"{value:.3g}" for value in figures), int((~finite).sum()), seen)
        rows.append(dict(zip(COLUMNS, (*known, torch.__version__, date.today().isoformat()), strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", help="where the images are, if not where the run says")
    parser.add_argument("--count", type=int, default=2000, help="of the validation images, the first so many")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    path = arguments.out / "branches.csv"
    for run in arguments.runs:
        rows = rows_of(run.absolute(), arguments.data, arguments.count)
        others = [row for row in read_rows(path) if row["run"] != run.absolute().name]
        put_rows(path, COLUMNS, [*others, *rows])
        for row in rows:
            print(*row.values())
        print(f"{run}: {len(rows)} LightNL blocks")


if __name__ == "__main__":
    main()

"""How well a short training tells networks apart: what the trials of a search can know.

    python -m benchmarks.fidelity --data DIR [--epochs 2 4 8] [--set data.image_size=64]

The networks of suite `search` whose top-1 after a whole training is known are trained for a few epochs and judged on
held-out training images, as a trial is; one row each in benchmarks/results/fidelity.csv, where it is not there yet.
`losses` are those of the training, epoch by epoch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from autonl.data.loaders import Loaders, view_of
from autonl.data.sources import open_source
from autonl.models import build
from autonl.search.compare import short_training
from autonl.search.config import SearchConfig
from autonl.train.config import load_config, replace
from autonl.train.folder import view_settings
from autonl.train.loop import launch
from benchmarks import RESULTS, add_rows, read_rows
from benchmarks.evidence.jobs import RECIPE, RESOLUTION, SUITES
from benchmarks.evidence.run import Setup, commit, network_of

NAMES = ("random", "found", "found without LightNL", "found with trials")
COLUMNS = ("job", "seed", "epochs", "selection_top1", "top1", "seconds", "commit", "resolution", "losses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="an unpacked set with train/ and val/")
    parser.add_argument("--epochs", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the rows of suite search are")
    parser.add_argument("--out", type=Path, default=RESULTS / "fidelity.csv", help="rows are added to it")
    parser.add_argument("--only", action="append", help="networks whose JOB/SEED contains this")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting for every training")
    arguments = parser.parse_args()
    known = {(row["job"], row["seed"]): row["top1"] for row in read_rows(arguments.results / "evidence_search.csv")}
    setup = Setup(arguments.data, "", Path(), arguments.results / "evidence_architectures.json")
    jobs = [job for job in SUITES["search"]() if job.name in NAMES and (job.name, str(job.seed)) in known]
    jobs = [job for job in jobs if any(part in f"{job.name}/{job.seed}" for part in arguments.only or [""])]
    specs = {job: network_of(job, setup) for job in jobs}

    settings = [f"data.path={arguments.data}", f"data.image_size={RESOLUTION}", "data.selection=0.1"]
    config = load_config(RECIPE, [*settings, *arguments.settings], SearchConfig)
    fabric = launch()
    source = open_source(config.data, config.seed)
    view = view_of(build(specs[jobs[0]]), config.data)
    config = replace(config, data=view_settings(view))
    loaders = Loaders(config.data, config.augment, view, len(source.classes), fabric.device)
    train, selection = loaders.training(source.train), loaders.evaluation(source.selection)
    size = str(config.data.image_size)
    known_by = ("job", "seed", "epochs", "resolution")
    done = [tuple(row[column] for column in known_by) for row in read_rows(arguments.out)]
    wanted = [(job, epochs) for epochs in arguments.epochs for job in jobs]
    with tempfile.TemporaryDirectory() as folder:
        for job, epochs in wanted:
            if (job.name, str(job.seed), str(epochs), size) in done:
                continue
            started = time.perf_counter()
            place = Path(folder) / f"{job.name}_{job.seed}_{epochs}"
            result = short_training(specs[job], config, epochs, fabric, train, selection, place)
            if result.stopped_by:
                return
            row = {"job": job.name, "seed": job.seed, "epochs": epochs, "top1": known[job.name, str(job.seed)]}
            losses = " ".join(f"{epoch['train_loss']:.4f}" for epoch in result.history)
            row |= {"selection_top1": round(result.metrics["top1"], 2), "commit": commit(), "resolution": size}
            row |= {"losses": losses}
            add_rows(arguments.out, COLUMNS, [row | {"seconds": round(time.perf_counter() - started, 1)}])
            print(row, flush=True)


if __name__ == "__main__":
    main()

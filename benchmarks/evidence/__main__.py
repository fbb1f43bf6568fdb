"""Run what a suite still lacks, one row of benchmarks/results/evidence_SUITE.csv a job. Safe to stop and to repeat.

How each training went, epoch by epoch, is added to evidence_curves.csv.

    python ../shared/data/unpack.py tiny_imagenet100 DIR
    python -m benchmarks.evidence gain --data DIR [--max-minutes 9] [--at-once 3]
    python -m benchmarks.evidence gain --smoke          # every kind of job of the suite, on made images, on a CPU

Several suites run as one queue, in the order given. A job whose needs have not been met is left for later.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, add_rows, read_rows
from benchmarks.evidence.jobs import SUITES, TRIALS, Job
from benchmarks.evidence.run import COLUMNS, CURVES, Setup, folder_name, run

SMOKE = (
    *("schedule.epochs=1", "schedule.warmup_epochs=0", "data.batch_size=16", "data.workers=0", "data.stored_size=32"),
    *("data.evaluation_batch_size=16", "loop.calibrate_batches=0", "optim.lr=0.01"),
)

MARGIN = 1.15  # on what jobs are expected to take: one that is cut short has to be repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--data", help="an unpacked set with train/ and val/")
    parser.add_argument("--voc", help="the folder that holds VOCdevkit, for segmentation")
    parser.add_argument("--only", action="append", help="jobs whose key SUITE/NAME/SEED contains this; in this order")
    parser.add_argument("--max-minutes", type=float, default=1e9, help="start no job that could end later")
    parser.add_argument("--fill", action="store_true", help="start them all the same: the next call goes on with them")
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side: a GPU is idle between short kernels")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the CSVs are read and written")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="run folders")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting for every job")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # one job, its row on standard output as JSON
    arguments = parser.parse_args()
    jobs = [job for suite in arguments.suites for job in SUITES[suite]()]
    if arguments.only:
        jobs = list(dict.fromkeys(job for part in arguments.only for job in jobs if part in job.key))
    command = shlex.join(["python", "-m", "benchmarks.evidence", *sys.argv[1:]])
    if arguments.smoke:
        if any(job.kind == "segment" for job in jobs):
            parser.error("--smoke has no made images for segmentation: name another suite")
        smoke(jobs, command)
        return
    if not arguments.data:
        parser.error("--data DIR is needed; --smoke runs on made images")
    if not arguments.voc and any(job.kind == "segment" for job in jobs):
        parser.error("--voc DIR is needed: the folder that holds VOCdevkit")
    setup = Setup(
        arguments.data,
        arguments.voc or "",
        arguments.runs,
        arguments.out / "evidence_architectures.json",
        tuple(arguments.settings),
        arguments.at_once,
        command,
    )
    if arguments.job:
        (job,) = (job for job in jobs if job.key == arguments.job)
        row_file(setup, job).write_text(json.dumps(run(job, setup)))
        return
    queue(jobs, setup, arguments)


def queue(jobs: list[Job], setup: Setup, arguments: Any) -> None:
    """Every job in a process of its own, `at_once` of them at a time, until all is done or the time is up."""
    started = time.perf_counter()
    deadline = started + 60 * arguments.max_minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    setup.folder.mkdir(parents=True, exist_ok=True)
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    taken: dict[str, float] = {}  # seconds of the GPU that a running job has had: n jobs share it evenly
    latest: dict[str, float] = {}  # seconds of the GPU that a kind of job took last
    looked = started
    given_up: set[str] = set()
    while True:
        now = time.perf_counter()
        taken |= {key: taken.get(key, 0) + (now - looked) / len(running) for key in running}
        looked = now
        for key, (job, process) in list(running.items()):
            if process.poll() is None:
                continue
            del running[key]
            if process.returncode == 0:
                latest[job.kind] = taken[key]
                append(arguments.out, json.loads(row_file(setup, job).read_text()), setup.architectures)
            else:
                given_up.add(key)
            stopped = process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
            failed = "stopped; goes on when it is called again" if stopped else f"FAILED, see {log_file(setup, job)}"
            outcome = "done" if process.returncode == 0 else failed
            print(f"{time.perf_counter() - started:6.0f} s  {key}: {outcome}", flush=True)
        done = {key for suite in SUITES for key in keys(arguments.out, suite)}
        waiting = [job for job in jobs if job.key not in done | given_up | running.keys()]
        ahead = sum(max(0, latest.get(job.kind, 0) - taken.get(key, 0)) for key, (job, _) in running.items())
        ready = [
            job
            for job in waiting
            if (not job.needs or job.needs in done)
            and (arguments.fill or MARGIN * (ahead + latest.get(job.kind, 0)) < deadline - now)
        ]
        if not running and not ready:
            break
        if ready and len(running) < setup.at_once:
            job = ready[0]
            own = [sys.executable, "-m", "benchmarks.evidence", *sys.argv[1:], "--job", job.key]
            with log_file(setup, job).open("wb") as log:
                process = subprocess.Popen(own, stdout=log, stderr=subprocess.STDOUT)
            running[job.key] = job, process
            continue
        if time.perf_counter() > deadline:
            deadline = math.inf  # asked once: a second signal would not wait for the checkpoint
            given_up |= {job.key for job in waiting}
            for _, process in running.values():
                process.terminate()
        time.sleep(0.5)
    missing = sum(job.key not in done for job in jobs)
    print(f"{time.perf_counter() - started:6.0f} s  {missing} of {len(jobs)} jobs are left", flush=True)


def row_file(setup: Setup, job: Job) -> Path:
    return setup.folder / f"{folder_name(job.key)}.row.json"


def log_file(setup: Setup, job: Job) -> Path:
    return setup.folder / f"{folder_name(job.key)}.log"


def csv_path(out: Path, suite: str) -> Path:
    return out / f"evidence_{suite}.csv"


def keys(out: Path, suite: str) -> set[str]:
    return {f"{row['suite']}/{row['job']}/{row['seed']}" for row in read_rows(csv_path(out, suite))}


def append(out: Path, row: dict[str, Any], architectures: Path | None = None) -> None:
    """Only the process that runs the queue writes: jobs hand their row over in a file."""
    if architectures and "architecture" in row:
        known = json.loads(architectures.read_text()) if architectures.exists() else {}
        known[f"{row['suite']}/{row['job']}/{row['seed']}"] = row["architecture"]
        architectures.write_text(json.dumps(known, indent=1) + "\n")
    if "curve" in row:
        whose = {key: row[key] for key in ("suite", "job", "seed")}
        add_rows(csv_path(out, "curves"), CURVES, [whose | epoch for epoch in row["curve"]])
    add_rows(csv_path(out, row["suite"]), COLUMNS, [row])


def smoke(jobs: list[Job], command: str) -> None:
    """Seed 0 of every job, on a few made images, rows in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made_images(folder / "images")
        setup = Setup(str(folder / "images"), "", folder, folder / "architectures.json", SMOKE, 1, command)
        for job in jobs:
            if job.seed == 0:
                few = ("search.trials=2", "search.trial_resolution=32") if TRIALS[0] in job.settings else ()
                row = run(dataclasses.replace(job, resolution=32, settings=(*job.settings, *few)), setup)
                append(folder, row, setup.architectures)
                print({column: row[column] for column in ("job", "top1", "macs", "params", "seconds")}, flush=True)
        print(f"{sum(len(read_rows(csv_path(folder, suite))) for suite in SUITES)} rows")


def made_images(root: Path, classes: int = 3, count: int = 16) -> None:
    """Coloured noise, a colour a class."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 128, (32, 32, 3), dtype=np.uint8)
                pixels[..., label] += 100
                Image.fromarray(pixels).save(folder / f"{index}.png")


if __name__ == "__main__":
    main()

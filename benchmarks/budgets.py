"""Five budgets on the embedded digits, three seeds each: is the budget hit, and what are the networks worth?

    python -m benchmarks.budgets [--at-once 1] [--out benchmarks/results] [--shares 60] [--seeds 0] [--set SETTING]

On CPUs, one thread a job. Every job is `autonl search` and `autonl train` from scratch with the recipe `demo`. Rows of
digits_budgets.csv are appended as they come, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from autonl.arch.macs import count_macs
from autonl.search.space import load_space
from benchmarks import RESULTS, add_rows, read_rows

SHARES = (30, 45, 60, 75, 90)
SEEDS = (0, 1, 2)


def autonl(*arguments: str) -> dict[str, Any]:
    """One command of ours on one thread of a CPU; its JSON answer."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "autonl", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def run(share: int, seed: int, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        own = [word for setting in settings for word in ("--set", setting)]
        common = ("--data", "digits", "--recipe", "demo", "--seed", str(seed), *own)
        found = autonl("search", "--space", "digits", "--macs", f"{share}%", *common, "--out", f"{folder}/search")
        trained = autonl("train", f"{folder}/search", *common, "--out", f"{folder}/train")
    space = load_space("digits")
    return {
        "share": share,
        "seed": seed,
        "budget": found["budget"],
        "macs": found["macs"],
        "of_largest": round(100 * found["macs"] / count_macs(space.spec(space.largest)), 3),
        "lightnl_blocks": found["lightnl"],
        "top1": round(trained["top1"], 2),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES, help="budgets, %% of the largest network")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting for every command")
    arguments = parser.parse_args()
    path = arguments.out / "digits_budgets.csv"
    done = {(int(row["share"]), int(row["seed"])) for row in read_rows(path)}
    wanted = [(share, seed) for seed in arguments.seeds for share in arguments.shares]
    jobs = [job for job in wanted if job not in done]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for future in as_completed([pool.submit(run, *job, arguments.settings) for job in jobs]):
            row = future.result()
            print(*row.values(), flush=True)
            add_rows(path, list(row), [row])


if __name__ == "__main__":
    main()

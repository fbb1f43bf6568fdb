"""Does a table of `autonl measure` predict whole networks? Random ones of its space, added up and timed.

    autonl measure --runtime onnxruntime --out table.csv
    python -m benchmarks.latency table.csv [--space autonl] [--networks 20] [--rounds 60] [--seed 0] [--whole]

The smallest network of the space is timed along: what it takes now over what it took when the table was made is the
machine's pace, and taken out. A row a network goes to benchmarks/results/latency_networks.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import random
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torchmetrics.functional import kendall_rank_corrcoef

from autonl.arch.macs import count_macs
from autonl.errors import AutoNLError
from autonl.export.timing import interleaved
from autonl.latency import started
from autonl.latency_table import whole_network
from autonl.search.gates import Columns, Reached, from_choices
from autonl.search.latency import SMALLEST, TableCost, read_rows
from autonl.search.space import load_space
from benchmarks import RESULTS, add_rows

COLUMNS = (
    *("space", "operator", "resolution", "runtime", "threads", "seed", "whole", "network", "macs", "table", "pace"),
    *("low", "median", "high", "runs", "processor", "torch"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--space", default="autonl")
    parser.add_argument("--width", type=float, default=1.0, help="as the table was measured with")
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60, help="three runs of every network each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="networks of all blocks: none is left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    try:
        space = load_space(arguments.space)
        space = space.scaled(arguments.width) if arguments.width != 1 else space
        cost, columns = TableCost(space, arguments.table), Columns.of(space)
    except AutoNLError as error:
        parser.error(str(error))
    measured = next(row for row in read_rows(arguments.table) if row.block == SMALLEST)
    rng = random.Random(arguments.seed)
    drawn_from = dataclasses.replace(space, drop=not arguments.whole)
    drawn = {f"{number}": drawn_from.random(rng) for number in range(arguments.networks)}
    networks = {name: whole_network(space, choices) for name, choices in ({SMALLEST: space.smallest} | drawn).items()}
    with started(networks, measured.runtime, measured.threads) as runs:
        timings = interleaved(runs, measured.threads, arguments.rounds)
    rows: list[dict[str, Any]] = []
    for name, choices in drawn.items():
        spec, timing = space.spec(choices), timings[name]
        row = {
            "space": space.name, "operator": space.operator, "resolution": space.resolution,
            "runtime": measured.runtime, "threads": measured.threads, "seed": arguments.seed, "whole": arguments.whole,
            "network": name,
            "macs": count_macs(spec, spec.resolution),
            "table": cost(Reached.by(from_choices(choices, columns).double(), columns)).item(),
            "pace": timings[SMALLEST].low / measured.milliseconds,
            "low": timing.low, "median": timing.median, "high": timing.high, "runs": timing.runs,
            "processor": processor(), "torch": torch.__version__,
        }  # fmt: skip
        rows.append({key: format(value, ".5g") if isinstance(value, float) else value for key, value in row.items()})
    add_rows(arguments.out / "latency_networks.csv", COLUMNS, rows)
    tell(rows)


def processor() -> str:
    """Its name, family and model where Linux tells them, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in about:
        return platform.machine()
    return f"{about['model name']} (family {about.get('cpu family')}, model {about.get('model')})"


def tell(rows: list[dict[str, Any]]) -> None:
    print(f"{len(rows)} networks, machine at {float(rows[0]['pace']):.3f} of the table's time")
    for which in ("low", "median"):
        table, macs, taken = ([float(row[column]) for row in rows] for column in ("table", "macs", which))
        off = [abs(t * float(row["pace"]) / m - 1) for t, m, row in zip(table, taken, rows, strict=True)]
        tau = [kendall_rank_corrcoef(torch.tensor(values), torch.tensor(taken)).item() for values in (table, macs)]
        print(
            f"{which:6s}  median error {100 * median(off):.1f} %, largest {100 * max(off):.1f} %; "
            f"Kendall tau {tau[0]:.2f}, of MACs {tau[1]:.2f}"
        )


if __name__ == "__main__":
    main()

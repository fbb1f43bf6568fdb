"""What the trials of searches came to, in the order in which they ran, from run folders.

    python -m benchmarks.tried RUN [RUN ...] [--out benchmarks/results]

Appends to search_tried.csv, from which docs/results.md is made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autonl.search.trials import drawn_blind
from benchmarks import RESULTS, add_rows

COLUMNS = ("search", "trial", "drawn_by", "trained", "supernet", "blocks", "lightnl", "se")


def rows_of(run: Path) -> list[dict[str, Any]]:
    """search.json has the trials by their result, trials.json by their number."""
    candidates = json.loads((run / "search.json").read_text())["candidates"]
    candidates = [one for one in candidates if one["trained"] is not None]
    results = [top1 for top1, _ in json.loads((run / "trials.json").read_text()).values()]
    by_gates, first = drawn_blind(len(results))
    rows = []
    for number, top1 in enumerate(results, 1):
        (index, *_) = (index for index, one in enumerate(candidates) if one["trained"] == top1)
        one = candidates.pop(index)
        drawn_by = "gates" if number <= by_gates else "whims" if number <= first else "results"
        figures = (round(top1, 2), round(one["top1"], 2), sum(one["kept"]))
        counts = (sum("_nl" in block for block in one["blocks"]), sum("_se" in block for block in one["blocks"]))
        rows.append(dict(zip(COLUMNS, (run.name, number, drawn_by, *figures, *counts), strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for run in arguments.runs:
        add_rows(arguments.out / "search_tried.csv", COLUMNS, rows := rows_of(run))
        print(f"{run}: {len(rows)} trials")


if __name__ == "__main__":
    main()

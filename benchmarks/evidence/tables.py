"""The tables of docs/results.md that are not of a suite: what other benchmarks wrote."""

from __future__ import annotations

from statistics import mean, median

from benchmarks import RESULTS, read_rows
from benchmarks.evidence.groups import Group, correlated

FIDELITY = """
Networks of the search's table, random and found, trained once for so many epochs on nine tenths of the training
images, judged by the rest (`python -m benchmarks.fidelity --data DIR`, an H200 with three and more other jobs on it,
torch 2.11; median seconds, with the recording of the passes). The interval is Fisher's, of 95 %: of this few networks
the correlation is hardly known, and which of these ways is better not at all. All the same it was this table, which
looks at validation images, by which 12 epochs at 64 px were chosen for the trials. Even a perfect judge would not
reach 1: whole trainings of one network differ by their seed. A network that was itself chosen by such a trial is left
out.
"""

CHOSEN_BY_TRIALS = "found with trials"

TRIED = """
A search draws its first trials by its gates and at random ("whims"), the later ones by what trials before them ended
at. Mean top-1 on the selection images after 12 epochs at 64 px (at 96 px in the search at 192 px), and how many trials
(`python -m benchmarks.tried RUN` reads them out of run folders). The searches of widths and very small settings have
LightNL by energy. Of the {n} trials that were drawn before any result was known, top-1 is correlated, within searches,
by {supernet} with what the super-network gave the same network, by {blocks} with its number of blocks, by {lightnl}
with its LightNL blocks and by {se} with its SE blocks (Fisher's intervals of 95 %). There is no sign that the
super-network tells networks at one budget apart. What short trainings like need not be what whole ones like: what
trials find is believed after a whole training.
"""

BRANCHES = """
Per image, the root mean square of a branch over its map, in evaluation. "Ordinary image" is the median image's where
the BN has normalised it: near 1 where images are alike, near 0 where a few are so far above all others that they set
the BN's scale. As published, LightNL grows with the cube of its input. ReLU6 bounds that in MobileNetV2; swish, which
the search space has, does not, and the next LightNL takes the cube of the cube. Divided by the energy of what it
attends to, it grows with its input. Whether networks with swish end better with that stands in the table of the search:
rows "by energy".

One training each on a CPU, by the recipe `tiny_imagenet` at 64 px with batches of 128, a rate of 0.125 and five epochs,
the first of them warm-up, stopped after that; then `python -m benchmarks.branches RUN` on the first 2,000 validation
images.
"""


def other_tables() -> list[str]:
    return [*branches(), *fidelity(), *tried(), *digits()]


def branches() -> list[str]:
    """What `python -m benchmarks.branches` saw."""
    rows = read_rows(RESULTS / "branches.csv")
    if not rows:
        return []
    lines = ["## Does LightNL reach an ordinary image?", ""]
    lines += [
        "| network | LightNL blocks | ordinary image | largest image | branch / x, ordinary image | images not finite |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for run in dict.fromkeys(row["run"] for row in rows):
        here = [row for row in rows if row["run"] == run]
        values = {name: [float(row[name]) for row in here] for name in ("ordinary", "largest", "branch", "not_finite")}
        spans = {name: f"{min(found):.2g} to {max(found):.2g}" for name, found in values.items()}
        cells = (run, str(len(here)), spans["ordinary"], f"up to {max(values['largest']):.2g}", spans["branch"])
        lines.append(f"| {' | '.join(cells)} | {max(values['not_finite']):.0f} of {here[0]['images']} |")
    return [*lines, BRANCHES]


def fidelity() -> list[str]:
    """What `python -m benchmarks.fidelity` found."""
    rows = [row for row in read_rows(RESULTS / "fidelity.csv") if row["job"] != CHOSEN_BY_TRIALS]
    if not rows:
        return []
    lines = ["## How well does a short training tell networks apart?", ""]
    lines += ["| px | epochs | seconds | top-1 on held-out images | after a whole training | correlation | n |"]
    lines += ["|---:|---:|---:|---:|---:|---:|---:|"]
    for px, epochs in sorted({(int(row["resolution"]), int(row["epochs"])) for row in rows}, reverse=True):
        here = [row for row in rows if (int(row["resolution"]), int(row["epochs"])) == (px, epochs)]
        short, whole = ([float(row[column]) for row in here] for column in ("selection_top1", "top1"))
        spans = [f"{min(values):.2f} to {max(values):.2f}" for values in (short, whole)]
        seconds = median(float(row["seconds"]) for row in here)
        cells = (*spans, correlated(short, whole), str(len(here)))
        lines.append(f"| {px} | {epochs} | {seconds:.0f} | {' | '.join(cells)} |")
    return [*lines, FIDELITY]


def tried() -> list[str]:
    """What `python -m benchmarks.tried` read out of searches."""
    rows = read_rows(RESULTS / "search_tried.csv")
    if not rows:
        return []
    kinds = {"gates": "the gates", "whims": "whims", "results": "earlier results"}
    lines = ["## What do the trials of a search find?", ""]
    lines += [f"| search | {' | '.join(f'drawn by {name}' for name in kinds.values())} | best |", "|---|" + "---:|" * 4]
    for search in dict.fromkeys(row["search"] for row in rows):
        here = {kind: [float(row["trained"]) for row in rows if is_trial(row, search, kind)] for kind in kinds}
        cells = [f"{mean(found):.1f} ({len(found)})" for found in here.values()]
        lines.append(f"| {search} | {' | '.join(cells)} | {max(max(found) for found in here.values()):.1f} |")
    blind = [row for row in rows if row["drawn_by"] != "results"]
    known = {
        name: correlated(within_searches(blind, name), within_searches(blind, "trained"))
        for name in ("supernet", "blocks", "lightnl", "se")
    }
    return [*lines, TRIED.format(n=len(blind), **known)]


def within_searches(rows: list[dict[str, str]], column: str) -> list[float]:
    """The column's values less their mean over the row's search."""
    means = {
        search: mean(float(row[column]) for row in rows if row["search"] == search)
        for search in {row["search"] for row in rows}
    }
    return [float(row[column]) - means[row["search"]] for row in rows]


def is_trial(row: dict[str, str], search: str, kind: str) -> bool:
    return (row["search"], row["drawn_by"]) == (search, kind)


def digits() -> list[str]:
    """What `python -m benchmarks.budgets` found on the embedded set."""
    rows = read_rows(RESULTS / "digits_budgets.csv")
    if not rows:
        return []
    lines = ["## Is the budget hit? The embedded digits, on a CPU", ""]
    lines += ["| budget, % of the largest network | found, % | LightNL blocks | top-1 | n |"]
    lines += ["|---:|---:|---:|---:|---:|"]
    for share in sorted({int(row["share"]) for row in rows}):
        here = sorted((row for row in rows if int(row["share"]) == share), key=lambda row: row["seed"])
        found = ", ".join(f"{float(row['of_largest']):.2f}" for row in here)
        blocks = ", ".join(row["lightnl_blocks"] for row in here)
        top1 = Group(str(share), [float(row["top1"]) for row in here], here).cell()
        lines.append(f"| {share} | {found} | {blocks} | {top1} | {len(here)} |")
    lines += ["", f"`python -m benchmarks.budgets`, one thread, torch {rows[0]['torch']}; 1,000 validation images."]
    return lines

"""docs/results.md from the CSVs: `python -m benchmarks.evidence.document [--check]`.

Tables, differences and whether a claim holds come from the CSVs; what stands around them is in `words`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.evidence.curves import ahead_on_the_way, means_on_the_way
from benchmarks.evidence.groups import (
    Group,
    correlated,
    difference,
    groups,
    no_worse,
    overlap,
    points_apart,
    read,
    runs_to_show,
    verdict,
)
from benchmarks.evidence.jobs import ALL_LAYERS, FOUND, LARGER, LONGER, SUITES, WITHOUT
from benchmarks.evidence.tables import other_tables
from benchmarks.evidence.words import CLAIMS, HEAD, SEARCH, SEGMENTATION, TITLES, TUNING, UNSEEN

DOC = RESULTS.parents[1] / "docs" / "results.md"

FIGURE = "![top-1 against MACs](images/results_macs.svg)\n"
WIDTHS_FIGURES = {
    "results_widths": "top-1 against MACs: MobileNetV2 with and without LightNL",
    "results_small": "top-1 against MACs: very small settings",
}


# The same run in another suite's table: {suite: {name there: name in suite gain}}
SHARED = {
    "search": {"MobileNetV2-LightNL": "+ LightNL", "MobileNetV2": "MobileNetV2"},
    "table2": {"none": "MobileNetV2", "lightnl": "+ LightNL"},
}


def table(found: dict[str, Group], metric: str, columns: dict[str, Callable[[Group], str]]) -> list[str]:
    lines = [f"| | {metric} | n | {' | '.join(columns)} |", "|---|---:|---:|" + "---:|" * len(columns)]
    for group in found.values():
        cells = [group.name, group.cell(), str(len(group.values)), *(make(group) for make in columns.values())]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def span(column: str, scale: float = 1, form: str = ".2f") -> Callable[[Group], str]:
    """The column's values over the runs: one number, or from - to."""

    def make(group: Group) -> str:
        known = [float(row[column]) / scale for row in group.rows if row[column]]
        values = [value for value in known if not math.isnan(value)]
        if not values:
            return "-"
        low, high = format(min(values), form), format(max(values), form)
        missing = f", {len(known) - len(values)} NaN" if len(known) > len(values) else ""
        return (low if low == high else f"{low} to {high}") + missing

    return make


def section(suite: str) -> list[str]:
    rows = read(suite)
    if not rows:
        return []
    for name, there in SHARED.get(suite, {}).items():
        rows += [row | {"job": name} for row in read("gain") if row["job"] == there]
    declared = list(dict.fromkeys(job.name for job in SUITES[suite]()))  # rows come as jobs end
    rows.sort(key=lambda row: declared.index(row["job"]) if row["job"] in declared else len(declared))
    metric = {"tuning": "selection_top1", "segmentation": "miou"}.get(suite, "top1")
    found = groups(rows, metric)
    claimed = found | (unseen(found["random"]) if suite == "search" else {})
    columns = {"MACs (M)": span("macs", 1e6), "params (M)": span("params", 1e6)}
    if suite in ("search", "budget", "widths", "ablation"):
        columns["LightNL blocks"] = span("lightnl_blocks", form=".0f")
    if suite == "segmentation":
        columns |= {"training loss": span("train_loss"), "validation loss": span("val_loss")}
    lines = [f"## {TITLES[suite]}", ""]
    if found:
        lines += [*table(found, metric.replace("_", " "), columns), ""]
    lines += [f"- {claim.text}: {verdict(claim, claimed)}." for claim in CLAIMS if claim.suite == suite]
    if suite == "table2":
        lines += [rivals(found)]
    if suite == "widths":
        lines += gains(found)
    kept: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if row["job"].endswith(": search") and "without LightNL" not in row["job"]:
            kept[row["job"].removesuffix(": search")].append(row["lightnl_blocks"])
    if kept:
        told = "; ".join(f"{name}: {', '.join(blocks)}" for name, blocks in kept.items())
        lines += [f"- LightNL blocks that the searches kept, by seed: {told}."]
    if suite == "widths":
        drawn = [name for name in WIDTHS_FIGURES if (DOC.parent / "images" / f"{name}.svg").exists()]
        lines += [f"\n![{WIDTHS_FIGURES[name]}](images/{name}.svg)" for name in drawn]
    if suite == "tuning":
        lines += [TUNING]
    if suite == "segmentation":
        lines += [
            SEGMENTATION.format(
                course="\n".join(ahead_on_the_way("MobileNetV2", "+ LightNL")), **single_segmentations(found)
            )
        ]
    if suite == "search":
        told = what_random_networks_like(found["random"]) | around_the_search(found) | why_lightnl_is_not_shown(rows)
        lines += [SEARCH.format(exploding=runs_that_explode(found), **told)]
    for name, other in (("kernels", "plain"), (ALL_LAYERS, "plain"), (f"AutoNL-L, {ALL_LAYERS}", "AutoNL-L")):
        if suite == "kernels" and found.keys() >= {name, other}:
            lines += [f"- From smallest to largest, and {name} less {other}: {overlap(found[name], found[other])}."]
    hardware = sorted({f"{row['gpu']}, torch {row['torch']}, timm {row['timm']}" for row in rows})
    lines += ["", f"{'; '.join(hardware)}.", ""]
    return lines


def unseen(random: Group) -> dict[str, Group]:
    rows = [row for row in random.rows if int(row["seed"]) >= 5]
    return groups([row | {"job": UNSEEN} for row in rows], "top1")


def explodes(row: dict[str, str]) -> bool:
    """Whether a run's outputs for some validation images are infinite, or as good as that; guessing costs 4.6."""
    return bool(row["val_loss"]) and not float(row["val_loss"]) < 10


def runs_that_explode(found: dict[str, Group]) -> str:
    counts = {name: sum(map(explodes, group.rows)) for name, group in found.items()}
    return "; ".join(f"{count} of {len(found[name].rows)} {name}" for name, count in counts.items() if count)


def single_segmentations(found: dict[str, Group]) -> dict[str, str]:
    """What LightNL brought to single segmentations that differ from the others in one thing."""

    def ahead(better: str, worse: str) -> str:
        (one,), (other,) = ([row for row in found[name].rows if row["seed"] == "0"] for name in (better, worse))
        return f"{float(one['miou']) - float(other['miou']):+.1f}"

    names = {"longer": ", 120 epochs", "larger": ", backbone at 128 px"}
    both = {key: ahead(f"+ LightNL{name}", f"MobileNetV2{name}") for key, name in names.items()}
    both["largest"] = ahead("+ LightNL", "MobileNetV2")  # of all validation losses
    return both | {"ratio": ahead("+ LightNL of all channels", "MobileNetV2")}


def not_run() -> list[str]:
    """What is declared and has no row, by suite."""
    lines = ["## What was not run", ""]
    for suite, jobs in SUITES.items():
        done = {(row["job"], row["seed"]) for row in read(suite)}
        left: dict[str, list[str]] = defaultdict(list)
        for job in jobs():
            if (job.name, str(job.seed)) not in done and not job.name.endswith(": search"):
                left[job.name].append(str(job.seed))
        if left:
            told = "; ".join(f"{name} (seed {', '.join(seeds)})" for name, seeds in left.items())
            lines.append(f"- `{suite}`: {told}.")
    return [*lines, ""]


def what_random_networks_like(random: Group) -> dict[str, Any]:
    """How their top-1 goes with their numbers of blocks."""
    networks = [row["blocks"].split() for row in random.rows]
    counts = {
        "blocks": [len(blocks) for blocks in networks],
        "lightnl": [sum("_nl" in block for block in blocks) for blocks in networks],
        "se": [sum("_se" in block for block in blocks) for blocks in networks],
    }
    known = {name: correlated(values, random.values) for name, values in counts.items()}
    return known | {"n": len(networks), "fewest": min(counts["lightnl"]), "most": max(counts["lightnl"])}


def around_the_search(found: dict[str, Group]) -> dict[str, str]:
    """What to know of its differences to MobileNetV2-LightNL and to random networks."""
    searched, random, rival = found[FOUND], found["random"], found["MobileNetV2-LightNL"]
    planned = groups([row for row in random.rows if int(row["seed"]) < 5], "top1")["random"]
    return {
        "whole": f"{searched.mean - rival.mean:.2f}",
        "space": f"{random.mean - rival.mean:.2f}",
        "space_without": f"{found[WITHOUT].mean - rival.mean:.2f}",
        "best_random": f"{max(random.values):.2f}",
        "best_found": f"{max(searched.values):.2f}",
        "planned": points_apart(searched, planned),
    }


def why_lightnl_is_not_shown(rows: list[dict[str, str]]) -> dict[str, str]:
    """What the networks of searches with and without LightNL tell, and with it taken out."""
    losses, top1, params = (groups(rows, metric) for metric in ("train_loss", "top1", "params"))
    at_128 = [top1[name + LARGER] for name in (FOUND, WITHOUT)]
    published = [row for name in (LONGER, LARGER, ", LightNL of all channels") for row in top1[FOUND + name].rows]
    without = {row["seed"]: float(row["macs"]) for row in top1[f"{FOUND}, then LightNL taken out"].rows}
    shares = sorted(1 - without[row["seed"]] / float(row["macs"]) for row in top1[FOUND].rows)
    return {
        "course": "\n".join(means_on_the_way(FOUND, WITHOUT, (LONGER, LARGER))),
        "fit": difference(losses[FOUND], losses[WITHOUT]),
        "fit_out": difference(losses[f"{FOUND}, then LightNL taken out"], losses[FOUND]),
        "heavier": f"{params[FOUND].mean / params[WITHOUT].mean - 1:.0%}".replace("%", " %"),
        "longer": points_apart(top1[FOUND + LONGER], top1[WITHOUT + LONGER]),
        "larger": points_apart(*at_128),
        "ratio": points_apart(top1[f"{FOUND}, LightNL of all channels"], top1[WITHOUT]),
        "needed": str(runs_to_show(1.0, *at_128)),
        "exploded": f"{sum(map(explodes, published))} of the {len(published)}",
        "shares": ", ".join(f"{100 * share:.1f}" for share in shares),
    }


def rivals(found: dict[str, Group]) -> str:
    """LightNL against the operators that it was made lighter from, and what each adds to the network's MACs."""
    none, lightnl = found["none"], found["lightnl"]

    def extra(group: Group) -> float:
        return float(group.rows[0]["macs"]) - float(none.rows[0]["macs"])

    told: dict[str, list[str]] = defaultdict(list)
    for name, group in found.items():
        if group not in (none, lightnl):
            word = no_worse(lightnl, group)
            told[word].append(f"{name} {difference(lightnl, group)} ({extra(group) / extra(lightnl):.1f} times)")
    said = "; ".join(f"{word}: {', '.join(names)}" for word, names in told.items())
    return (
        "- LightNL is as accurate as the operators it was made lighter from (in points, and how many times its MACs"
        f" they add): {said}."
    )


def gains(found: dict[str, Group]) -> list[str]:
    """What LightNL, and the search, bring to each setting."""
    lines = []
    for what, ending, below in (("LightNL", " + LightNL", ""), ("The search", " found", " + LightNL")):
        names = [name.removesuffix(ending) for name in found if name.endswith(ending)]
        pairs = {name: (found[name + ending], found[name + below]) for name in names if name + below in found}
        if not pairs:
            continue
        wins = sum(better.mean > worse.mean for better, worse in pairs.values())
        told = ", ".join(f"{name} {difference(*pair)}" for name, pair in pairs.items())
        against = "MobileNetV2" if below == "" else "MobileNetV2-LightNL"
        runs = max(len(group.values) for pair in pairs.values() for group in pair)
        n = "one run each: too few to say of one setting" if runs == 1 else f"up to {runs} runs each"
        lines.append(f"- {what} is better than {against} in {wins} of {len(pairs)} settings ({n}), in points: {told}.")
    return lines


def document() -> str:
    lines = [line for suite in TITLES for line in section(suite)] + not_run()
    return f"{HEAD}\n{FIGURE}\n" + "\n".join([*lines, *other_tables()]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the document is not up to date")
    arguments = parser.parse_args()
    text = document()
    if not arguments.check:
        for path, drawing in figures().items():
            path.write_bytes(drawing)
        DOC.write_text(document())  # which has the figures that are there
        return
    if not DOC.exists() or DOC.read_text() != text:
        sys.exit(f"{DOC.name} is not what the CSVs say: run python -m benchmarks.evidence.document")
    stale = [path.name for path, drawing in figures().items() if not path.exists() or path.read_bytes() != drawing]
    if stale:
        sys.exit(f"{', '.join(stale)}: not what the CSVs say: run python -m benchmarks.evidence.document")


def figures() -> dict[Path, bytes]:
    from benchmarks.evidence.figures import FIGURES, draw, path_of

    drawn = {path_of(name): draw(name) for name in FIGURES}
    return {path: drawing for path, drawing in drawn.items() if drawing}


if __name__ == "__main__":
    main()

"""What the curves of trainings say: how far ahead one kind of run is of another, at each sixth of the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean

from benchmarks.evidence.groups import read

SIXTHS = [f"| | {' | '.join(f'{part}/6' for part in range(1, 7))} |", "|---|" + "---:|" * 6]


def curves_of(suite: str) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Epoch by epoch, by job and seed."""
    curves: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in read("curves"):
        if row["suite"] == suite:
            curves[row["job"], row["seed"]].append(row)
    return curves


def at_sixths(curve: list[dict[str, str]]) -> list[dict[str, str]]:
    return [curve[len(curve) * part // 6 - 1] for part in range(1, 7)]


def means_on_the_way(better: str, worse: str, changes: Iterable[str]) -> list[str]:
    """How far apart the means of searched networks are at each sixth of their schedules, where both have curves."""
    curves = curves_of("search")
    lines = [*SIXTHS]
    for change in changes:
        sides = [
            [at_sixths(curve) for (job, _), curve in curves.items() if job == side + change] for side in (better, worse)
        ]
        if not all(sides):
            continue
        for column, name, form in (("top1", "top-1", "+.1f"), ("train_loss", "training loss", "+.2f")):
            cells = []
            for ours, others in zip(*(zip(*runs, strict=True) for runs in sides), strict=True):  # epoch by epoch
                lead = mean(float(row[column]) for row in ours) - mean(float(row[column]) for row in others)
                cells.append(format(lead, form))
            lines.append(f"| {name}{change} | {' | '.join(cells)} |")
    return lines


def ahead_on_the_way(plain: str, lightnl: str) -> list[str]:
    """How far ahead a segmentation with LightNL is at each sixth of its schedule, for every pair with curves."""
    curves = curves_of("segmentation")
    lines = [*SIXTHS]
    for (job, seed), without in curves.items():
        ahead = curves.get((job.replace(plain, lightnl), seed))
        if not job.startswith(plain) or not ahead:
            continue
        pairs = list(zip(at_sixths(ahead), at_sixths(without), strict=True))
        for column, name, form in (("miou", "mIoU", "+.1f"), ("train_loss", "training loss", "+.2f")):
            cells = (format(float(one[column]) - float(other[column]), form) for one, other in pairs)
            which = job.removeprefix(plain).removeprefix(", ") or f"{len(without)} epochs"
            lines.append(f"| {name}, {which}, seed {seed} | {' | '.join(cells)} |")
    return lines

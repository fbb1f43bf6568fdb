"""Runs of one name as a group, and what two groups say of each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import correlation, mean, stdev

from benchmarks import RESULTS, read_rows

TOO_FEW = "too few runs to say"
FEWEST = 3  # runs that a verdict takes: two may lie close to each other by chance


@dataclass(frozen=True)
class Group:
    """The runs of one name: one metric, and what is the same for all of them."""

    name: str
    values: list[float]
    rows: list[dict[str, str]]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def error(self) -> float | None:
        return stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else None

    def cell(self) -> str:
        error = f" ± {self.error:.2f}" if self.error is not None else ""
        return f"{self.mean:.2f}{error}"


@dataclass(frozen=True)
class Claim:
    """`better` exceeds `worse` by at least `target` points."""

    suite: str
    text: str
    better: str
    worse: str
    target: float = 0.0


def read(suite: str) -> list[dict[str, str]]:
    return read_rows(RESULTS / f"evidence_{suite}.csv")


def groups(rows: Iterable[dict[str, str]], metric: str) -> dict[str, Group]:
    """By name, in the order in which names first appear."""
    by_name: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row[metric]:
            by_name[row["job"]].append(row)
    return {name: Group(name, [float(r[metric]) for r in found], found) for name, found in by_name.items()}


def verdict(claim: Claim, found: dict[str, Group]) -> str:
    if claim.better not in found or claim.worse not in found:
        return "not run yet"
    better, worse = found[claim.better], found[claim.worse]
    apart, noise = better.mean - worse.mean, noise_of(better, worse)
    n = f"n = {len(better.values)} and {len(worse.values)}"
    if noise is None:
        return f"{apart:+.2f} ({n}): {TOO_FEW}"
    figures = f"{points_apart(better, worse)} ({n})"
    if apart + noise < claim.target:
        return f"**smaller than that here**: {figures}" if apart > noise else f"**does not hold here**: {figures}"
    return f"**holds**: {figures}" if apart > max(noise, claim.target) else f"**not shown**: {figures}"


def noise_of(one: Group, other: Group) -> float | None:
    """Two standard errors of the difference of two means; of fewer than three runs none is known."""
    if min(len(one.values), len(other.values)) < FEWEST or one.error is None or other.error is None:
        return None
    return 2 * math.hypot(one.error, other.error)


def points_apart(better: Group, worse: Group) -> str:
    """Of three runs and more each."""
    return f"{better.mean - worse.mean:+.2f}, two standard errors {noise_of(better, worse):.2f}"


def runs_to_show(points: float, *spread_like: Group) -> int:
    """Of each side, for two standard errors of the difference, 2 sqrt(2 variance / n), to be no more than that."""
    return math.ceil(8 * mean(stdev(group.values) ** 2 for group in spread_like) / points**2)


def no_worse(one: Group, other: Group) -> str:
    """What is known about `one` being no worse."""
    apart, noise = one.mean - other.mean, noise_of(one, other)
    if noise is None:
        return TOO_FEW
    return "**does not hold here**" if apart < -noise else "**holds**" if apart > noise else "no difference shown"


def difference(better: Group, worse: Group) -> str:
    apart, noise = f"{better.mean - worse.mean:+.2f}", noise_of(better, worse)
    return apart if noise is None else f"{apart} ± {noise / 2:.2f}"


def overlap(one: Group, other: Group) -> str:
    low, high = max(min(one.values), min(other.values)), min(max(one.values), max(other.values))
    spans = ", ".join(f"{group.name} {min(group.values):.2f} to {max(group.values):.2f}" for group in (one, other))
    if noise_of(one, other) is None:
        return f"{spans}: {TOO_FEW}"
    said = "overlap" if low <= high else "**do not overlap**"
    return f"{spans}: they {said}; {points_apart(one, other)}"


def correlated(x: list[float], y: list[float]) -> str:
    """The correlation with Fisher's interval of 95 %; "-" of too few."""
    if len(x) <= 3:
        return "-"
    r, width = correlation(x, y), 1.96 / math.sqrt(len(x) - 3)
    low, high = (math.tanh(math.atanh(r) + side * width) for side in (-1, 1))
    return f"{r:.2f} ({low:.2f} to {high:.2f})"

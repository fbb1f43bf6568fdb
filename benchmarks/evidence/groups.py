"""Runs of one name as a group, and what two groups say of each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import correlation, mean, stdev

from benchmarks import RESULTS, read_rows


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
    apart = better.mean - worse.mean
    n = f"n = {len(better.values)} and {len(worse.values)}"
    if better.error is None or worse.error is None:
        return f"{apart:+.2f} ({n}): too few runs to say"
    noise = 2 * math.hypot(better.error, worse.error)
    figures = f"{apart:+.2f}, two standard errors {noise:.2f} ({n})"
    if apart + noise < claim.target:
        return f"**smaller than that here**: {figures}" if apart > noise else f"**does not hold here**: {figures}"
    return f"**holds**: {figures}" if apart > max(noise, claim.target) else f"**not shown**: {figures}"


def difference(better: Group, worse: Group) -> str:
    apart = f"{better.mean - worse.mean:+.2f}"
    if better.error is None or worse.error is None:
        return apart
    return f"{apart} ± {math.hypot(better.error, worse.error):.2f}"


def overlap(one: Group, other: Group) -> str:
    low, high = max(min(one.values), min(other.values)), min(max(one.values), max(other.values))
    spans = ", ".join(f"{group.name} {min(group.values):.2f} to {max(group.values):.2f}" for group in (one, other))
    if one.error is None or other.error is None:
        return f"{spans}: too few runs to say"
    apart, noise = one.mean - other.mean, 2 * math.hypot(one.error, other.error)
    said = "overlap" if low <= high else "**do not overlap**"
    return f"{spans}: they {said}; {apart:+.2f}, two standard errors {noise:.2f}"


def correlated(x: list[float], y: list[float]) -> str:
    """The correlation with Fisher's interval of 95 %; "-" of too few."""
    if len(x) <= 3:
        return "-"
    r, width = correlation(x, y), 1.96 / math.sqrt(len(x) - 3)
    low, high = (math.tanh(math.atanh(r) + side * width) for side in (-1, 1))
    return f"{r:.2f} ({low:.2f} to {high:.2f})"

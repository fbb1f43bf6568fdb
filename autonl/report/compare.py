"""Several runs beside each other: who is on the front, by how much they differ, and in which settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autonl.report.charts import Chart, Line, front
from autonl.report.runs import Run

# settings that say where a run went, not what it was
UNIMPORTANT = {"data.path", "data.workers"}


@dataclass(frozen=True)
class Point:
    number: int  # of the run, from 1
    name: str
    macs: float
    top1: float
    on_front: bool
    x: float
    y: float
    bar: tuple[float, float] | None  # two standard errors below and above, as places


@dataclass(frozen=True)
class Row:
    run: Run
    number: int
    top1: float | None
    error: float | None  # two standard errors of top1, from the number of images
    top1_difference: float | None  # to the first run that has one
    macs_ratio: float | None
    params_ratio: float | None
    on_front: bool


@dataclass(frozen=True)
class Comparison:
    rows: list[Row]
    chart: Chart | None  # its first line is the front
    points: list[Point]
    settings: list[tuple[str, list[Any]]]  # those that differ: name, a value a run

    @property
    def texts(self) -> list[str]:
        return [f"{point.number} {point.name}: {point.top1:.2f} % at {point.macs:,.2f}M MACs" for point in self.points]


def compare(runs: Sequence[Run]) -> Comparison:
    trained = [n for n, run in enumerate(runs) if not run.is_search and "top1" in run.result and run.macs]
    costs = [(float(runs[n].macs or 0), runs[n].result["top1"]) for n in trained]
    best = {trained[place] for place in front(costs)}
    rows = [row(runs, n, n in best) for n in range(len(runs))]
    chart, points = None, []
    if len(trained) > 1:
        on_front = sorted((runs[n].macs / 1e6, runs[n].result["top1"]) for n in best)  # type: ignore[operator]
        everyone = [(macs / 1e6, top1) for macs, top1 in costs]
        errors = [two_errors(runs[n]) or 0.0 for n in trained]
        # the axis holds the bars: differences within them would fill the chart otherwise
        ends = [(macs, top1 + sign * e) for (macs, top1), e in zip(everyone, errors, strict=True) for sign in (-1, 1)]
        lines = [Line("front", on_front), Line("", everyone, colour=1), Line("", ends)]
        chart = Chart("accuracy against MACs", "%", lines, x_label="MACs (M)")
        points = [
            Point(
                n + 1,
                runs[n].name,
                macs,
                top1,
                n in best,
                chart.x(macs),
                chart.y(top1),
                (chart.y(top1 - error), chart.y(top1 + error)) if error else None,
            )
            for n, (macs, top1), error in zip(trained, everyone, errors, strict=True)
        ]
    return Comparison(rows, chart, points, different(runs))


def two_errors(run: Run) -> float | None:
    """Two standard errors of top1, from the number of images."""
    top1, images = run.result.get("top1"), run.result.get("val_images")
    if top1 is None or not images or images <= 0 or not 0 <= top1 <= 100:
        return None
    return 200 * math.sqrt(top1 / 100 * (1 - top1 / 100) / images)


def row(runs: Sequence[Run], n: int, on_front: bool) -> Row:
    run = runs[n]
    top1, error = run.result.get("top1"), two_errors(run)
    # a search is judged on other images, with weights that were trained for all networks at once
    first = next((other for other in runs if "top1" in other.result and not other.is_search), None)
    difference = top1 - first.result["top1"] if first and top1 is not None and not run.is_search else None
    base = next((other for other in runs if other.macs), None)
    return Row(
        run,
        n + 1,
        top1,
        error,
        difference,
        run.macs / base.macs if base and base.macs and run.macs else None,
        run.params / base.params if base and base.params and run.params else None,
        on_front,
    )


def different(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all runs, "-" where a run has none."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in UNIMPORTANT)
    if not all(run.is_search for run in runs):  # a training has none of a search's own settings
        names = dict.fromkeys(name for name in names if not name.startswith("search."))
    table = [(name, [run.settings.get(name, "-") for run in runs]) for name in names]
    refs = [run.about.get("ref", "-") for run in runs]
    table = [("network", refs), *table]
    return [(name, values) for name, values in table if any(value != values[0] for value in values)]

"""Numbers -> where they stand in a drawing. Charts are small, so that one fits a phone and three a screen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 30
LARGEST = 1e100


@dataclass(frozen=True)
class Line:
    label: str
    points: list[tuple[float, float]]
    colour: int = 0  # of the page's series colours
    thin: bool = False


@dataclass
class Chart:
    title: str
    unit: str  # of the vertical axis, said in the read-out too
    lines: list[Line]
    level: tuple[float, str] | None = None  # a horizontal line, and what it is
    x_label: str = "epoch"
    colours: dict[str, int] = field(default_factory=dict)  # a legend where many lines share a colour

    def __post_init__(self) -> None:
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points] + ([self.level[0]] if self.level else [])
        self.x_ticks = ticks(min(xs), max(xs), 6, whole=self.x_label == "epoch")
        # one loss of millions would leave all others on the axis
        self.powers = min(ys) > 0 and max(ys) > 100 * statistics.median(ys)
        self.y_ticks = powers_of_ten(min(ys), max(ys)) if self.powers else ticks(min(ys), max(ys), 5)
        self.x_span = span([*xs, *(self.x_ticks if self.x_label != "epoch" else ())])
        self.y_span = span([*map(self.height, ys), *map(self.height, self.y_ticks)])

    def x(self, value: float) -> float:
        return place(value, self.x_span, LEFT, WIDTH - RIGHT)

    def y(self, value: float) -> float:
        return place(self.height(value), self.y_span, HEIGHT - BOTTOM, TOP)

    def height(self, value: float) -> float:
        return math.log10(value) if self.powers else value

    def path(self, line: Line) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in line.points)

    @property
    def legend(self) -> list[tuple[str, int]]:
        """What each colour means."""
        return list(self.colours.items()) or [(line.label, line.colour) for line in self.lines]

    def data(self) -> dict[str, Any]:
        """What the script needs to read a chart out."""
        return {
            "unit": self.unit,
            "xLabel": self.x_label,
            "thin": any(line.thin for line in self.lines),
            "lines": [
                {"label": line.label, "points": [(x, short(y), self.x(x), self.y(y)) for x, y in line.points]}
                for line in self.lines
            ],
        }


def place(value: float, values: tuple[float, float], start: float, end: float) -> float:
    low, high = values
    return round(start + (value - low) / (high - low) * (end - start), 1)


def span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) that cover the values; whole ones lie within them."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
        return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]
    return [n * step for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def powers_of_ten(low: float, high: float, most: int = 6) -> list[float]:
    """1, 10, 100 ... that cover the values; every second or third of them where there would be too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / (most - 1))
    return [10.0**power for power in range(first, last + step, step)]


def tick(value: float) -> str:
    """A number beside an axis, where there is room for six characters."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if factor <= abs(value) < 1e3 * factor and (factor > 1e3 or abs(value) >= 1e5):
            return f"{value / factor:g}{unit}"
    return short(value) if 1e-4 <= abs(value) < 1e9 or not value else f"{value:.0e}".replace("e+", "e")


def short(value: float) -> str:
    """A number as people read it: 4 figures, no exponent where there need not be one."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def number(value: object) -> float | None:
    """A value that can be drawn: neither NaN nor infinite, nor so large that its distance to another would be."""
    try:
        parsed = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return parsed if abs(parsed) < LARGEST else None


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points (cost, value) that no other point beats with less cost and more value, by cost."""
    order = sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1]))
    kept: list[int] = []
    for place in order:
        if not kept or points[place][1] > points[kept[-1]][1]:
            kept.append(place)
    return kept

"""Runs -> the page. Python says what is shown and where, the template how it looks."""

from __future__ import annotations

import base64
import hashlib
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from autonl.arch.macs import amount
from autonl.errors import shown
from autonl.report.charts import Chart, Line, short, tick
from autonl.report.compare import compare
from autonl.report.drawing import Part, draw
from autonl.report.images import Judged
from autonl.report.runs import Run
from autonl.report.searches import KINDS
from autonl.version import __version__

# columns of metrics.csv that belong into one chart: title, unit, {column: label}
CHARTS: list[tuple[str, str, dict[str, str]]] = [
    ("accuracy", "%", {"top1": "top-1", "top5": "top-5", "miou": "mIoU", "pixel_accuracy": "pixels right"}),
    ("loss", "", {"train_loss": "training", "train_task_loss": "training, without cost", "val_loss": "validation"}),
    ("MACs", "M", {"train_macs": "expected", "decided_macs": "decided"}),
    ("milliseconds", "ms", {"train_milliseconds": "expected", "decided_milliseconds": "decided"}),
    ("learning rate", "", {"lr": "learning rate"}),
    ("weight of the cost", "", {"train_cost_weight": "weight of the cost"}),
    ("gates that changed", "", {"gates_changed": "gates that changed"}),
    ("speed", "images/s", {"images_per_second": "speed"}),
]
LARGEST_MATRIX = 40  # classes; beyond it only the pairs are listed
PAIRS = 12
MOST_EPOCHS = 100  # of a gate's line


@dataclass
class Section:
    """One run as the page shows it."""

    run: Run
    figures: list[tuple[str, str]]
    parts: list[Part]
    charts: list[Chart]
    gates: list[Chart]
    judged: Judged | None = None
    matrix: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)

    def class_name(self, number: int) -> str:
        return self.run.classes[number] if number < len(self.run.classes) else str(number)

    @property
    def drawing(self) -> list[dict[str, Any]]:
        return [part.data() for part in self.parts]

    @property
    def overlays(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.run.overlays).decode()}" if self.run.overlays else ""

    @property
    def kernels(self) -> list[int]:
        return sorted({part.kernel for part in self.parts if part.kernel})

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.run.history for name in row))

    @property
    def matrix_labels(self) -> list[str]:
        """The classes beside the matrix, cut to what fits; none where the rows are too thin."""
        names = [self.class_name(number) for number in range(len(self.judged.confusion) if self.judged else 0)]
        return [name if len(name) <= 9 else f"{name[:8]}…" for name in names] if len(names) <= 24 else []

    @property
    def matrix_layout(self) -> dict[str, float]:
        """In units of a tenth of a cell: the room for names below, which are turned where cells are narrow."""
        size = len(self.judged.confusion) if self.judged else 0
        below = 0.0 if not self.matrix_labels else 0.8 * size if size <= 4 else 2.5 * size
        return {"size": size, "turned": size > 4, "width": 12.5 * size, "height": 10.0 * size + below}

    @property
    def matrix_texts(self) -> list[str]:
        return [
            f"{self.class_name(cell['true'])} taken for {self.class_name(cell['predicted'])}: "
            f"{cell['count']} of {cell['of']}, {100 * cell['share']:.1f} %"
            for cell in self.matrix
        ]


def section(run: Run, judged: Judged | None = None) -> Section:
    made = Section(run, key_figures(run), draw(run), curves(run), gate_charts(run), judged)
    if judged:
        made.matrix, made.pairs = matrix(judged), pairs(judged)
    return made


def render(sections: Sequence[Section]) -> str:
    """The whole page as text. Everything that a run folder says is escaped, and nothing is fetched."""
    style, script = (templates(name) for name in ("report.css", "report.js"))
    return (
        environment()
        .get_template("report.html")
        .render(
            sections=sections,
            comparison=compare([made.run for made in sections]) if len(sections) > 1 else None,
            style=style,
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            version=__version__,
        )
    )


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("autonl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "visible": visible,
        "embedded": embedded,
        "amount": amount,
        "short": short,
        "tick": tick,
        "quoted": quoted,
    }
    return made


def templates(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def visible(value: object) -> str:
    """Text in which nothing is hidden: control characters and marks that turn the direction are written as numbers."""
    return "".join(f"[U+{ord(c):04X}]" if hidden(c) else c for c in str(value))


def embedded(value: Any) -> Markup:
    """Data for the script: JSON that no markup can end, its texts visible."""

    def revealed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: revealed(inside) for key, inside in value.items()}
        if isinstance(value, list | tuple):
            return [revealed(inside) for inside in value]
        return visible(value) if isinstance(value, str) else value

    return htmlsafe_json_dumps(revealed(value), separators=(",", ":"))


def hidden(character: str) -> bool:
    kind = unicodedata.category(character)
    turns = unicodedata.bidirectional(character) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return kind in ("Cc", "Cs", "Co") or turns or character in "\u200e\u200f\u061c\u2028\u2029"


def quoted(value: object) -> str:
    """A setting's value."""
    return value if isinstance(value, str) else "default" if value is None else shown(value)


def key_figures(run: Run) -> list[tuple[str, str]]:
    figures = []
    for name, label in (("top1", "top-1"), ("miou", "mIoU")):
        if name in run.result:
            figures.append(
                (f"{label} on the selection images" if run.is_search else label, f"{run.result[name]:.2f} %")
            )
    if run.macs:
        of = " of the classifier" if run.kind == "segmentation" else ""
        figures += [(f"MACs{of}", amount(run.macs)), (f"params{of}", amount(run.params))]
    if run.search and run.search.budget:
        figures.append(("budget", amount(run.search.budget, run.search.unit)))
    if run.spec:
        height, width = run.spec.resolution
        figures.append(
            ("LightNL", f"{sum(b.lightnl is not None for b in run.spec.blocks)} of {len(run.spec.blocks)} blocks")
        )
        figures.append(("image size", f"{height} x {width}"))
    if run.history:
        figures.append(("epochs", f"{run.history[-1]['epoch']:g}" + ("" if run.ended else ", not ended")))
    for name, label in (("seed", "seed"), ("hardware", "hardware")):
        if name in run.about:
            figures.append((label, str(run.about[name])))
    return figures


def curves(run: Run) -> list[Chart]:
    """The columns of metrics.csv over the epochs; one that is not known gets a chart of its own."""
    told = {"epoch", "step", "seconds", "val_images", "gates_open"}
    charts = []
    for title, unit, columns in CHARTS:
        told |= columns.keys()
        scale = 1e-6 if unit == "M" else 1.0
        # of five classes or fewer, the true one is always among the first five
        lines = [
            Line(label, column_points(run, column, scale), colour)
            for colour, (column, label) in enumerate(columns.items())
            if column_points(run, column, scale) and not (column == "top5" and 0 < len(run.classes) <= 5)
        ]
        budget = run.search.budget if run.search and title.lower() == run.search.unit else None
        if lines:
            charts.append(Chart(title, unit, lines, (budget * scale, "budget") if budget else None))
    others = dict.fromkeys(name for row in run.history for name in row if name not in told)
    charts += [Chart(name, "", [Line(name, column_points(run, name, 1.0))]) for name in others]
    return charts


def column_points(run: Run, column: str, scale: float) -> list[tuple[float, float]]:
    return [(row["epoch"], row[column] * scale) for row in run.history if column in row]


def gate_charts(run: Run) -> list[Chart]:
    """A chart a kind of gate, a line a gate."""
    if not run.search or not run.search.margins:
        return []
    record, charts = run.search, []
    epochs = [row["epoch"] for row in run.history][: len(record.margins)]
    epochs += [float(n + 1) for n in range(len(epochs), len(record.margins))]
    # a hundred lines of hundreds of epochs would be megabytes; the last epoch is always among those shown
    step = math.ceil(len(epochs) / MOST_EPOCHS)
    shown_epochs = list(zip(epochs, record.margins, strict=True))[::-1][::step][::-1]
    for kind in dict.fromkeys(record.gates):
        columns = [gate for gate, other in enumerate(record.gates) if other == kind]
        lines = [
            Line(
                f"block {block + 1}, {record.gate_name(gate)}",
                [(epoch, margins[block][gate]) for epoch, margins in shown_epochs],
                colour=place,
                thin=True,
            )
            for place, gate in enumerate(columns)
            for block in range(record.searched)
        ]
        legend = {record.gate_name(gate): place for place, gate in enumerate(columns)}
        charts.append(Chart(KINDS.get(kind, kind), "", lines, (0.0, "open above, closed below"), colours=legend))
    return charts


def matrix(judged: Judged) -> list[dict[str, Any]]:
    """The cells of the confusion matrix that are not empty."""
    if len(judged.confusion) > LARGEST_MATRIX:
        return []
    return [
        {"true": true, "predicted": predicted, "count": count, "of": sum(row), "share": count / sum(row)}
        for true, row in enumerate(judged.confusion)
        for predicted, count in enumerate(row)
        if count
    ]


def pairs(judged: Judged) -> list[dict[str, Any]]:
    """The classes that are most often taken for each other."""
    wrong = [
        {"true": true, "predicted": predicted, "count": count, "of": sum(row)}
        for true, row in enumerate(judged.confusion)
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    return sorted(wrong, key=lambda pair: -pair["count"])[:PAIRS]

"""The figures of docs/results.md, from the same rows as its tables: SVG files in docs/images."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.evidence.groups import Group, groups, read
from benchmarks.evidence.jobs import FOUND, SMALL, WITHOUT

matplotlib.rcParams["svg.hashsalt"] = "autonl"  # the same file every time
MARKERS = "osD^vPXh*<>d8p"
COLOURS = (*matplotlib.colormaps["tab10"].colors, *matplotlib.colormaps["Set2"].colors)
IMAGES = Path(__file__).parents[2] / "docs" / "images"

Points = tuple[tuple[str, str], ...]  # suite and job of each
# {file: what the costs are counted at, {what belongs together: its points}}
FIGURES: dict[str, tuple[str, dict[str, Points]]] = {
    "results_macs": (
        "at 96 px",
        {
            "found, LightNL as published": (("search", FOUND),),
            "found, by energy": (("search", f"{FOUND}, LightNL by energy"), ("budget", "found")),
            "found by the gates alone": (("search", "found"),),
            "found without LightNL": (("search", WITHOUT),),
            "random, LightNL as published": (("search", "random"),),
            "random, by energy": (("budget", "random"),),
            "MobileNetV2-LightNL": (("gain", "+ LightNL"), ("budget", "MobileNetV2-LightNL")),
            "MobileNetV2": (("gain", "MobileNetV2"),),
            "AutoNL-S, AutoNL-L": (("search", "AutoNL-S"), ("search", "AutoNL-L")),
            "the same by energy": (("search", "AutoNL-S by energy"), ("search", "AutoNL-L by energy")),
            "MobileNetV3": (("search", "mobilenetv3_large_100"),),
            "EfficientNet-B0": (("search", "efficientnet_b0"),),
            "MixNet-S": (("search", "mixnet_s"),),
        },
    ),
    "results_widths": (
        "at 96 px",
        {
            "MobileNetV2-LightNL": (
                *(("widths", "96 px x 035 + LightNL"), ("widths", "050 + LightNL")),
                *(("gain", "+ LightNL"), ("widths", "140 + LightNL")),
            ),
            "MobileNetV2": (
                *(("widths", "96 px x 035"), ("widths", "050")),
                *(("gain", "MobileNetV2"), ("widths", "140")),
            ),
        },
    ),
    "results_small": (
        "at the setting's own resolution",
        {
            name: tuple(("widths", f"{setting}{more}") for setting in SMALL)
            for name, more in {"found": " found", "MobileNetV2-LightNL": " + LightNL", "MobileNetV2": ""}.items()
        },
    ),
}


def path_of(name: str) -> Path:
    return IMAGES / f"{name}.svg"


def draw(name: str) -> bytes | None:
    """Top-1 against MACs: every kind a colour, several costs of a kind a line, means with bars of one standard error.

    The SVG file; None where a figure has no more than the points of suite gain.
    """
    where, kinds = FIGURES[name]
    rows = {suite: groups(read(suite), "top1") for suite in ("gain", "search", "budget", "widths")}
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel=f"MACs (millions) {where}", ylabel="top-1 (%)", xscale="log")
    drawn: set[str] = set()
    for number, (kind, places) in enumerate(kinds.items()):
        known = [(suite, job) for suite, job in places if job in rows[suite]]
        if not known:
            continue
        drawn |= {suite for suite, _ in known}
        points = sorted((rows[suite][job] for suite, job in known), key=macs)
        x, y = [macs(group) for group in points], [group.mean for group in points]
        bars = [group.error or 0 for group in points]
        axes.errorbar(x, y, bars, marker=MARKERS[number], capsize=3, label=kind, color=COLOURS[number], linewidth=1)
    if drawn <= {"gain"}:
        return None
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    drawing = BytesIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    return drawing.getvalue()


def macs(group: Group) -> float:
    return sum(float(row["macs"]) for row in group.rows) / len(group.rows) / 1e6

"""The figures of docs/results.md, from the same rows as its tables: SVG files in docs/images."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.evidence.document import Group, groups, read

matplotlib.rcParams["svg.hashsalt"] = "autonl"  # the same file every time
IMAGES = Path(__file__).parents[2] / "docs" / "images"

# what belongs together in the drawing: {how it is named: (suite, job) of its points}
KINDS = {
    "found": (("search", "found with trials at 64 px"), ("budget", "found")),
    "found by the gates alone": (("search", "found"),),
    "found without LightNL": (("search", "found with trials at 64 px, without LightNL"),),
    "random": (("search", "random"), ("budget", "random")),
    "MobileNetV2-LightNL": (
        *(("gain", "+ LightNL"), ("budget", "MobileNetV2-LightNL")),
        *(("widths", f"{width} + LightNL") for width in ("050", "140")),
    ),
    "MobileNetV2": (("gain", "MobileNetV2"), ("widths", "050"), ("widths", "140")),
    "AutoNL-S, AutoNL-L": (("search", "AutoNL-S"), ("search", "AutoNL-L")),
    "MobileNetV3": (("search", "mobilenetv3_large_100"),),
    "EfficientNet-B0": (("search", "efficientnet_b0"),),
    "MixNet-S": (("search", "mixnet_s"),),
}


def accuracy_against_macs() -> Path | None:
    """Every kind a colour; means over runs, bars of one standard error; several costs of a kind are a line."""
    rows = {suite: groups(read(suite), "top1") for suite in ("gain", "search", "budget", "widths")}
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="MACs (millions) at 96 px", ylabel="top-1 (%)", xscale="log")
    drawn = 0
    for number, (name, places) in enumerate(KINDS.items()):
        points = sorted((rows[suite][job] for suite, job in places if job in rows[suite]), key=macs)
        if not points:
            continue
        drawn += 1
        x, y = [macs(group) for group in points], [group.mean for group in points]
        bars = [group.error or 0 for group in points]
        marker = "osD^vPX*<>"[number]
        axes.errorbar(x, y, bars, marker=marker, capsize=3, label=name, color=f"C{number}", linewidth=1)
    if not drawn:
        return None
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return save(figure, "results_macs")


def macs(group: Group) -> float:
    return sum(float(row["macs"]) for row in group.rows) / len(group.rows) / 1e6


def save(figure: Figure, name: str) -> Path:
    path = IMAGES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path

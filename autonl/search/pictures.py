"""Pictures of a search: the network it found, and how the gates came to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from torch import Tensor

from autonl.arch.spec import ArchSpec
from autonl.search.gates import Columns

KERNEL_COLOURS = {3: "#8ecae6", 5: "#ffb703", 7: "#90be6d", 9: "#c77dff", 11: "#f28482"}
LIGHTNL_COLOUR = "#d62828"
GATE_COLOURS = {"expand": "#1f77b4", "kernel": "#ff7f0e", "se": "#2ca02c", "ratio": "#d62728", "stride": "#9467bd"}
GATE_LABELS = {
    "expand": "block and expansion",
    "kernel": "kernel",
    "se": "SE",
    "ratio": "LightNL and its channels",
    "stride": "LightNL's positions",
}


def draw_architecture(spec: ArchSpec, path: Path) -> None:
    """Blocks as in the paper's figure of AutoNL-L: kernel by colour, expansion by height, SE by round corners,
    LightNL as a bar with its channel ratio C and spatial stride S."""
    tallest = max(block.expand for block in spec.blocks)
    figure = Figure(figsize=(max(7.0, 0.62 * len(spec.blocks) + 1), 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, block in enumerate(spec.blocks):
        height = 0.6 + 2.4 * block.expand / tallest
        colour = KERNEL_COLOURS[block.kernel]
        corner, width = (index - 0.33, -height / 2), 0.66
        shape: Any
        if block.se:
            style = "round,pad=0,rounding_size=0.22"
            shape = FancyBboxPatch(corner, width, height, style, facecolor=colour, edgecolor="#333333")
        else:
            shape = Rectangle(corner, width, height, facecolor=colour, edgecolor="#333333")
        axes.add_patch(shape)
        axes.text(index, 0.12, f"E{block.expand}", ha="center", va="bottom", fontsize=8)
        axes.text(index, -0.12, f"K{block.kernel}", ha="center", va="top", fontsize=8)
        axes.text(index, -1.75, str(block.out_chs), ha="center", va="top", fontsize=8, color="#333333")
        if block.stride == 2:
            axes.plot([index - 0.5] * 2, [-2.0, 1.5], color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        if block.lightnl:
            axes.add_patch(Rectangle((index + 0.36, -1.5), 0.14, 3.0, facecolor=LIGHTNL_COLOUR, edgecolor="none"))
            text = f"C{block.lightnl.ratio:g}\nS{block.lightnl.stride}".replace("0.", ".")
            axes.text(index + 0.43, 1.6, text, ha="center", va="bottom", fontsize=6, color=LIGHTNL_COLOUR)
    axes.set_xlim(-1.3, len(spec.blocks) - 0.2)
    axes.set_ylim(-2.2, 2.4)
    axes.axis("off")
    axes.text(-1.3, -1.75, "channels", ha="left", va="top", fontsize=8, color="#333333")
    handles: list[Any] = [
        Patch(facecolor=KERNEL_COLOURS[kernel], edgecolor="#333333", label=f"kernel {kernel}")
        for kernel in sorted({block.kernel for block in spec.blocks})
    ]
    handles.append(Patch(facecolor=LIGHTNL_COLOUR, label="LightNL (C: channel ratio, S: stride)"))
    handles.append(
        Patch(
            facecolor="white", edgecolor="#333333", label="height: expansion (E); round corners: SE; dotted: stride 2"
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    axes.set_title(spec.name, fontsize=10)
    save(figure, path)


def draw_search(
    history: list[dict[str, Any]],
    margins: list[Tensor],
    columns: Columns,
    budget: float | None,
    path: Path,
    unit: str = "macs",
) -> None:
    """Accuracy, the cost against the budget, and every gate's margin over the epochs."""
    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(8, 8), layout="constrained")
    accuracy, cost, gates = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 2))
    seen = [row for row in history if "top1" in row]
    accuracy.plot([row["epoch"] for row in seen], [row["top1"] for row in seen], marker="o", markersize=3)
    accuracy.set_ylabel("top-1 (%),\nselection images")
    scale = 1e6 if unit == "macs" else 1.0
    cost.plot(epochs, [row[f"train_{unit}"] / scale for row in history], label="expected")
    cost.plot(epochs, [row[f"decided_{unit}"] / scale for row in history], label="decided", linestyle="--")
    if budget:
        cost.axhline(budget / scale, color="black", linewidth=0.8, label="budget")
    cost.set_ylabel("MACs (M)" if unit == "macs" else unit)
    cost.legend(fontsize=8, frameon=False)
    for name, span in columns.items():
        for gate in zip(*(m[:, span].flatten().tolist() for m in margins), strict=True):
            gates.plot(epochs, gate, color=GATE_COLOURS[name], alpha=0.35, linewidth=0.8)
        if span.stop > span.start:
            gates.plot([], [], color=GATE_COLOURS[name], label=GATE_LABELS[name])
    gates.axhline(0, color="black", linewidth=0.8)
    gates.set_ylabel("margin of every gate\n(above 0: open)")
    gates.set_xlabel("epoch")
    gates.xaxis.get_major_locator().set_params(integer=True)
    gates.legend(fontsize=8, frameon=False, ncols=2)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    # no creation date in the file: the same search gives the same picture
    figure.savefig(path, dpi=130, metadata={"Software": f"matplotlib {matplotlib.__version__}"})

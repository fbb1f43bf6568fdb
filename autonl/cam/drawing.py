"""The figures: maps over images, with one colour scale wherever two pictures are to be compared."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from autonl.cam.affinity import Affinities
from autonl.data.memory import luminance
from autonl.version import __version__

SOFTWARE = f"autonl {__version__}"  # written into every picture: only such files are ever replaced
EVIDENCE, BOTH_SIGNS = "inferno", "RdBu_r"  # from 0 up; from blue below 0 over white to red above
SMALLEST = 216  # pixels, the longer side of an image in the figure: small images are enlarged by a whole factor

# inches
PANEL = 2.7  # the longer side of an image
GAP = 0.15  # between panels, and around the figure
LINE_HEIGHT = 0.165  # of a title
BAR = 0.55  # a colour bar with its numbers and label
CHARACTERS = 13  # that fit into an inch of a title; a title that is still too wide gets smaller letters


@dataclass(frozen=True)
class Panel:
    """A map of one class over what one network saw."""

    title: tuple[str, ...]  # lines; long ones are wrapped
    pixels: Tensor  # (3, H, W) from 0 to 1
    values: Tensor  # (h, w)


def draw_maps(title: Sequence[str], pixels: Tensor, rows: Sequence[Sequence[Panel]]) -> Figure:
    """The image, and beside it a column a network, a row a question (prediction, ground truth); one colour scale."""
    largest = max(float(panel.values.max()) for row in rows for panel in row)
    limit = largest if largest > 0 else 1.0
    titles = [[title if row is rows[0] else (), *(panel.title for panel in row)] for row in rows]
    figure, axes = grid(titles, pixels.shape[1:], bottom=BAR)
    axes[0][0].imshow(enlarged(pixels))
    for line, row in zip(axes, rows, strict=True):
        for place, panel in zip(line[1:], row, strict=True):
            place.imshow(heat_over(panel.pixels, panel.values, limit))
    for place in (place for line in axes for place in line):
        place.axis("off")
    width = figure.get_figwidth()
    label = "class score of the position, below 0 as 0 (mean + bias = logit)"
    colour_bar(figure, Normalize(0, limit), EVIDENCE, width / 2 - PANEL * 0.8, PANEL * 1.6, label)
    return figure


def draw_affinities(
    title: Sequence[str], pixels: Tensor, positions: Sequence[tuple[int, int]], blocks: Sequence[Affinities]
) -> Figure:
    """A row a position, marked by a cross; a column a block, with its own colour scale around 0."""
    heads = [affinity_title(block) for block in blocks]
    titles = [
        [(*(title if row == 0 else ()), f"from {x},{y}"), *(heads if row == 0 else [()] * len(blocks))]
        for row, (x, y) in enumerate(positions)
    ]
    left = 0.3  # numbers of the pixels
    height, width = pixels.shape[1:]
    figure, axes = grid(titles, (height, width), bottom=BAR, left=left)
    frame = {"extent": (0, width, height, 0), "zorder": 0}
    limits = [float(block.rows.abs().max()) or 1.0 for block in blocks]
    for row, (line, (x, y)) in enumerate(zip(axes, positions, strict=True)):
        line[0].imshow(enlarged(pixels), **frame)
        line[0].tick_params(labelsize=7)
        for place, block, limit in zip(line[1:], blocks, limits, strict=True):
            values = on_map(block.rows[row], block.stride, block.map_size)
            place.imshow(signs_over(pixels, values, limit), **frame)
            place.set_xticks([])
            place.set_yticks([])
        for place in line:
            for colour, size, width_of_line in (("black", 14, 4), ("#00ff66", 12, 2)):  # seen on any image
                cross = {"markersize": size, "markeredgewidth": width_of_line, "clip_on": False}
                place.plot(x + 0.5, y + 0.5, "+", color=colour, **cross)
    panel = panel_size((height, width))[1]
    for column, limit in enumerate(limits, start=1):
        start = GAP + left + column * (panel + GAP)
        colour_bar(figure, Normalize(-limit, limit), BOTH_SIGNS, start + 0.1 * panel, 0.8 * panel, "affinity")
    return figure


def affinity_title(block: Affinities) -> tuple[str, ...]:
    height, width = block.map_size
    sampled = f"{block.rows.shape[1]}x{block.rows.shape[2]} of {height}x{width}"
    return f"block {block.block}", f"positions: {sampled}", f"adds {100 * block.share:.2g} % to its input"


def grid(
    titles: Sequence[Sequence[Sequence[str]]], image_size: Sequence[int], bottom: float, left: float = 0
) -> tuple[Figure, list[list[Any]]]:
    """A figure of rows and columns of axes for images of (height, width), each with its title above it.

    Everything has its place in inches, so that nothing overlaps and panels stand in line whatever the titles are.
    """
    high, wide = panel_size(image_size)
    characters = int(CHARACTERS * wide)
    texts = [["\n".join(wrapped(line, characters) for line in title) for title in row] for row in titles]
    above = [max(1 + text.count("\n") if text else 0 for text in row) * LINE_HEIGHT + GAP for row in texts]
    # numbers of the pixels stand under every row that has some on its left
    below = 0.2 if left else 0.0
    width = left + GAP + len(titles[0]) * (wide + GAP)
    height = sum(above) + len(titles) * (high + below) + bottom + GAP
    figure = Figure(figsize=(width, height))
    canvas: Any = FigureCanvasAgg(figure)
    axes: list[list[Any]] = []
    top = height
    for row, space in zip(texts, above, strict=True):
        top -= space + high
        axes.append([])
        for column, text in enumerate(row):
            start = left + GAP + column * (wide + GAP)
            place = figure.add_axes((start / width, top / height, wide / width, high / height))
            # a $ in the name of a class is no formula
            written = figure.text(
                (start + wide / 2) / width, (top + high + 0.05) / height, text, ha="center", size=9, parse_math=False
            )
            shrink(written, canvas, wide * figure.dpi)
            axes[-1].append(place)
        top -= below
    return figure, axes


def shrink(written: Any, canvas: Any, room: float) -> None:
    """Smaller letters for a title that is wider than the room (pixels) above its panel."""
    with quiet():
        taken = written.get_window_extent(canvas.get_renderer()).width
    if taken > room:
        written.set_fontsize(written.get_fontsize() * room / taken)


def colour_bar(figure: Figure, norm: Normalize, colours: str, start: float, length: float, label: str) -> None:
    """At the bottom, from `start`, so long: inches."""
    width, height = figure.get_size_inches()
    place = figure.add_axes((start / width, (BAR - 0.1) / height, length / width, 0.1 / height))
    ticks = np.linspace(norm.vmin or 0, norm.vmax or 0, 3)
    bar = figure.colorbar(
        ScalarMappable(norm, colours), cax=place, orientation="horizontal", ticks=ticks, format="%.3g"
    )
    bar.set_label(label, fontsize=8, labelpad=1)
    place.tick_params(labelsize=7)


def panel_size(image_size: Sequence[int]) -> tuple[float, float]:
    """Height and width in inches; never so narrow that no title fits above it."""
    height, width = image_size
    return PANEL * height / max(height, width), PANEL * max(0.6, width / max(height, width))


def heat_over(pixels: Tensor, values: Tensor, limit: float) -> np.ndarray:
    """values (h, w) from 0 to the limit, smoothly enlarged, over the image (3, H, W) in grey: (H, W, 3) uint8."""
    grey = grey_of(pixels)
    values = F.interpolate(values[None, None].float(), grey.shape[:2], mode="bilinear")[0, 0]
    return as_bytes(0.4 * grey + 0.6 * coloured(values, 0, limit, EVIDENCE))


def signs_over(pixels: Tensor, values: Tensor, limit: float) -> np.ndarray:
    """values (h, w) from -limit to limit, as cells, over the image (3, H, W) in light grey: (H, W, 3) uint8."""
    grey = grey_of(pixels)
    values = F.interpolate(values[None, None].float(), grey.shape[:2], mode="nearest-exact")[0, 0]
    return as_bytes((0.5 + 0.5 * grey) * coloured(values, -limit, limit, BOTH_SIGNS))


def coloured(values: Tensor, low: float, high: float, colours: str) -> np.ndarray:
    shown: np.ndarray = matplotlib.colormaps[colours](Normalize(low, high, clip=True)(values.numpy()))
    return shown[..., :3]


def grey_of(pixels: Tensor) -> np.ndarray:
    return enlarged(luminance(pixels[None])[0].expand(3, -1, -1)).astype(np.float32) / 255


def enlarged(pixels: Tensor) -> np.ndarray:
    """(3, H, W) from 0 to 1 -> (kH, kW, 3) uint8, every pixel a square of k x k."""
    factor = max(1, SMALLEST // max(pixels.shape[1:]))
    shown = pixels.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    return as_bytes(shown.permute(1, 2, 0).numpy())


def as_bytes(image: np.ndarray) -> np.ndarray:
    return (255 * image).round().clip(0, 255).astype(np.uint8)


def on_map(row: Tensor, stride: int, map_size: tuple[int, int]) -> Tensor:
    """A sampled position stands for the stride x stride positions it was sampled from: (Hs, Ws) -> (H, W)."""
    height, width = map_size
    return row.repeat_interleave(stride, 0).repeat_interleave(stride, 1)[:height, :width]


def wrapped(text: str, characters: int) -> str:
    return "\n".join(textwrap.wrap(text, characters, max_lines=2, placeholder=" ..."))


def save(figure: Figure, path: Path) -> None:
    with quiet():
        figure.savefig(path, dpi=120, metadata={"Software": SOFTWARE})


def quiet() -> warnings.catch_warnings:
    """Characters that the font does not have become boxes without a warning each."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)

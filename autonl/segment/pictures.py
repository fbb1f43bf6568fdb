"""Validation images with the masks laid over them: as they are, and as the network sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

from autonl.data.masks import DecodedPairs, FitInto, fill_of
from autonl.data.memory import Normaliser, View
from autonl.data.pairs import VOID, MaskedSource

STRENGTH = 0.6  # of the colour, the rest is the image


def palette() -> np.ndarray:
    """(256, 3) uint8, VOC's own: the bits of the class number, lowest first, dealt to red, green and blue from the top.

    The first class is black, void nearly white.
    """
    numbers = np.arange(256)[:, None]  # (256, 1)
    channels = np.arange(3)
    colours = np.zeros((256, 3), dtype=np.uint8)
    for level in range(8):
        colours |= ((numbers >> (3 * level + channels) & 1) << (7 - level)).astype(np.uint8)
    return colours


def overlaid(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8: the image under the colours of its mask (H, W)."""
    return (STRENGTH * palette()[mask] + (1 - STRENGTH) * image).round().astype(np.uint8)


@torch.no_grad()
def predicted(module: nn.Module, image: Tensor, view: View) -> Tensor:
    """The classes (H, W) uint8 of an image (3, H, W) uint8."""
    device = next(module.parameters()).device
    module.eval()
    return module(Normaliser(view, device)(image[None].to(device).float()))[0].argmax(0).byte().cpu()


def draw_overlays(module: nn.Module, source: MaskedSource, view: View, count: int, path: Path) -> None:
    """A row an image, evenly spread over the validation set: the image, its mask, the prediction, the colours."""
    pairs = source.validation
    places = np.unique(np.linspace(0, len(pairs) - 1, count).round().astype(int))
    decoded = DecodedPairs(pairs, FitInto(view.size, fill_of(view)), 0)
    figure = Figure(figsize=(9.6, 2.4 * len(places) + 0.3), layout="constrained")
    rows: Any = figure.subplots(len(places), 3, squeeze=False)
    for axes, place in zip(rows, places, strict=True):
        image, mask, extent, _ = decoded[0, int(place)]
        guess = predicted(module, image, view)
        height, width = extent.tolist()
        pixels = image.permute(1, 2, 0).numpy()[:height, :width]  # without the padding
        truth, guessed = mask.numpy()[:height, :width], guess.numpy()[:height, :width]
        for axis, shown in zip(axes, (pixels, overlaid(pixels, truth), overlaid(pixels, guessed)), strict=True):
            axis.imshow(shown)
            axis.set_axis_off()
        axes[0].set_title(pairs.images[place].name, fontsize=8)
        axes[1].set_title("mask", fontsize=8)
        axes[2].set_title("prediction", fontsize=8)
        numbers = [int(number) for number in np.union1d(truth, guessed)]
        names = {number: "void" if number == VOID else source.classes[number] for number in numbers}
        patches = [Patch(facecolor=palette()[n] / 255, edgecolor="grey", label=name) for n, name in names.items()]
        axes[2].legend(
            handles=patches, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7, frameon=False, borderaxespad=0
        )
    figure.savefig(path, dpi=110)

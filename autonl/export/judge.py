"""An exported file beside the network it was made of: the same answers?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autonl.data.memory import Batch
from autonl.errors import AutoNLError
from autonl.export.formats import Running
from autonl.nn.light_nonlocal import why_not_finite

TOLERANCE = 1e-4  # of the largest logit
INT8_AGREEMENT = 0.9  # share of images on which int8 must name the same class


@dataclass(frozen=True)
class Verdict:
    images: int
    difference: float  # the largest between two logits, as a share of the largest logit
    agreement: float  # share of images with the same first class; two classes within the tolerance are one
    top1: float | None = None  # in percent, of the file, where the images have labels
    eager_top1: float | None = None

    def problem(self, quantized: bool) -> str | None:
        """What is wrong with the file; nothing for one that is as it should be."""
        if quantized:
            if self.agreement >= INT8_AGREEMENT:
                return None
            return f"int8 names another class on {1 - self.agreement:.1%} of {self.images} images"
        if self.difference <= TOLERANCE and self.agreement == 1:
            return None
        return (
            f"its logits differ from the network's by {self.difference:.1e} of the largest, allowed: {TOLERANCE:.0e}; "
            f"it names another class on {1 - self.agreement:.1%} of {self.images} images, allowed: none"
        )


def judge(model: nn.Module, running: Running, batches: Iterable[Batch], most: int, dynamic_batch: bool) -> Verdict:
    """The network and the file on up to `most` images; with a dynamic batch, the file in batches of 1, 2 and 3."""
    ours, theirs, labels = [], [], []
    for images, answers in up_to(batches, most):
        with torch.no_grad():
            ours.append(model(images).numpy())
        labels.append(answers.numpy())
        for part in parts_of(images.numpy(), (1, 2, 3) if dynamic_batch else (1,)):
            theirs.append(running(part))
    eager, file, label = np.concatenate(ours), np.concatenate(theirs), np.concatenate(labels)  # (N, classes) x 2, (N,)
    lost = int((~np.isfinite(eager)).any(1).sum())
    if lost:
        why = why_not_finite(model)
        advice = f": {why}" if why else "; train it anew"
        raise AutoNLError(f"the network's own logits are not finite on {lost} of {len(eager)} images{advice}")
    largest = float(np.abs(eager).max())
    difference = float(np.abs(file - eager).max()) / largest if np.isfinite(file).all() else float("inf")
    rows, first = np.arange(len(eager)), file.argmax(1)
    agreement = float((eager[rows, first] >= eager.max(1) - TOLERANCE * largest).mean())
    return Verdict(len(eager), difference, agreement, top1_of(file, label), top1_of(eager, label))


def top1_of(logits: np.ndarray, labels: np.ndarray) -> float | None:
    known = labels >= 0
    return 100 * float((logits.argmax(1)[known] == labels[known]).mean()) if known.any() else None


def up_to(batches: Iterable[Batch], most: int) -> Iterator[Batch]:
    for images, labels in batches:
        yield images[:most], labels[:most]
        most -= len(images)
        if most <= 0:
            return


def parts_of(images: np.ndarray, sizes: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Parts of these sizes, over and over."""
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(images):
            return
        yield np.ascontiguousarray(images[start : start + size])
        start += size


def made_images(size: tuple[int, int], seed: int = 0) -> Iterator[Batch]:
    """Coloured clouds without end, no two alike, normalised as pictures are; they have no label (-1)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        clouds = torch.zeros(10, 3, *size)
        for cells in (2, 5, 11, 23):  # coarse to fine
            grid = torch.randn(10, 3, cells, cells, generator=generator)
            clouds += F.interpolate(grid, size, mode="bicubic", align_corners=False)
        yield 0.6 * clouds, torch.full((10,), -1)


def file_bytes(path: Path) -> int:
    """Of a file, or of a folder that is one file to its runtime."""
    return (
        sum(part.stat().st_size for part in path.rglob("*") if part.is_file()) if path.is_dir() else path.stat().st_size
    )

"""An exported file beside the network it was made of: the same answers?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

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
    agreement: float  # share of images, or of pixels, with the same first class; two within the tolerance are one
    top1: float | None = None  # in percent, of the file, where the images have labels
    eager_top1: float | None = None
    miou: float | None = None  # of a segmentation, where the images have masks
    eager_miou: float | None = None
    pixels: bool = False  # it is those that have a class: a segmentation

    @property
    def counted(self) -> str:
        return f"{'the pixels of ' if self.pixels else ''}{self.images} images"

    def problem(self, quantized: bool) -> str | None:
        """What is wrong with the file; nothing for one that is as it should be."""
        if quantized:
            if self.agreement >= INT8_AGREEMENT:
                return None
            return f"int8 names another class on {1 - self.agreement:.1%} of {self.counted}"
        if self.difference <= TOLERANCE and self.agreement == 1:
            return None
        return (
            f"its logits differ from the network's by {self.difference:.1e} of the largest, allowed: {TOLERANCE:.0e}; "
            f"it names another class on {1 - self.agreement:.1%} of {self.counted}, allowed: none"
        )


def judge(model: Any, running: Running, batches: Iterable[Batch], most: int, dynamic_batch: bool) -> Verdict:
    """The network and the file on up to `most` images; with a dynamic batch, the file in batches of 1, 2 and 3."""
    images, lost, largest, difference = 0, 0, 0.0, 0.0
    gaps, ours, theirs, labels = [], [], [], []  # arrays (N,), of a segmentation (N, H, W)
    for pictures, answers in up_to(batches, most):
        with torch.no_grad():
            eager = model(pictures).numpy()  # (N, classes) or (N, classes, H, W)
        parts = parts_of(pictures.numpy(), (1, 2, 3) if dynamic_batch else (1,))
        file = np.concatenate([running(part) for part in parts])
        images += len(eager)
        lost += int((~np.isfinite(eager)).reshape(len(eager), -1).any(1).sum())
        with np.errstate(invalid="ignore"):  # infinite logits are told of below
            largest = max(largest, float(np.abs(eager).max()))
            apart = float(np.abs(file - eager).max()) if np.isfinite(file).all() else float("inf")
            difference = max(difference, apart)
            first = file.argmax(1)
            gaps.append(eager.max(1) - np.take_along_axis(eager, first[:, None], 1)[:, 0])
        ours.append(eager.argmax(1).astype(np.int32))
        theirs.append(first.astype(np.int32))
        labels.append(answers.numpy())
    if lost:
        why = why_not_finite(model)
        advice = f": {why}" if why else "; train it anew"
        raise AutoNLError(f"the network's own logits are not finite on {lost} of {images} images{advice}")
    agreement = float((np.concatenate(gaps) <= TOLERANCE * largest).mean())
    verdict = Verdict(images, difference / largest, agreement, pixels=gaps[0].ndim > 1)
    known, file_says, network_says = (np.concatenate(parts) for parts in (labels, theirs, ours))
    if known.shape != file_says.shape:  # images without masks
        return verdict
    if not verdict.pixels:
        return replace(verdict, top1=top1_of(file_says, known), eager_top1=top1_of(network_says, known))
    file_miou, network_miou = (miou_of(says, known, model.num_classes) for says in (file_says, network_says))
    return replace(verdict, miou=file_miou, eager_miou=network_miou)


def top1_of(first: np.ndarray, labels: np.ndarray) -> float | None:
    known = labels >= 0
    return 100 * float((first[known] == labels[known]).mean()) if known.any() else None


def miou_of(first: np.ndarray, masks: np.ndarray, classes: int) -> float:
    from autonl.segment.task import MeanIoU

    metric = MeanIoU(classes)
    metric.update(torch.from_numpy(first), torch.from_numpy(masks).long())
    return float(metric.compute()["miou"])


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

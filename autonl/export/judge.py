"""An exported file beside the network it was made of: the same answers?"""

from __future__ import annotations

import itertools
import math
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
from autonl.segment.task import MeanIoU

TOLERANCE = 1e-4  # of the largest logit, see `scales`
INT8_AGREEMENT = 0.9  # share of images, or of pixels, on which int8 must name the same class


@dataclass(frozen=True)
class Verdict:
    images: int
    difference: float  # the largest between two logits, as a share of the largest logit, see `scales`
    agreement: float  # share of images, or of pixels, with the same first class; two within the tolerance are one
    score: str = "top-1"  # or mIoU, of a segmentation; in percent, where it is known what is right
    file: float | None = None
    network: float | None = None

    @property
    def counted(self) -> str:
        noun = "image" if self.images == 1 else "images"
        return f"{'' if self.score == 'top-1' else 'the pixels of '}{self.images} {noun}"

    def problem(self, quantized: bool) -> str | None:
        """What is wrong with the file; nothing for one that is as it should be."""
        if not math.isfinite(self.difference):
            return "its logits are not finite"
        if quantized:
            if self.agreement >= INT8_AGREEMENT:
                return None
            return f"int8 names another class on {1 - self.agreement:.1%} of {self.counted}"
        if self.difference <= TOLERANCE and self.agreement == 1:
            return None
        return (
            f"its logits differ from the network's by {self.difference:.1e} of the largest, allowed: {TOLERANCE:.0e}; "
            f"it names another class on {100 * (1 - self.agreement):.2g}% of {self.counted}, allowed: none"
        )


def judge(model: nn.Module, running: Running, batches: Iterable[Batch], most: int, dynamic_batch: bool) -> Verdict:
    """The network and the file on up to `most` images; with a dynamic batch, the file in batches of 1, 2 and 3."""
    images, classes, lost = 0, 0, 0
    largest, apart = [np.zeros(0)], [np.zeros(0)]  # of an image's logits, and of what they differ by
    # where classes differ: the image, and what the network gives its own more than the file's
    gaps: list[tuple[np.ndarray, np.ndarray]] = []
    scores: dict[str, Top1 | MIoU] = {}
    for pictures, answers in up_to(batches, most):
        with torch.no_grad():
            eager = model(pictures).numpy()  # (N, classes), of a segmentation (N, classes, H, W)
        parts = parts_of(pictures.numpy(), (1, 2, 3) if dynamic_batch else (1,))
        file = np.concatenate([running(part) for part in parts])
        lost += int((~np.isfinite(eager)).reshape(len(eager), -1).any(1).sum())
        first = {"file": file.argmax(1), "network": eager.argmax(1)}  # (N,) or (N, H, W)
        with np.errstate(invalid="ignore"):  # infinite logits are told of below
            within = tuple(range(1, eager.ndim))
            largest.append(np.abs(eager).max(within))
            apart.append(np.abs(file - eager).max(within))
            gap = eager.max(1) - np.take_along_axis(eager, first["file"][:, None], 1)[:, 0]
        places = np.nonzero(first["file"] != first["network"])
        gaps.append((images + places[0], gap[places]))
        images += len(eager)
        classes += gap.size
        for name, says in first.items():
            kind = Top1 if says.ndim == 1 else MIoU
            scores.setdefault(name, kind(eager.shape[1])).update(says, answers.numpy())
    if not images:
        raise AutoNLError("no images to judge the file by")
    if lost:
        why = why_not_finite(model)
        advice = f": {why}" if why else "; train it anew"
        raise AutoNLError(f"the network's own logits are not finite on {lost} of {images} images{advice}")
    scale = scales(np.concatenate(largest))
    difference = float((np.concatenate(apart) / scale).max())
    # both logits of a pair may be off by the tolerance
    other = sum(int((gap > 2 * TOLERANCE * scale[image]).sum()) for image, gap in gaps)
    told = {"file": scores["file"].percent(), "network": scores["network"].percent()}
    return Verdict(images, difference, 1 - other / classes, scores["file"].name, **told)


def scales(largest: np.ndarray) -> np.ndarray:
    """What the logits of each image are measured by: its own largest, or what nine of ten images stay below.

    Not by the largest of all: LightNL as published has images with logits of 1e30 in networks with swish, and any file
    would pass beside one. Nor by an image's own alone: a quiet one has the rounding of the others.
    """
    usual = np.sort(largest)[int(0.9 * (len(largest) - 1))]
    scale = np.maximum(largest, usual)
    return np.where(scale > 0, scale, 1)


class Top1:
    """Of images, in percent: (N,) with the labels (N,), -1 where there is none; None where all have none."""

    name = "top-1"

    def __init__(self, classes: int) -> None:
        self.right = self.known = 0

    def update(self, first: np.ndarray, answers: np.ndarray) -> None:
        self.right += int((first == answers).sum())
        self.known += int((answers >= 0).sum())

    def percent(self) -> float | None:
        return 100 * self.right / self.known if self.known else None


class MIoU:
    """Of pixels, in percent: (N, H, W) with masks of that shape, or without any; None where no pixel counts."""

    name = "mIoU"

    def __init__(self, classes: int) -> None:
        self.metric = MeanIoU(classes)

    def update(self, first: np.ndarray, answers: np.ndarray) -> None:
        if answers.shape == first.shape:
            self.metric.update(torch.from_numpy(first), torch.from_numpy(answers).long())

    def percent(self) -> float | None:
        return float(self.metric.compute()["miou"]) if self.metric.confmat.any() else None


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

"""Images that stay on the device, decoded once and augmented there in batches.

Every image has its own crop, flip and colour. They are a function of (seed, epoch, image): an epoch has one
table of uniform numbers with a row an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from autonl.data.config import AugmentConfig
from autonl.data.order import EvaluationOrder, TrainingOrder, derive_seed

Batch = tuple[Tensor, Tensor]  # images (N, 3, H, W) normalised, labels (N,); label -1: not to be counted

DRAWS = 8  # uniform numbers an image: area, ratio, left, top, flip, brightness, contrast, saturation


@dataclass(frozen=True)
class StoredImages:
    images: Tensor  # (N, 3, S, S) uint8
    labels: Tensor  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> StoredImages:
        return StoredImages(self.images.to(device), self.labels.to(device))

    def subset(self, places: np.ndarray) -> StoredImages:
        return StoredImages(self.images[places], self.labels[places])


@dataclass(frozen=True)
class View:
    """What the network wants to see."""

    size: tuple[int, int]  # height, width
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    crop_pct: float = 1.0

    @property
    def whole_side(self) -> int:
        """Side of the image whose centre is seen in an evaluation, as timm rounds it."""
        return int(max(self.size) / self.crop_pct)


class Normaliser:
    """Pixels from 0 to 255 as the network wants them, channels-last."""

    def __init__(self, view: View, device: torch.device) -> None:
        self.scale = 1 / (255 * torch.tensor(view.std, device=device).view(-1, 1, 1))
        self.shift = -255 * torch.tensor(view.mean, device=device).view(-1, 1, 1) * self.scale

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images, self.scale).contiguous(memory_format=torch.channels_last)


class MemoryTraining:
    """The augmented batches of an epoch."""

    resumes_inside = True

    def __init__(
        self, stored: StoredImages, order: TrainingOrder, view: View, augment: AugmentConfig, device: torch.device
    ) -> None:
        self.stored, self.order, self.view, self.augment = stored.to(device), order, view, augment
        self.normalised = Normaliser(view, device)

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        device = self.stored.labels.device
        draws = uniform_draws(len(self.stored), self.order.seed, epoch).to(device)
        self.order.begin(epoch, first_batch)
        for positions in self.order.positions(device):
            images = self.stored.images[positions].float()  # (B, 3, S, S)
            images = augmented(images, draws[positions], self.augment, self.view)
            yield self.normalised(images), self.stored.labels[positions]


class MemoryEvaluation:
    """Every image once, its centre."""

    def __init__(self, stored: StoredImages, order: EvaluationOrder, view: View, device: torch.device) -> None:
        self.stored, self.order, self.view = stored.to(device), order, view
        self.normalised = Normaliser(view, device)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for keys in self.order:
            positions = torch.tensor([position for _, position in keys], device=self.stored.labels.device)
            images = self.stored.images[positions].float()
            whole = images.new_full((len(images),), self.view.whole_side)
            height, width = (side / whole for side in self.view.size)
            # at whole pixels, as torchvision's centre crop: half a pixel beside them, every pixel is a blend
            top, left = (round((self.view.whole_side - side) / 2) / whole for side in self.view.size)
            images = cropped(images, height, width, top, left, torch.ones_like(whole), self.view)
            yield self.normalised(images), self.stored.labels[positions]


def uniform_draws(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("augment", seed, epoch))
    return torch.rand(count, DRAWS, generator=generator)


def augmented(images: Tensor, draws: Tensor, augment: AugmentConfig, view: View) -> Tensor:
    """(B, 3, S, S) -> (B, 3, *view.size), pixels from 0 to 255, by the draws (B, DRAWS) of each image."""
    area = between(*augment.scale, draws[:, 0])
    ratio = between(math.log(augment.ratio[0]), math.log(augment.ratio[1]), draws[:, 1]).exp()
    # a crop that does not fit is cut to the image; torchvision draws another one
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    left, top = draws[:, 2] * (1 - width), draws[:, 3] * (1 - height)
    direction = torch.where(draws[:, 4] < augment.flip, -1.0, 1.0)
    images = cropped(images, height, width, top, left, direction, view)
    return recoloured(images, draws[:, 5:], augment.colour) if any(augment.colour) else images


def cropped(
    images: Tensor, height: Tensor, width: Tensor, top: Tensor, left: Tensor, direction: Tensor, view: View
) -> Tensor:
    """A box out of every image, in shares of its side, resized to the view; direction -1 mirrors it.

    There is no low-pass filter: boxes are expected to be enlarged, or hardly reduced.
    """
    zero = torch.zeros_like(width)
    theta = torch.stack(  # output coordinates from -1 to 1 -> input coordinates from -1 to 1
        [width * direction, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1], dim=1
    ).view(-1, 2, 3)
    grid = F.affine_grid(theta, [len(images), 3, *view.size], align_corners=False)  # (B, H, W, 2)
    images = F.grid_sample(images, grid, view.interpolation, padding_mode="border", align_corners=False)
    return images.clamp(0, 255) if view.interpolation == "bicubic" else images


def recoloured(images: Tensor, draws: Tensor, strength: tuple[float, float, float]) -> Tensor:
    """Brightness, contrast and saturation, each image by its own factors 1 +- strength; draws (B, 3)."""
    brightness, contrast, saturation = (
        between(1 - width, 1 + width, draws[:, column]).view(-1, 1, 1, 1) for column, width in enumerate(strength)
    )
    images = (images * brightness).clamp(0, 255)
    mean = luminance(images).mean((2, 3), keepdim=True)  # (B, 1, 1, 1)
    images = torch.lerp(mean, images, contrast).clamp(0, 255)
    return torch.lerp(luminance(images), images, saturation).clamp(0, 255)


def luminance(images: Tensor) -> Tensor:
    red, green, blue = images.split(1, dim=1)  # (B, 1, H, W) each
    return 0.299 * red + 0.587 * green + 0.114 * blue


def between(low: float, high: float, draws: Tensor) -> Tensor:
    return low + (high - low) * draws

"""Images with masks -> batches on the device, by workers or from memory. What an image does not fill is void.

Evaluation sees the whole image, reduced where it is larger than the view. Training scales that by a random factor,
crops a view out of it at random (or places it in one) and mirrors it: a function of (seed, epoch, image).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.data.loader import PrefetchLoader
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from autonl.data.config import AugmentConfig
from autonl.data.loaders import EvaluationBatches, Loaders, LoaderTraining, TrainingBatches
from autonl.data.memory import Batch, Normaliser, View, between, recoloured, uniform_draws
from autonl.data.order import EvaluationOrder, Key, Share, TrainingOrder, seed_sample
from autonl.data.pairs import VOID, Pairs
from autonl.errors import AutoNLError

Size = tuple[int, int]  # height, width


def fill_of(view: View) -> list[int]:
    """The colour around an image: the mean, which is nothing to the network."""
    return [round(255 * mean) for mean in view.mean]


def reduction(image: Tensor, size: Size) -> float:
    """The factor that makes an image (.., H, W) fit; small ones stay as they are."""
    height, width = image.shape[-2:]
    return min(1.0, size[0] / height, size[1] / width)


class FitInto:
    """The whole image in the upper left corner."""

    def __init__(self, size: Size, fill: list[int]) -> None:
        self.size, self.fill = size, {tv_tensors.Image: fill, tv_tensors.Mask: VOID}

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Size]:
        image, mask = scaled(image, mask, reduction(image, self.size))
        height, width = image.shape[-2:]
        image, mask = v2.Pad([0, 0, self.size[1] - width, self.size[0] - height], fill=self.fill)(image, mask)
        return image, mask, (height, width)


class RandomView:
    """A scaled, placed and mirrored image, drawn from torch's own generator."""

    def __init__(self, size: Size, fill: list[int], scale: tuple[float, float], augment: AugmentConfig) -> None:
        self.size, self.scale = size, scale
        steps = [
            v2.RandomCrop(size, pad_if_needed=True, fill={tv_tensors.Image: fill, tv_tensors.Mask: VOID}),
            v2.RandomHorizontalFlip(augment.flip),
        ]
        colours = [v2.ColorJitter(*augment.colour)] if any(augment.colour) else []
        self.rest = v2.Compose([*steps, *colours])

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Size]:
        factor = between(*self.scale, torch.rand(())).item()
        image, mask = scaled(image, mask, factor * reduction(image, self.size))
        image, mask = self.rest(image, mask)
        return image, mask, self.size


def scaled(image: Tensor, mask: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    if factor == 1:
        return image, mask
    height, width = (max(1, round(side * factor)) for side in image.shape[-2:])
    image, mask = v2.Resize((height, width), antialias=True)(image, mask)  # masks by the nearest pixel
    return image, mask


class DecodedPairs(Dataset[tuple[Tensor, Tensor, Tensor, str]]):
    """(image uint8 (3, H, W), mask uint8 (H, W), height and width of the image in it, what was wrong) by key."""

    def __init__(self, pairs: Pairs, transform: FitInto | RandomView, seed: int) -> None:
        self.pairs, self.transform, self.seed = pairs, transform, seed

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, Tensor, str]:
        epoch, place = key
        seed_sample(self.seed, epoch, place)
        try:
            opened, classes = self.pairs.open(place)
        except AutoNLError as error:  # told by the main process: one that a worker raises comes with its traceback
            nothing = torch.full((3, *self.transform.size), VOID, dtype=torch.uint8)
            return nothing, nothing[0], torch.tensor(self.transform.size), str(error)
        image, mask, extent = self.transform(tv_tensors.Image(opened), tv_tensors.Mask(classes))
        return image.as_subclass(Tensor), mask.as_subclass(Tensor).squeeze(0), torch.tensor(extent), ""


def checked(loader: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The batches (images, masks, extents) of a DataLoader over DecodedPairs; the first bad file ends them."""
    for images, masks, extents, problems in loader:
        for problem in filter(None, problems):
            raise AutoNLError(problem)
        yield images, masks, extents


class CheckedPairs:
    """The batches (images, masks) of a DataLoader over DecodedPairs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return ((images, masks) for images, masks, _ in checked(self.loader))


@dataclass(frozen=True)
class StoredPairs:
    """Images that were decoded once, each in the upper left corner of its place."""

    images: Tensor  # (N, 3, H, W) uint8
    masks: Tensor  # (N, H, W) uint8
    extents: Tensor  # (N, 2) float: height and width of the image

    def __len__(self) -> int:
        return len(self.masks)


class MemoryMaskTraining:
    """The augmented batches of an epoch, made on the device."""

    resumes_inside = True

    def __init__(
        self, stored: StoredPairs, order: TrainingOrder, view: View, scale: tuple[float, float], augment: AugmentConfig
    ) -> None:
        self.stored, self.order, self.view, self.scale, self.augment = stored, order, view, scale, augment
        self.normalised = Normaliser(view, stored.masks.device)
        self.fill = torch.tensor(fill_of(view), device=stored.masks.device).view(3, 1, 1).float()

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        stored, device = self.stored, self.stored.masks.device
        draws = uniform_draws(len(stored), self.order.seed, epoch).to(device)
        self.order.begin(epoch, first_batch)
        for places in self.order.positions(device):
            grid = random_grid(stored, places, draws[places], self.view.size, self.scale, self.augment.flip)
            images, masks = sampled(stored.images[places], stored.masks[places], grid, self.fill)
            if any(self.augment.colour):
                images = recoloured(images, draws[places, 5:], self.augment.colour)
            yield self.normalised(images), masks


class MemoryMaskEvaluation:
    """Every image once, whole."""

    def __init__(self, stored: StoredPairs, order: EvaluationOrder, view: View) -> None:
        self.stored, self.order = stored, order
        self.normalised = Normaliser(view, stored.masks.device)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for keys in self.order:
            places = torch.tensor([place for _, place in keys], device=self.stored.masks.device)
            yield self.normalised(self.stored.images[places].float()), self.stored.masks[places]


def random_grid(
    stored: StoredPairs, places: Tensor, draws: Tensor, size: Size, scale: tuple[float, float], flip: float
) -> Tensor:
    """(B, H, W, 2): where in its stored place each pixel of a view lies, by the draws (B, >= 4) of each image.

    Numbers become no tensors here: a copy to the device would wait for it.
    """
    height, width = stored.extents[places].unbind(1)  # (B,) each, as all below
    whole = torch.minimum(size[0] / height, size[1] / width).clamp(max=1)  # the factor of an evaluation
    factor = whole * between(*scale, draws[:, 0])

    def axis(draw: Tensor, extent: Tensor, view: int, place: int) -> tuple[Tensor, Tensor]:
        """(view's share of the place, shift of its middle), both from -1 to 1."""
        # where the view begins in the scaled image; negative where the image is smaller and lies in the view
        first = draw * (factor * extent - view)
        return view / (factor * place), (view + 2 * first) / (factor * place) - 1

    down, shift_down = axis(draws[:, 1], height, size[0], stored.masks.shape[1])
    across, shift_across = axis(draws[:, 2], width, size[1], stored.masks.shape[2])
    across = across * torch.where(draws[:, 3] < flip, -1.0, 1.0)
    zero = torch.zeros_like(across)
    theta = torch.stack([across, zero, shift_across, zero, down, shift_down], dim=1).view(-1, 2, 3)
    return F.affine_grid(theta, [len(draws), 1, *size], align_corners=False)


def sampled(images: Tensor, masks: Tensor, grid: Tensor, fill: Tensor) -> Batch:
    """Bytes (B, 3, .., ..) and (B, .., ..) at the grid's places: pixels from 0 to 255 (B, 3, H, W), masks (B, H, W).

    There is no low-pass filter: at half the size a pixel is the mean of two by two, below that some are not seen.
    """
    # grid_sample has zero outside the image: what is sampled is the difference to what shall be there
    pixels = F.grid_sample(images - fill, grid, "bilinear", "zeros", align_corners=False) + fill
    labels = F.grid_sample(masks.unsqueeze(1).float() - VOID, grid, "nearest", "zeros", align_corners=False) + VOID
    return pixels, labels.squeeze(1).to(torch.uint8)


def training_batches(
    pairs: Pairs, loaders: Loaders, scale: tuple[float, float], accumulate: int = 1
) -> TrainingBatches:
    config, view = loaders.config, loaders.view
    order = TrainingOrder(len(pairs), config.batch_size, loaders.seed, loaders.share, accumulate)
    if config.in_memory:
        side = config.stored_size
        stored = store(pairs, loaders, (side, side) if side else view.size)
        return MemoryMaskTraining(stored, order, view, scale, loaders.augment)
    transform = RandomView(view.size, fill_of(view), scale, loaders.augment)
    return LoaderTraining(order, on_device(DecodedPairs(pairs, transform, loaders.seed), loaders, order))


def evaluation_batches(pairs: Pairs, loaders: Loaders) -> EvaluationBatches:
    view = loaders.view
    order = EvaluationOrder(len(pairs), loaders.config.evaluation_batch_size, loaders.share)
    if loaders.config.in_memory:
        return MemoryMaskEvaluation(store(pairs, loaders, view.size), order, view)
    return on_device(DecodedPairs(pairs, FitInto(view.size, fill_of(view)), loaders.seed), loaders, order)


def store(pairs: Pairs, loaders: Loaders, size: Size) -> StoredPairs:
    decoded = DecodedPairs(pairs, FitInto(size, fill_of(loaders.view)), loaders.seed)
    loader = loaders.map_loader(decoded, EvaluationOrder(len(pairs), 64, Share()), persistent=False)
    images, masks, extents = (torch.cat(parts).to(loaders.device) for parts in zip(*checked(loader), strict=True))
    return StoredPairs(images, masks, extents.float())


def on_device(decoded: DecodedPairs, loaders: Loaders, order: Any) -> PrefetchLoader:
    view, batches = loaders.view, CheckedPairs(loaders.map_loader(decoded, order))
    return PrefetchLoader(batches, view.mean, view.std, device=loaders.device, img_dtype=torch.float32)

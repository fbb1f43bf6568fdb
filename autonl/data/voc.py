"""PASCAL VOC for segmentation, read by torchvision: images with masks of 21 classes, 255 where nothing counts."""

from __future__ import annotations

import os
from typing import Any

import torch
from timm.data.loader import PrefetchLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.datasets import VOCSegmentation
from torchvision.transforms import v2

from autonl.data.config import DataConfig
from autonl.data.loaders import EvaluationBatches, LoaderTraining, TrainingBatches, leave_signals_to_the_main_process
from autonl.data.memory import View
from autonl.data.order import EvaluationOrder, Key, Share, TrainingOrder, seed_sample
from autonl.errors import AutoNLError

CLASSES = 21
VOID = 255
FILL = {tv_tensors.Image: 128, tv_tensors.Mask: VOID}


class MaskedImages(Dataset[tuple[Tensor, Tensor]]):
    """(image uint8 (3, H, W), mask (H, W)) by key, random only in (seed, epoch, image)."""

    def __init__(self, root: str, image_set: str, transform: Any, seed: int) -> None:
        try:
            self.pairs = VOCSegmentation(root, image_set=image_set)
        except (RuntimeError, OSError):
            where = os.path.join(root, "VOCdevkit", "VOC2012")
            raise AutoNLError(f"{where}: no VOC 2012 with a segmentation set {image_set!r}") from None
        self.transform, self.seed = transform, seed

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        epoch, place = key
        seed_sample(self.seed, epoch, place)
        image, mask = self.pairs[place]
        image, mask = self.transform(tv_tensors.Image(image), tv_tensors.Mask(mask))
        return image.as_subclass(Tensor), mask.as_subclass(Tensor).squeeze(0).long()


def training_transform(size: tuple[int, int]) -> Any:
    """Scale by 0.5 to 2, crop, flip; what the image does not fill is void."""
    jitter = v2.ScaleJitter(size, (0.5, 2.0), antialias=True)
    return v2.Compose([jitter, v2.RandomCrop(size, pad_if_needed=True, fill=FILL), v2.RandomHorizontalFlip()])


class FitInto:
    """The whole image, its longer side reduced to the size where it is larger, the rest void."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        (height, width), (most_high, most_wide) = image.shape[-2:], self.size
        scale = min(most_high / height, most_wide / width)
        if scale < 1:
            height, width = round(height * scale), round(width * scale)
            image, mask = v2.Resize((height, width), antialias=True)(image, mask)
        image, mask = v2.Pad([0, 0, most_wide - width, most_high - height], fill=FILL)(image, mask)
        return image, mask


def open_voc(
    config: DataConfig, view: View, device: torch.device, share: Share, seed: int = 0, accumulate: int = 1
) -> tuple[TrainingBatches, EvaluationBatches]:
    """Batches of the official sets train and val under `config.path`, the folder that holds VOCdevkit."""
    root = config.path or ""
    train = MaskedImages(root, "train", training_transform(view.size), seed)
    validation = MaskedImages(root, "val", FitInto(view.size), seed)

    def batches(images: MaskedImages, order: Any) -> PrefetchLoader:
        loader = DataLoader(
            images,
            batch_sampler=order,
            num_workers=config.workers,
            persistent_workers=config.workers > 0,
            pin_memory=device.type == "cuda",
            worker_init_fn=leave_signals_to_the_main_process,
        )
        return PrefetchLoader(loader, view.mean, view.std, device=device, img_dtype=torch.float32)

    order = TrainingOrder(len(train), config.batch_size, seed, share, accumulate)
    own = EvaluationOrder(len(validation), config.evaluation_batch_size, share)
    return LoaderTraining(order, batches(train, order)), batches(validation, own)

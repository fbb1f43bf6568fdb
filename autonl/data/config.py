"""Settings of the data: the sections `data` and `augment` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autonl.errors import refuse

INTERPOLATIONS = ("bicubic", "bilinear", "nearest")


@dataclass(frozen=True)
class DataConfig:
    path: str | None = None  # folder, .tar, wds/FOLDER or hfds/NAME; "digits" is the embedded set
    classes: str | None = None  # file with a class a line, which fixes the labels; default: the folders found
    train_split: str = "train"  # of a WebDataset or Hugging Face set
    validation_split: str = "validation"
    held_out: float = 0.1  # share held out for validation where the set has no split of its own
    selection: float = 0.0  # share of the training images kept apart to choose by; a training is then judged by these
    batch_size: int = 256  # images an optimiser step, over all devices and accumulation rounds
    evaluation_batch_size: int = 256  # images at a time on a device
    workers: int = 4  # processes that decode, a device
    in_memory: bool = False  # decode once, keep the images on the device, augment there
    stored_size: int | None = None  # side of the images kept in memory; default: network's size / crop_pct
    max_corrupt: int = 20  # unreadable images that are skipped before the run stops
    # None: the network's own
    image_size: int | None = None
    crop_pct: float | None = None  # evaluation: side of the centre crop as a share of the resized image
    interpolation: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        at_least("data.batch_size", self.batch_size, 1)
        at_least("data.evaluation_batch_size", self.evaluation_batch_size, 1)
        at_least("data.workers", self.workers, 0)
        at_least("data.max_corrupt", self.max_corrupt, 0)
        at_least("data.image_size", self.image_size, 1)
        at_least("data.stored_size", self.stored_size, 1)
        between("data.held_out", self.held_out, 0.001, 0.9)
        between("data.selection", self.selection, 0, 0.9)
        between("data.crop_pct", self.crop_pct, 0.01, 1)
        if self.interpolation not in (None, *INTERPOLATIONS):
            refuse("data.interpolation", self.interpolation, ", ".join(INTERPOLATIONS))
        if not all(0 < deviation < math.inf for deviation in self.std or ()):
            refuse("data.std", list(self.std or ()), "three numbers above 0")


@dataclass(frozen=True)
class AugmentConfig:
    """Random resized crop, horizontal flip, colour: drawn image by image."""

    scale: tuple[float, float] = (0.08, 1.0)  # area of the crop as a share of the image
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of the crop
    flip: float = 0.5
    colour: tuple[float, float, float] = (0.0, 0.0, 0.0)  # brightness, contrast, saturation: factor 1 +- this
    auto_augment: str | None = None  # timm's, such as rand-m9-mstd0.5; not for images in memory

    def __post_init__(self) -> None:
        between("augment.flip", self.flip, 0, 1)
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high < math.inf or (name == "scale" and high > 1):
                refuse(f"augment.{name}", [low, high], "two numbers above 0, the smaller first, scale up to 1")
        for strength in self.colour:
            between("augment.colour", strength, 0, 1)


def at_least(field: str, value: float | None, low: float) -> None:
    if value is not None and not value >= low:
        refuse(field, value, f"a number from {low}")


def between(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        refuse(field, value, f"a number from {low} to {high}")

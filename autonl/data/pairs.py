"""A path -> images with masks and the class list: PASCAL VOC as torchvision lays it out, or a folder of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import VOCSegmentation
from torchvision.datasets.folder import IMG_EXTENSIONS

from autonl.data.config import DataConfig
from autonl.data.order import split_by_class
from autonl.data.sources import SPLIT_NAMES, checked_classes, find_split, read_classes, to_rgb
from autonl.errors import AutoNLError

VOID = 255  # the value of a mask's pixel that is neither learned nor counted
VOC_FOLDER = Path("VOCdevkit", "VOC2012")
VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
CLASS_LIST = "classes.txt"
NUMBERS = ("1", "L", "P", "I", "I;16")  # PIL's names for one number a pixel


@dataclass(frozen=True)
class Pairs:
    """Files of images and of their masks, addressed by place."""

    images: tuple[Path, ...]
    masks: tuple[Path, ...]
    classes: int

    def __len__(self) -> int:
        return len(self.images)

    def open(self, place: int) -> tuple[Image.Image, np.ndarray]:
        """(the image, the class of every pixel (H, W) uint8); whatever is wrong with them is an AutoNLError."""
        path = self.images[place]
        try:
            with Image.open(path) as file:
                image = to_rgb(file)
        except Exception as error:  # broken files raise nearly everything in PIL
            raise AutoNLError(f"{path}: not an image that can be read: {first_line(error)}") from None
        mask = read_mask(self.masks[place], self.classes)
        if mask.shape != (image.height, image.width):
            raise AutoNLError(
                f"{self.masks[place]}: the mask is {mask.shape[1]}x{mask.shape[0]}, "
                f"its image {path.name} is {image.width}x{image.height}; allowed: the same size"
            )
        return image, mask

    def subset(self, places: np.ndarray) -> Pairs:
        return Pairs(tuple(self.images[p] for p in places), tuple(self.masks[p] for p in places), self.classes)


@dataclass(frozen=True)
class MaskedSource:
    classes: tuple[str, ...]
    train: Pairs
    validation: Pairs


def read_mask(path: Path, classes: int) -> np.ndarray:
    """The class of every pixel (H, W), uint8."""
    try:
        with Image.open(path) as file:
            mode, mask = file.mode, np.asarray(file)
    except Exception as error:
        raise AutoNLError(f"{path}: not a mask that can be read: {first_line(error)}") from None
    if mode not in NUMBERS:
        raise AutoNLError(f"{path}: the mask has {mode} colours; allowed: one channel, a pixel's value its class")
    mask = mask.astype(np.int64)
    wrong = ((mask < 0) | (mask >= classes)) & (mask != VOID)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise AutoNLError(
            f"{path}: the mask has the class {mask[row, column]} at x {column}, y {row}; "
            f"allowed: 0 to {classes - 1}, the places in the class list, and {VOID} where nothing counts"
        )
    return mask.astype(np.uint8)


def first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def open_pairs(config: DataConfig) -> MaskedSource:
    """The training and validation images at `config.path` with their masks.

    A folder that holds VOCdevkit/VOC2012; or one with `images` and `masks`, files of the same name but for the
    ending, which is split; or one whose `train` and `val` are such folders. VOC brings its class list, which
    `config.classes` may change; a folder has one in classes.txt.
    """
    if config.path is None:
        raise AutoNLError("no images: give --data DIR, a folder that holds VOCdevkit, or one with images and masks")
    root = Path(config.path)
    if not root.is_dir():
        raise AutoNLError(f"{root}: no such folder")
    if (root / VOC_FOLDER).is_dir():
        classes = mask_classes(read_classes(config) or VOC_CLASSES, config.classes or "VOC")
        return MaskedSource(classes, voc_pairs(root, "train", len(classes)), voc_pairs(root, "val", len(classes)))
    if (root / "JPEGImages").is_dir() or (root / VOC_FOLDER.name).is_dir():
        raise AutoNLError(f"{root}: lies inside VOC; give the folder that holds {VOC_FOLDER}")
    classes = listed_classes(root, config)
    parts = {part: find_split(str(root), names) for part, names in SPLIT_NAMES.items()}
    if parts["train"] and parts["validation"]:
        train, validation = (folder_pairs(Path(part), len(classes)) for part in parts.values() if part)
        return MaskedSource(classes, train, validation)
    pairs = folder_pairs(root, len(classes))
    kept, held_out = split_by_class(np.zeros(len(pairs)), config.held_out)
    if not len(held_out):
        raise AutoNLError(f"{root}: one image, none to hold out; allowed: two and more, or train and val")
    return MaskedSource(classes, pairs.subset(np.sort(kept)), pairs.subset(np.sort(held_out)))


def listed_classes(root: Path, config: DataConfig) -> tuple[str, ...]:
    if config.classes:
        return mask_classes(read_classes(config), config.classes)
    path = root / CLASS_LIST
    if not path.is_file():
        raise AutoNLError(
            f"{root}: holds neither {VOC_FOLDER} nor {CLASS_LIST}, the class list of a folder of images and masks "
            "(a class a line, the first is 0); --set data.classes=FILE names another one"
        )
    return mask_classes(path.read_text(encoding="utf-8", errors="replace").splitlines(), str(path))


def mask_classes(names: Sequence[str], origin: str) -> tuple[str, ...]:
    return checked_classes([name.strip() for name in names], origin, VOID)


def voc_pairs(root: Path, image_set: str, classes: int) -> Pairs:
    try:
        found = VOCSegmentation(root, image_set=image_set)
    except (RuntimeError, OSError):
        raise AutoNLError(f"{root / VOC_FOLDER}: no VOC 2012 with a segmentation set {image_set!r}") from None
    images, masks = tuple(map(Path, found.images)), tuple(map(Path, found.masks))
    if not images:
        raise AutoNLError(f"{root / VOC_FOLDER}: the segmentation set {image_set!r} is empty")
    for image, mask in zip(images, masks, strict=True):
        if not mask.is_file():
            raise AutoNLError(f"{image}: the image has no mask {mask}")
    return Pairs(images, masks, classes)


def folder_pairs(folder: Path, classes: int) -> Pairs:
    """folder/images/NAME.* with folder/masks/NAME.*"""
    images, masks = by_name(folder / "images"), by_name(folder / "masks")
    if not images:
        raise AutoNLError(f"{folder / 'images'}: holds no images")
    for name, image in images.items():
        if name not in masks:
            raise AutoNLError(f"{image}: the image has no mask {folder / 'masks' / name}.png")
    return Pairs(tuple(images.values()), tuple(masks[name] for name in images), classes)


def by_name(folder: Path) -> dict[str, Path]:
    """The files of images by their names without the ending, sorted."""
    if not folder.is_dir():
        raise AutoNLError(f"{folder}: no such folder; a set has images/NAME.jpg and masks/NAME.png, or train and val")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in IMG_EXTENSIONS and not path.name.startswith("."):
            if path.stem in found:
                raise AutoNLError(f"{path}: {found[path.stem].name} has the same name; allowed: one file a name")
            found[path.stem] = path
    return found

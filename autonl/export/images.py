"""The images that an exported file is judged by, and those that int8 takes its ranges from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autonl.data.config import AugmentConfig, DataConfig
from autonl.data.loaders import Loaders
from autonl.data.masks import evaluation_batches
from autonl.data.memory import Batch, View
from autonl.data.pairs import open_pairs
from autonl.data.sources import (
    EMBEDDED,
    SPLIT_NAMES,
    Source,
    Stream,
    find_split,
    holds_loose_pictures,
    open_evaluation,
    open_folder,
    open_pictures,
)
from autonl.errors import AutoNLError
from autonl.segment.network import Segmenter

logger = logging.getLogger("autonl")


def batches(
    path: str, model: Any, view: View, most: int, data: DataConfig = DataConfig(), names: Sequence[str] = (),
    *, training: bool = False,
) -> Iterator[Batch]:  # fmt: skip
    """Up to `most` images at a path, from all over it, as the network wants to see them; of its training part if any.

    int8 takes its ranges from training images, so that the others can judge it. Labels are -1 where the classes at the
    path are not the network's: `names`, where they are known, else as many.
    """
    if isinstance(model, Segmenter):
        yield from masked_batches(replace(data, path=path), model, view, most, training)
        return
    # however many cannot be read: that none can is told below
    config = DataConfig(path=path, held_out=data.held_out, max_corrupt=most, evaluation_batch_size=32, workers=0)
    folder = find_split(path, SPLIT_NAMES["train"]) if training and path != EMBEDDED else None
    if folder:  # whatever its classes are called: ranges need no labels
        classes, found = open_folder(folder)
        source = Source(classes, None, found)
    elif holds_loose_pictures(path):
        source = Source((), None, open_pictures(path))
    else:
        source = open_evaluation(config)
    images = source.train if training and source.train is not None else source.validation
    most_classes = max(model.num_classes, len(source.classes))
    numbers = None if training else class_numbers(path, source.classes, names, model.num_classes)
    loaders = Loaders(config, AugmentConfig(), view, most_classes, torch.device("cpu"))
    count = 0
    for pictures, labels in loaders.evaluation(spread(images, most)):
        read = labels >= 0  # what cannot be read comes in black
        count += int(read.sum())
        if read.any():
            yield pictures[read], torch.full_like(labels[read], -1) if numbers is None else numbers[labels[read]]
    if not count:
        raise AutoNLError(f"{path}: none of its images can be read")


def class_numbers(path: str, classes: Sequence[str], names: Sequence[str], count: int) -> torch.Tensor | None:
    """The network's number of each class at the path; None where they are others, which is told."""
    strangers = [name for name in classes if names and name not in names]
    if strangers:
        logger.warning("no top-1: the class %r of %s is not one of the network's", strangers[0], path)
    elif not names and classes and len(classes) != count:
        logger.warning("no top-1: %s has %d classes, the network %d", path, len(classes), count)
    elif classes:
        return torch.tensor([list(names or classes).index(name) for name in classes])
    return None


def masked_batches(data: DataConfig, model: Segmenter, view: View, most: int, training: bool) -> Iterator[Batch]:
    """The same for a segmentation: images with masks, with the class list and the held-out share of its run."""
    config = replace(data, evaluation_batch_size=8, workers=0, in_memory=False)
    source = open_pairs(config)
    loaders = Loaders(config, AugmentConfig(), view, len(source.classes), torch.device("cpu"))
    for pictures, masks in evaluation_batches(spread(source.train if training else source.validation, most), loaders):
        yield pictures, masks if len(source.classes) == model.num_classes else torch.full((len(masks),), -1)


def spread(images: Any, most: int) -> Any:
    """Every n-th: sets are sorted by class, and the first images would be of the first classes."""
    if isinstance(images, Stream) or len(images) <= most:
        return images
    return images.subset(np.linspace(0, len(images), most, endpoint=False).astype(int))


def singles(batches: Iterator[Batch]) -> Iterator[np.ndarray]:
    """(1, 3, H, W) at a time, as the file takes them."""
    return (image[None].contiguous().numpy() for images, _ in batches for image in images)

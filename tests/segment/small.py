"""Drawn images with masks, and a recipe so small that a segmentation takes a second or two."""

from pathlib import Path

import numpy as np
from PIL import Image

from autonl.data.pairs import VOID
from autonl.segment.config import SegmentConfig
from autonl.segment.run import train_segmenter
from autonl.train.config import from_dict
from tests.train.small import NETWORK, ON_CPU

CLASSES = ("grey", "red", "green")


def draw(number, height=20, width=28):
    """(image, mask): a red and a green box on grey, with a seam of void around the red one."""
    rng = np.random.default_rng(number)
    mask = np.zeros((height, width), dtype=np.uint8)
    for label in (1, 2):
        top, left = rng.integers(0, height - 9), rng.integers(0, width - 9)
        if label == 1:
            mask[max(0, top - 1) : top + 9, max(0, left - 1) : left + 9] = VOID
        mask[top : top + 8, left : left + 8] = label
    colours = np.array([[120, 120, 120], [200, 30, 30], [30, 200, 30]], dtype=np.uint8)
    return colours[np.where(mask == VOID, 0, mask)], mask


def write_pairs(folder, count, first=0, **size):
    for kind in ("images", "masks"):
        (Path(folder) / kind).mkdir(parents=True)
    for number in range(first, first + count):
        image, mask = draw(number, **size)
        Image.fromarray(image).save(Path(folder) / "images" / f"{number:03d}.png")
        Image.fromarray(mask).save(Path(folder) / "masks" / f"{number:03d}.png")
    return Path(folder)


def write_set(root, train=8, validation=5):
    """train/ and val/ with images and masks, and the class list."""
    write_pairs(Path(root) / "train", train)
    write_pairs(Path(root) / "val", validation, first=100)
    (Path(root) / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return Path(root)


def segment_config(path, **sections):
    content = {
        "data": {"path": str(path), "batch_size": 4, "evaluation_batch_size": 2, "workers": 0, "in_memory": True},
        "augment": {"colour": [0.2, 0.2, 0.2]},
        "optim": {"name": "momentum", "lr": 0.02},
        "schedule": {"name": "poly", "epochs": 2, "decay_rate": 0.9},
        "segment": {"pictures": 2},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section if isinstance(section, dict) else section
    return from_dict(SegmentConfig, content)


def segment_small(path, folder, *, ref=NETWORK, resume=False, weights=None, **sections):
    config = segment_config(path, **sections)
    return train_segmenter(ref, config, Path(folder), resume=resume, weights=weights, where=ON_CPU)

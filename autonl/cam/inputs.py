"""Image files as an image set, beside the sets that training reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from autonl.data.sources import Images, ImageSet
from autonl.errors import AutoNLError


class Files:
    """Image files behind the interface of timm's readers; their labels mean nothing."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return open(self.paths[index], "rb"), 0

    def filename(self, index: int, **_: Any) -> str:
        return str(self.paths[index])


def open_files(names: Sequence[str]) -> Images:
    """Image files, and all those that lie directly in a folder."""
    paths: list[Path] = []
    for name in names:
        if os.path.isdir(name):
            paths += images_in(Path(name))
        elif os.path.isfile(name):
            paths.append(Path(name))
        else:
            raise AutoNLError(f"{name}: no such image or folder of images")
    return Images(Files(paths), np.arange(len(paths)), np.zeros(len(paths), dtype=int))


def images_in(folder: Path) -> list[Path]:
    endings = Image.registered_extensions()
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in endings and path.is_file())
    if not found:
        raise AutoNLError(f"{folder}: no image lies in this folder; class folders are a set: --data DIR --index N")
    return found


def refuse_unreadable(images: ImageSet, places: Sequence[int]) -> None:
    """Before the first picture is drawn: all or none."""
    if not isinstance(images, Images):
        return
    for place in places:
        try:
            images.open(place)
        except UnidentifiedImageError:
            raise AutoNLError(f"{images.name(place)}: not an image, or in a format that PIL does not read") from None
        except Exception as error:  # broken files raise nearly everything in PIL
            reason = " ".join(str(error).split())[:200]
            raise AutoNLError(f"{images.name(place)}: the image cannot be read: {reason}") from None

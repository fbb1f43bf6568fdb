"""A path -> training and validation images with their classes. Reading is timm's."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import create_dataset
from timm.data.readers import create_reader
from timm.data.readers.img_extensions import add_img_extensions, get_img_extensions

from autonl.data.config import DataConfig
from autonl.data.digits import digits
from autonl.data.memory import StoredImages
from autonl.data.order import split_by_class
from autonl.errors import AutoNLError, shown

add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff"))  # timm's readers know .png, .jpg and .jpeg

EMBEDDED = "digits"
STREAM_PREFIXES = ("wds/", "hfids/")
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("val", "validation", "valid")}


@dataclass(frozen=True)
class Images:
    """Labelled images behind one of timm's readers, addressed by place."""

    reader: Any
    indices: np.ndarray  # of the reader's samples: those of this set
    labels: np.ndarray  # one an index

    def __len__(self) -> int:
        return len(self.indices)

    def open(self, place: int) -> Image.Image:
        file, _ = self.reader[int(self.indices[place])]
        with file:
            return to_rgb(Image.open(file))

    def name(self, place: int) -> str:
        return str(self.reader.filename(int(self.indices[place]), absolute=True))

    def subset(self, places: np.ndarray) -> Images:
        return replace(self, indices=self.indices[places], labels=self.labels[places])


def to_rgb(image: Image.Image) -> Image.Image:
    """Three channels of 8 bits; PIL would cut 16-bit grey at 255 instead of scaling it."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    return image.convert("RGB")


@dataclass(frozen=True)
class Stream:
    """Images that come one after another (timm's IterableImageDataset): no order of ours, resume at the epoch."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)


ImageSet = Images | StoredImages | Stream


@dataclass(frozen=True)
class Source:
    classes: tuple[str, ...]  # empty: the set does not name them
    train: ImageSet | None
    validation: ImageSet
    selection: ImageSet | None = None  # training images kept apart to choose by


def open_source(config: DataConfig, seed: int = 0, classes: Sequence[str] = ()) -> Source:
    """The images at `config.path`: training, validation and, where asked for, selection.

    A folder of class folders, or a .tar of one, is split; a root that holds train and val (folders or .tar
    files) has its split. `classes` fixes the labels; a class that is not among them is refused. A set that numbers its
    classes by itself may have other words for them, not other numbers.
    """
    path = config.path
    if path is None:
        raise AutoNLError(f"no images: give --data DIR, or --data {EMBEDDED} for the embedded set")
    if path.startswith(STREAM_PREFIXES):  # no names, only numbers
        return open_streams(path, config, seed)
    classes = classes or label_names(config)
    if path == EMBEDDED:
        train, validation = digits()
        names = tuple(map(str, range(10)))
        refuse_other_numbers(path, names, classes)
        return keep_selection(Source(names, train, validation), config)
    if path.startswith("hfds/"):
        source = open_hugging_face(path, config)
        refuse_other_numbers(path, source.classes, classes)
        return keep_selection(source, config)
    parts = {part: find_split(path, names) for part, names in SPLIT_NAMES.items()}
    if parts["train"] and parts["validation"]:
        names, train_images = open_folder(parts["train"], classes)
        refuse_one_class(path, names)
        _, validation_images = open_folder(parts["validation"], names)
        return keep_selection(Source(names, train_images, validation_images), config)
    if parts["validation"]:
        raise AutoNLError(
            f"{path}: holds {Path(parts['validation']).name} and no train; allowed: both, or class folders"
        )
    names, images = open_folder(parts["train"] or path, classes)
    refuse_one_class(path, names)
    kept, held_out = split_by_class(images.labels, config.held_out)
    if not len(held_out):
        raise AutoNLError(
            f"{path}: every class has one image, none to hold out; allowed: two and more, or train and val"
        )
    return keep_selection(Source(names, images.subset(kept), images.subset(held_out)), config)


def refuse_one_class(path: str, names: Sequence[str]) -> None:
    if len(names) < 2:
        raise AutoNLError(f"{path}: holds one class, {', '.join(names)}; allowed: two and more, a folder each")


def refuse_other_numbers(path: str, own: Sequence[str], given: Sequence[str]) -> None:
    if not given:
        return
    if len(own) != len(given):
        raise AutoNLError(f"{path}: numbers its {len(own)} classes by itself, the network or data.classes has "
                          f"{len(given)}; allowed: as many")  # fmt: skip
    known = {name: number for number, name in enumerate(given)}
    for number, name in enumerate(own):
        if known.get(name, number) != number:
            raise AutoNLError(
                f"{path}: numbers its classes by itself: {shown(name)} is {number} there, and {known[name]} for the "
                "network or in data.classes; allowed: the same number"
            )


def has_parts(path: str) -> bool:
    """Not a folder or a .tar file: a set that tells training images from the others by itself."""
    return path == EMBEDDED or path.startswith(("hfds/", *STREAM_PREFIXES))


def open_evaluation(config: DataConfig, classes: Sequence[str] = ()) -> Source:
    """The images to evaluate on: the validation part where the path has one, else all of them."""
    path = config.path
    if path is None or has_parts(path):
        return open_source(config, classes=classes)
    classes = classes or label_names(config)
    validation = find_split(path, SPLIT_NAMES["validation"])
    if not validation and find_split(path, SPLIT_NAMES["train"]):
        raise AutoNLError(f"{path}: holds train and no val; give the folder to evaluate on")
    names, images = open_folder(validation or path, classes)
    return Source(names, None, images)


def read_classes(config: DataConfig) -> Sequence[str]:
    if config.classes is None:
        return ()
    try:
        return Path(config.classes).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise AutoNLError(f"data.classes: {config.classes} cannot be read: {error}") from None


def label_names(config: DataConfig) -> Sequence[str]:
    """Those of data.classes, if any, which number the labels. Names that are only shown may be there twice."""
    return checked_classes(read_classes(config), config.classes) if config.classes else ()


def checked_classes(names: Sequence[str], origin: str, most: int | None = None) -> tuple[str, ...]:
    """The names of a class list, one a line; a line is the number of a class."""
    classes = tuple(names)
    for line, name in enumerate(classes):
        if not name.strip():
            raise AutoNLError(f"{origin}: line {line + 1} of the class list is empty; allowed: a class a line")
        if name in classes[:line]:
            raise AutoNLError(f"{origin}: the class list has {name!r} twice, in lines {classes.index(name) + 1} and "
                              f"{line + 1}; allowed: once")  # fmt: skip
    if len(classes) < 2 or (most and len(classes) > most):
        raise AutoNLError(
            f"{origin}: the class list has {len(classes)} classes; allowed: 2 {f'to {most}' if most else 'and more'}"
        )
    return classes


def find_split(root: str, names: Sequence[str]) -> str | None:
    """root/NAME or root/NAME.tar, whichever is there first."""
    candidates = (Path(root) / (name + suffix) for name in names for suffix in ("", ".tar"))
    return next((str(path) for path in candidates if path.exists()), None)


def open_folder(root: str, classes: Sequence[str] = ()) -> tuple[tuple[str, ...], Images]:
    """A folder of class folders, or a .tar of one: (classes, images)."""
    if not os.path.exists(root):
        raise AutoNLError(f"{root}: no such folder or .tar file of images")
    if os.path.isfile(root) and not root.endswith(".tar"):
        raise AutoNLError(f"{root}: not a folder of class folders, nor a .tar file of one")
    reader = image_reader(root)
    if os.path.isdir(root):
        refuse_empty_classes(root, reader)
        found, labels = reader.class_to_idx, np.array([label for _, label in reader.samples])
    else:
        refuse_other_archives(root, reader)
        found, labels = reader.class_name_to_idx, np.array(reader.targets)
    names = tuple(classes or found)
    strangers = [name for name in found if name not in set(names)]
    if strangers:
        raise AutoNLError(f"{root}: the class {strangers[0]!r} is not one of the {len(names)} known ones")
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.array([numbers[name] for name in found])[labels]
    return names, Images(reader, np.arange(len(labels)), labels)


def image_reader(root: str) -> Any:
    """timm's, for a folder or a .tar file."""
    try:
        return create_reader("", root=root)
    except (tarfile.TarError, OSError, pickle.UnpicklingError) as error:
        raise AutoNLError(f"{root}: cannot be read: {error}") from None
    except (RuntimeError, ValueError) as error:
        if "cache file" in str(error):  # timm's index of a large .tar file
            raise AutoNLError(f"{root}: cannot be read: {error}") from None
        # timm's for no image at all, in a folder and in a .tar file
        raise AutoNLError(
            f"{root}: holds no images; a class is a folder of images, {', '.join(get_img_extensions())}"
        ) from None


def holds_loose_pictures(root: str) -> bool:
    """A folder with pictures of no class: no folders in it, and no .tar files of a split."""
    if has_parts(root) or not os.path.isdir(root) or any(find_split(root, names) for names in SPLIT_NAMES.values()):
        return False
    paths = [path for path in Path(root).iterdir() if path.name[0] != "."]
    return not any(path.is_dir() for path in paths) and any(
        path.suffix.lower() in get_img_extensions() for path in paths
    )


def open_pictures(root: str) -> Images:
    """Pictures side by side in a folder, where no labels are needed."""
    reader = image_reader(root)
    return Images(reader, np.arange(len(reader.samples)), np.zeros(len(reader.samples), dtype=int))


def refuse_empty_classes(root: str, reader: Any) -> None:
    folders = {entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")}
    filled = {os.path.relpath(path, root).split(os.sep)[0] for path, _ in reader.samples}
    refuse_nested(root, {os.path.dirname(os.path.relpath(path, root)) for path, _ in reader.samples})
    empty = sorted(folders - filled)
    closed = [name for name in empty if not os.access(os.path.join(root, name), os.R_OK | os.X_OK)]
    if closed:
        raise AutoNLError(f"{root}: the class folder {closed[0]!r} cannot be read: permission denied")
    if empty:
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise AutoNLError(f"{root}: the class folder {empty[0]!r}{more} holds no images")
    refuse_loose(root, filled - folders)


def refuse_other_archives(root: str, reader: Any) -> None:
    """A .tar file is of class folders, at its top or in one folder: timm's reader takes the last folder of any path."""
    # the first image of a folder stands for all of it
    samples = reader.samples[::-1]
    places = {(outer.name if outer else "", os.path.dirname(inner.path)): inner for inner, _, outer in samples}
    images = {folder_in_archive(*place): os.path.basename(inner.path) for place, inner in places.items()}
    top = os.path.commonpath(images if len(images) > 1 else map(os.path.dirname, images)) or os.curdir
    folders = {os.path.relpath(folder, top): os.path.join(folder, image) for folder, image in images.items()}
    first = {folder.split(os.sep)[0] for folder in folders}
    if all(first.intersection(names) for names in SPLIT_NAMES.values()):
        raise AutoNLError(f"{root}: holds train and val; allowed: class folders; unpack it, or make a folder with "
                          "train.tar and val.tar")  # fmt: skip
    refuse_loose(root, [image for folder, image in folders.items() if folder == os.curdir])
    refuse_nested(root, folders)


def folder_in_archive(outer: str, inner: str) -> str:
    """Of images in `inner` of the .tar file `outer` inside an archive, if any: it stands for a folder of its name."""
    folder = os.path.splitext(outer)[0].strip("/")
    inner = inner.strip("/")
    if folder and os.path.normpath(inner) == os.path.basename(folder):  # made of the folder, not of what is in it
        inner = ""
    return os.path.normpath(os.path.join(folder, inner))


def refuse_nested(root: str, folders: Iterable[str]) -> None:
    nested = sorted(folder for folder in folders if os.sep in folder)
    if nested:
        raise AutoNLError(f"{root}: {nested[0]!r} is a folder inside a class; allowed: class folders of images")


def refuse_loose(root: str, images: Iterable[str]) -> None:
    loose = sorted(images)
    if loose:
        raise AutoNLError(f"{root}: the image {os.path.normpath(loose[0])!r} lies in no class folder")


def open_hugging_face(path: str, config: DataConfig) -> Source:
    def part(split: str) -> tuple[tuple[str, ...], Images]:
        try:
            reader = create_reader(path, split=split)
        except (ImportError, ValueError, OSError) as error:
            raise AutoNLError(f"{path}, split {split}: {' '.join(str(error).split())[:200]}") from None
        labels = np.array(reader.dataset[reader.label_key])
        return tuple(reader.class_to_idx), Images(reader, np.arange(len(labels)), labels)

    classes, train = part(config.train_split)
    _, validation = part(config.validation_split)
    return Source(classes, train, validation)


def open_streams(path: str, config: DataConfig, seed: int) -> Source:
    kind, _, place = path.partition("/")

    def part(split: str, training: bool) -> Stream:
        # WebDataset has its shards in a folder, a Hugging Face stream has a name
        name, root = (path, None) if kind == "hfids" else (f"{kind}/", place)
        try:
            dataset = create_dataset(
                name, root, split, is_training=training, batch_size=config.batch_size, seed=seed, download=False
            )
        except (ImportError, RuntimeError, ValueError, OSError) as error:
            raise AutoNLError(f"{path}, split {split}: {' '.join(str(error).split())[:200]}") from None
        return Stream(dataset)

    if config.selection:
        raise AutoNLError(f"data.selection: {path} is a stream, which cannot be split; allowed: 0")
    return Source((), part(config.train_split, True), part(config.validation_split, False))


def keep_selection(source: Source, config: DataConfig) -> Source:
    """Take the images to choose by out of the training images."""
    if not config.selection:
        return source
    train: Any = source.train
    kept, chosen = split_by_class(np.asarray(train.labels), config.selection)
    if not len(chosen):
        raise AutoNLError(
            f"{config.path or 'the images'}: every class has one training image, none to choose by for data.selection "
            f"{config.selection}; allowed: two and more, beside those held out for validation"
        )
    return replace(source, train=train.subset(kept), selection=train.subset(chosen))

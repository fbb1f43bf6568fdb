"""What `autonl export` does: write, run, judge, and only then give the file its name."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import ImageNetInfo
from torch import nn

from autonl.data.config import AugmentConfig, DataConfig
from autonl.data.loaders import Loaders, view_of
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
from autonl.errors import AutoNLError, refuse
from autonl.export.deploy import deploy
from autonl.export.formats import Format, open_format, subdued
from autonl.export.judge import Verdict, file_bytes, judge, made_images
from autonl.export.quantize import QUANTIZED, quantize
from autonl.export.timing import Run, Timing, interleaved, run_eager
from autonl.models import Ref, create_model, run_folder
from autonl.segment.network import Segmenter, load_segmenter, segment_config
from autonl.train.folder import run_config
from autonl.train.run import known_classes
from autonl.version import __version__
from autonl.weights import is_segmentation, load_weights, run_weights

CALIBRATION_IMAGES = 256
logger = logging.getLogger("autonl")


class ExportError(Exception):
    """The file does not do what the network does; nothing of it was kept."""


@dataclass(frozen=True)
class Request:
    format: str
    out: Path
    resolution: tuple[int, int] | None = None  # height, width; default: the network's own
    dynamic_batch: bool = False
    quantize: bool = False
    calibrate: str | None = None  # images that the ranges of int8 are taken from
    images: str | None = None  # images to be judged by; default: made ones
    count: int = 100  # of images to be judged by
    weights: str | None = None
    threads: int = 1


@dataclass(frozen=True)
class Judged:
    bytes: int
    verdict: Verdict | None = None  # None: it does not run on this machine
    timings: dict[str, Timing] | None = None
    outside: list[str] | None = None  # operators that the accelerated part of the runtime did not take
    checked: str | None = None  # where it does not run: what the file says of itself


@dataclass(frozen=True)
class Exported:
    path: Path
    files: list[Path]  # that go along
    fresh: bool  # the weights are those at birth
    judged: Judged


def export(ref: Ref, request: Request) -> Exported:
    """Write the network of a REF in a format, judge the file in its runtime, put labels and a script beside it."""
    form = open_format(request.format)
    refuse_what_does_not_go(form, request)
    model, view, data, fresh = network_of(ref, request)
    with folder_beside(request.out) as folder:
        path = Path(folder) / request.out.name
        judged = write_and_judge(model, view, data, known_classes(ref), form, request, path)
        about = {"network": str(ref), "format": form.name} | description(model, ref, view, request) | asdict(judged)
        write_companions(path, form, about, isinstance(model, Segmenter))
        parts = sorted(Path(folder).iterdir(), key=lambda part: (part == path, part.name))  # the file itself comes last
        targets = [request.out.parent / part.name for part in parts]
        for target in targets:
            refuse_folder(target)
        for part, target in zip(parts, targets, strict=True):
            put(part, target)
    files = [target for target in targets if target != request.out.parent / path.name]
    return Exported(request.out, files, fresh, judged)


def refuse_folder(target: Path) -> None:
    """A folder is not replaced by a file; a Core ML package of before, which is one, may be."""
    if target.is_dir() and not is_package(target):
        raise AutoNLError(f"{target}: there is a folder of that name, which an export leaves alone; give another --out")


def is_package(folder: Path) -> bool:
    return folder.suffix == ".mlpackage" and (folder / "Manifest.json").is_file()


def refuse_what_does_not_go(form: Format, request: Request) -> None:
    refuse_folder(request.out)
    if request.out.suffix != form.suffix:
        refuse("--out", str(request.out), f"a name that ends in {form.suffix}")
    if request.quantize and form.name not in QUANTIZED:
        refuse("--quantize", form.name, f"int8 with --format {' or '.join(QUANTIZED)}")
    if request.calibrate and not request.quantize:
        raise AutoNLError("--calibrate: finds the ranges of int8, and this is float32; give --quantize int8 too")
    if request.quantize and not request.calibrate:
        raise AutoNLError("--quantize int8: needs images to find the ranges by; give them with --calibrate DIR")


@contextmanager
def folder_beside(out: Path) -> Iterator[str]:
    """Where a file is written before it gets its name; folders that were made for it go where it is not kept."""
    new = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoNLError(f"{out.parent}: cannot be made: {error.strerror}") from None
    try:
        folder = tempfile.TemporaryDirectory(prefix=".exporting-", dir=out.parent)
    except OSError as error:
        raise AutoNLError(f"{out.parent}: cannot be written to: {error.strerror}") from None
    try:
        with folder as name:
            yield name
    except BaseException:
        with suppress(OSError):  # somebody else has put something there
            for made in new:
                made.rmdir()
        raise


def network_of(ref: Ref, request: Request) -> tuple[Any, View, DataConfig, bool]:
    """The network with its weights, what it sees, its settings of images, and whether its weights are fresh."""
    if (folder := run_folder(ref)) and is_segmentation(ref):
        segmenter, data = load_segmenter(folder, request.weights), segment_config(folder).data
        view = view_of(segmenter.backbone, data)
        return segmenter, replace(view, size=request.resolution or view.size), data, False
    config = run_config(ref)
    model: Any = create_model(ref).eval()
    fresh = request.weights is None and run_folder(ref) is None
    if not fresh:
        load_weights(model, request.weights or run_weights(ref))
    view = view_of(model, config.data)
    return model, replace(view, size=request.resolution or view.size), config.data, fresh


def write_and_judge(
    model: nn.Module, view: View, data: DataConfig, names: Sequence[str], form: Format, request: Request, path: Path
) -> Judged:
    image = torch.zeros(1, 3, *view.size)
    with failing(request.out, f"{form.name} cannot hold this network"):
        deployed = deploy(model, view.size, form.layout)
        form.write(deployed, image, path, request.dynamic_batch)
        if request.calibrate and request.quantize:
            shown = batches(request.calibrate, model, view, CALIBRATION_IMAGES, data, training=True)
            quantize(form.name, path, islice(singles(shown), CALIBRATION_IMAGES), path.parent)
    size = file_bytes(path) + sum(file_bytes(path.with_suffix(suffix)) for suffix in form.companions)
    with failing(request.out, f"{form.runtime} does not run it"):
        # what runs on another system is judged as it went into the file
        running = form.start(path, request.threads) if form.start else RunningTorch(deployed)
        given = request.images
        shown = batches(given, model, view, request.count, data, names) if given else made_images(view.size)
        verdict = judge(model, running, shown, request.count, request.dynamic_batch)
    if problem := verdict.problem(request.quantize):
        raise ExportError(f"{request.out}: not kept: {problem}")
    if form.start is None:
        with subdued():
            return Judged(size, checked=form.check(path) if form.check else None)
    torch.set_num_threads(request.threads)
    image = next(made_images(view.size))[0][:1]
    runs: dict[str, Run] = {"eager": partial(run_eager, model, image), form.runtime: partial(running, image.numpy())}
    return Judged(size, verdict, interleaved(runs, request.threads, rounds=10), running.outside)


class RunningTorch:
    """The deploy form in torch."""

    outside: list[str] | None = None

    def __init__(self, deployed: nn.Module) -> None:
        self.deployed = deployed

    def __call__(self, images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(self.deployed(torch.from_numpy(images)))


@contextmanager
def failing(out: Path, message: str) -> Iterator[None]:
    """Exporters and runtimes raise nearly everything; bad input stays what it is, and so does a full disk."""
    try:
        with subdued():
            yield
    except AutoNLError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AutoNLError(f"{out}: cannot be written: {error.strerror}") from None
        told = f"{type(error).__name__} {' '.join(str(error).split())[:300]}"
        raise ExportError(f"{out}: not kept: {message}: {told}") from error


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


def description(model: Any, ref: Ref, view: View, request: Request) -> dict[str, Any]:
    """What the one who runs the file must know."""
    about = {
        "autonl": __version__,
        "size": list(view.size),
        "mean": list(view.mean),
        "std": list(view.std),
        "interpolation": (view.interpolation if isinstance(model, Segmenter) else interpolation_of(view)).upper(),
        "crop_pct": view.crop_pct,
        "batch": "any" if request.dynamic_batch else 1,
        "precision": "int8" if request.quantize else "float32",
        "labels": known_classes(ref) or numbered_classes(model.num_classes),
    }
    if isinstance(model, Segmenter):
        from autonl.segment.pictures import palette

        about["palette"] = palette().flatten().tolist()
    return about


def interpolation_of(view: View) -> str:
    """Of a classifier: timm's ResizeKeepRatio, which it takes for sides that are not equal, is given none."""
    height, width = (math.floor(side / view.crop_pct) for side in view.size)
    return view.interpolation if height == width else "bilinear"


def numbered_classes(count: int) -> list[str]:
    """ImageNet's names where there are as many classes as it has; numbers otherwise."""
    if count == 1000:
        info = ImageNetInfo()
        return [info.index_to_description(index) for index in range(count)]
    return [str(index) for index in range(count)]


def write_companions(path: Path, form: Format, about: dict[str, Any], segmentation: bool) -> None:
    """What to feed it with and what comes out (.json), the labels (.labels.txt), and the script that runs it."""
    # with the format in their names: a folder may hold a network in several
    script, names = f"{path.stem}_{form.name}.py", {"file": path.name, "about": f"{path.name}.json"}
    (path.parent / names["about"]).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    labels = "".join(f"{label}\n" for label in about["labels"])
    (path.parent / f"{path.name}.labels.txt").write_text(labels, encoding="utf-8")
    (path.parent / script).write_text(form.runner.script(segmentation, names), encoding="utf-8")


def put(part: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():  # an .mlpackage of before, which goes with the temporary folder
        os.replace(target, part.with_name(f"before-{part.name}"))
    os.replace(part, target)

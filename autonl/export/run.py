"""What `autonl export` does: write, run, judge, and only then give the file its name."""

from __future__ import annotations

import errno
import importlib
import os
import platform
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
from torch import nn

from autonl.data.config import DataConfig
from autonl.data.loaders import view_of
from autonl.data.memory import View
from autonl.errors import AutoNLError, refuse
from autonl.export.companions import description, write_companions
from autonl.export.custom_op import has_custom_op, library_of
from autonl.export.deploy import deploy
from autonl.export.formats import WITH_CUSTOM_OP, Format, open_format, subdued
from autonl.export.images import batches, singles
from autonl.export.judge import Verdict, file_bytes, judge, made_images
from autonl.export.quantize import QUANTIZED, quantize
from autonl.export.timing import Run, Timing, interleaved, run_eager
from autonl.models import Ref, create_model, run_folder
from autonl.segment.network import Segmenter, load_segmenter, segment_config
from autonl.train.folder import run_config
from autonl.train.run import known_classes
from autonl.weights import is_segmentation, load_weights, run_weights

CALIBRATION_IMAGES = 256


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
    custom_op: bool = False  # LightNL as an operator of its own, whose library lies beside the file


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
    names = known_classes(ref)
    about = description(model, names, view, dynamic_batch=request.dynamic_batch, quantize=request.quantize)
    with folder_beside(request.out) as folder:
        path = Path(folder) / request.out.name
        judged = write_and_judge(model, view, data, names, form, request, path)
        about = {"network": str(ref), "format": form.name, "custom_op": None} | about | asdict(judged)
        if request.custom_op:
            release = importlib.import_module(form.runtime).__version__
            built_for = f"{form.runtime} {release}, {platform.machine()}"
            about |= {"custom_op": library_of(path).name, "custom_op_built_for": built_for}
        write_companions(path, form, about, isinstance(model, Segmenter))
        parts = sorted(Path(folder).iterdir(), key=lambda part: (part == path, part.name))  # the file itself comes last
        targets = [request.out.parent / part.name for part in parts]
        for target in targets:
            refuse_folder(target)
        for part, target in zip(parts, targets, strict=True):
            put(part, target)
        if not request.custom_op:  # of an export before, which had one
            library_of(request.out).unlink(missing_ok=True)
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
    if request.custom_op and not form.custom_op:
        refuse("--custom-op", form.name, f"a custom operator with --format {' or '.join(WITH_CUSTOM_OP)}")
    if request.custom_op and request.quantize:
        raise AutoNLError("--custom-op: is for float32, and --quantize is given; leave one of them out")
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
        deployed = deploy(model, view.size, form.layout, request.custom_op)
        if request.custom_op and not has_custom_op(deployed):
            raise AutoNLError("--custom-op: is for LightNL, which this network does not have; leave it out")
        if request.custom_op and form.custom_op:
            form.custom_op.build(path)
        form.write(deployed, image, path, request.dynamic_batch)
        if request.calibrate and request.quantize:
            shown = batches(request.calibrate, model, view, CALIBRATION_IMAGES, data, training=True)
            quantize(form.name, path, islice(singles(shown), CALIBRATION_IMAGES), path.parent)
    parts = [path, *(path.with_suffix(suffix) for suffix in form.companions)]
    size = sum(file_bytes(part) for part in [*parts, *([library_of(path)] if request.custom_op else [])])
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


def put(part: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():  # an .mlpackage of before, which goes with the temporary folder
        os.replace(target, part.with_name(f"before-{part.name}"))
    os.replace(part, target)

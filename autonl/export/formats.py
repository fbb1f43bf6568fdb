"""The formats that a network is exported to: one small file each, imported when it is asked for."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from autonl.errors import AutoNLError, refuse_name
from autonl.export.deploy import Layout
from autonl.export.script import Runner


class Running(Protocol):
    """A file in its runtime, on one kind of input: images (N, 3, H, W) -> logits (N, classes), of a segmentation
    (N, classes, H, W)."""

    outside: list[str] | None  # operators that the accelerated part of the runtime did not take; None: it does not tell

    def __call__(self, images: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class CustomOp:
    build: Callable[[Path], None]  # the operator's library, beside a file
    load: str  # lines of the script that load FILE and the library, see Runner


@dataclass(frozen=True)
class Format:
    """`write(model, image, path, dynamic_batch)` and `start(path, threads)` of one format.

    `model` is in deploy form, `image` an example (1, 3, H, W). `start` is None where the runtime is on no Linux.
    """

    name: str
    runtime: str
    suffix: str
    layout: Layout  # that the runtime keeps its maps in
    packages: tuple[str, ...]  # that writing and running need
    write: Callable[[nn.Module, torch.Tensor, Path, bool], None]
    start: Callable[[Path, int], Running] | None
    runner: Runner  # the script that runs the file with nothing but its runtime, numpy and pillow
    companions: tuple[str, ...] = ()  # suffixes of files that belong to it
    check: Callable[[Path], str] | None = None  # where it cannot be run: what the file says of itself
    custom_op: CustomOp | None = None  # where LightNL can be one, see autonl.export.custom_op


FORMATS = ("onnx", "openvino", "executorch", "coreml", "litert")
WITH_CUSTOM_OP = ("onnx", "openvino")
RUNTIMES = {"onnxruntime": "onnx", "openvino": "openvino", "executorch": "executorch"}  # runtime -> format


@contextmanager
def subdued() -> Iterator[None]:
    """Exporters and runtimes warn of their own future, when they are imported and when they are used; LiteRT's tells
    its steps on standard output, where --json wants nothing but its object."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


def open_format(name: str) -> Format:
    """The format of that name, if what it needs is installed."""
    if name not in FORMATS:
        refuse_name("format", name, FORMATS)
    module: Any = importlib.import_module(f"autonl.export.to_{name}")
    found: Format = module.FORMAT
    for package in found.packages:
        if not importlib.util.find_spec(package):
            install = getattr(module, "INSTALL", f"pip install {' '.join(found.packages)}")
            raise AutoNLError(f"the format {name} needs {package}, which is not installed; install it by: {install}")
    return found

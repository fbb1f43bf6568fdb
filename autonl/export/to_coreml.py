"""Core ML. Converting works everywhere, running needs macOS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autonl.errors import AutoNLError
from autonl.export.formats import Format
from autonl.export.script import Runner


def write(model: nn.Module, image: torch.Tensor, path: Path, dynamic_batch: bool) -> None:
    import coremltools

    if dynamic_batch:
        raise AutoNLError("--dynamic-batch: not for coreml, which takes one image at a time; leave it out")
    with torch.no_grad():
        program = torch.export.export(model, (image,)).run_decompositions({})
        converted = coremltools.convert(
            program,
            minimum_deployment_target=coremltools.target.iOS17,
            compute_precision=coremltools.precision.FLOAT32,
        )
        converted.save(str(path))


class RunningCoreML:
    outside: list[str] | None = None

    def __init__(self, path: Path, threads: int) -> None:
        import coremltools

        self.model: Any = coremltools.models.MLModel(str(path))
        self.input = self.model.get_spec().description.input[0].name

    def __call__(self, images: np.ndarray) -> np.ndarray:
        (logits,) = self.model.predict({self.input: images}).values()
        return np.asarray(logits)


def check(path: Path) -> str:
    """The operators of the graph: that it is there, and what it is made of."""
    import coremltools

    spec = coremltools.utils.load_spec(str(path))
    (function,) = spec.mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    kinds = [operation.type for operation in block.operations if operation.type != "const"]
    return f"{len(kinds)} operators: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


RUNNER = Runner(
    "coremltools, numpy and pillow",
    "import coremltools",
    "model = coremltools.models.MLModel(FILE)",
    "logits = next(iter(model.predict({model.get_spec().description.input[0].name: image}).values()))[0]",
)

FORMAT = Format(
    name="coreml",
    runtime="coremltools",
    suffix=".mlpackage",
    layout="channels_first",
    packages=("coremltools",),
    write=write,
    start=RunningCoreML if sys.platform == "darwin" else None,
    runner=RUNNER,
    check=check,
)

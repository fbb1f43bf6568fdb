"""LiteRT (TensorFlow Lite). Its converter wants an older torch than this package's constraints: its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autonl.errors import AutoNLError
from autonl.export.formats import Format
from autonl.export.script import Runner

INSTALL = (
    "python3 -m venv .venv-litert && .venv-litert/bin/pip install 'torch<2.15' litert-torch ai-edge-litert ., "
    "in the checkout of autonl, then use .venv-litert/bin/autonl"
)


def write(model: nn.Module, image: torch.Tensor, path: Path, dynamic_batch: bool) -> None:
    import litert_torch

    if dynamic_batch:
        raise AutoNLError("--dynamic-batch: not for litert, whose files have one size; leave it out")
    with torch.no_grad():
        litert_torch.convert(model, (image,)).export(str(path))


class RunningLiteRT:
    outside: list[str] | None = None

    def __init__(self, path: Path, threads: int) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self.interpreter: Any = Interpreter(str(path), num_threads=threads)
        self.interpreter.allocate_tensors()
        (self.input,) = self.interpreter.get_input_details()
        (self.output,) = self.interpreter.get_output_details()

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.interpreter.set_tensor(self.input["index"], images)
        self.interpreter.invoke()
        return np.asarray(self.interpreter.get_tensor(self.output["index"]))


RUNNER = Runner(
    "ai-edge-litert, numpy and pillow",
    "from ai_edge_litert.interpreter import Interpreter",
    "net = Interpreter(FILE)\nnet.allocate_tensors()\nnet.set_tensor(net.get_input_details()[0]['index'], image)",
    "net.invoke()\nlogits = net.get_tensor(net.get_output_details()[0]['index'])[0]",
)

FORMAT = Format(
    name="litert",
    runtime="ai_edge_litert",
    suffix=".tflite",
    layout="channels_last",
    packages=("litert_torch", "ai_edge_litert"),
    write=write,
    start=RunningLiteRT,
    runner=RUNNER,
)

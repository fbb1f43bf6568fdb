"""ONNX, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from autonl.export.formats import Format
from autonl.export.script import Runner

INPUT, OUTPUT = "images", "logits"


def write(model: nn.Module, image: torch.Tensor, path: Path, dynamic_batch: bool) -> None:
    if dynamic_batch:  # an example of one image would make the number one a part of the graph
        image = image.repeat(2, 1, 1, 1)
    with torch.no_grad():
        program = torch.onnx.export(
            model,
            (image,),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) if dynamic_batch else None,
        )
        assert program is not None
        program.save(path, external_data=False)


class RunningONNX:
    outside: list[str] | None = []  # noqa: RUF012 - one provider takes all

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return np.asarray(self.session.run([OUTPUT], {INPUT: images})[0])


RUNNER = Runner(
    "onnxruntime, numpy and pillow",
    "import onnxruntime",
    "session = onnxruntime.InferenceSession(FILE)",
    "logits = session.run(None, {session.get_inputs()[0].name: image})[0][0]",
)

FORMAT = Format(
    name="onnx",
    runtime="onnxruntime",
    suffix=".onnx",
    layout="channels_first",
    packages=("onnx", "onnxscript", "onnxruntime"),
    write=write,
    start=RunningONNX,
    runner=RUNNER,
)

"""OpenVINO: an .xml with the graph and a .bin with the weights beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autonl.export.formats import Format
from autonl.export.script import Runner


def write(model: nn.Module, image: torch.Tensor, path: Path, dynamic_batch: bool) -> None:
    import openvino

    if dynamic_batch:
        image = image.repeat(2, 1, 1, 1)
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic_batch else None
    with torch.no_grad():
        program = torch.export.export(model, (image,), dynamic_shapes=shapes)
        converted = openvino.convert_model(program)
    # the converter forgets that the size is known; with it, inference takes two thirds of the time
    if not dynamic_batch:
        converted.reshape(list(image.shape))
    openvino.save_model(converted, path, compress_to_fp16=False)


class RunningOpenVINO:
    outside: list[str] | None = []  # noqa: RUF012 - the CPU plugin takes all

    def __init__(self, path: Path, threads: int) -> None:
        import openvino

        settings: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",  # bf16 on CPUs that have it would be another network
        }
        compiled = openvino.Core().compile_model(str(path), "CPU", settings)
        self.request, self.output = compiled.create_infer_request(), compiled.output(0)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return np.array(self.request.infer([images])[self.output])


RUNNER = Runner(
    "openvino, numpy and pillow",
    "import openvino",
    'compiled = openvino.Core().compile_model(FILE, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})',
    "logits = compiled([image])[compiled.output(0)][0]",
)

FORMAT = Format(
    name="openvino",
    runtime="openvino",
    suffix=".xml",
    layout="channels_last",
    packages=("openvino",),
    write=write,
    start=RunningOpenVINO,
    runner=RUNNER,
    companions=(".bin",),
)

"""ONNX, run by ONNX Runtime."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autonl.export.custom_op import ATTRIBUTES, NAME, compile_library, has_custom_op, library_of
from autonl.export.formats import CustomOp, Format
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
            custom_translation_table=custom_op_translation() if has_custom_op(model) else None,
        )
        assert program is not None
        program.save(path, external_data=False)


def custom_op_translation() -> dict[Any, Any]:
    """What torch.onnx.export makes of LightNL where it is an operator of its own."""
    import onnx
    from onnxscript.values import Op, Opset

    schema = onnx.defs.OpSchema
    tensor = [schema.FormalParameter(name, "tensor(float)") for name in ("x", "taps", "bias", "shortcut", "z")]
    kinds = {int: schema.AttrType.INT, float: schema.AttrType.FLOAT}
    attributes = [schema.Attribute(name, kinds[kind]) for name, kind in ATTRIBUTES.items()]
    described = schema(NAME, "autonl", 1, inputs=tensor[:4], outputs=tensor[4:], attributes=attributes)
    operator = Op(Opset("autonl", 1), NAME, described)

    def translate(x: Any, taps: Any, bias: Any, *known: Any) -> Any:
        shortcut = known[len(ATTRIBUTES)] if len(known) > len(ATTRIBUTES) else None
        return operator(x, taps, bias, shortcut, **dict(zip(ATTRIBUTES, known, strict=False)))

    return {torch.ops.autonl.deployed_lightnl.default: translate}


class RunningONNX:
    outside: list[str] | None = []  # noqa: RUF012 - one provider takes all

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        if library_of(path).exists():
            options.register_custom_ops_library(str(library_of(path)))
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
    custom_op=CustomOp(
        build=partial(compile_library, source="onnxruntime.cpp"),
        load="options = onnxruntime.SessionOptions()\n"
        'options.register_custom_ops_library(FILE + ".so")\n'
        "session = onnxruntime.InferenceSession(FILE, options)",
    ),
)

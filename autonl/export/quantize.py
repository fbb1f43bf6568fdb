"""int8 after training, with images to find the ranges by, for ONNX Runtime and OpenVINO."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autonl.errors import AutoNLError, refuse

QUANTIZED = ("onnx", "openvino")


def quantize(form: str, path: Path, images: Iterable[np.ndarray], folder: Path) -> None:
    """Replace the float file by one whose convolutions and linear layers are int8.

    LightNL's products are left as they are: their factors span orders of magnitude, and they are a few percent of the
    MACs. So is the energy that it is divided by, which eight bits would take for zero. ONNX Runtime still takes the
    first product to int8 by itself where its factors come out of int8.
    """
    if form not in QUANTIZED:
        refuse("--quantize", form, f"int8 with --format {' or '.join(QUANTIZED)}")
    with contextlib.redirect_stdout(sys.stderr):  # both show progress
        (quantize_onnx if form == "onnx" else quantize_openvino)(path, images, folder)


def quantize_onnx(path: Path, images: Iterable[np.ndarray], folder: Path) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from autonl.export.to_onnx import INPUT

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.images: Iterator[np.ndarray] = iter(images)

        def get_next(self) -> Any:
            image = next(self.images, None)
            return None if image is None else {INPUT: image}

    logging.getLogger().setLevel(logging.ERROR)
    prepared = folder / f"prepared-{path.name}"  # not the file's own name, whatever that is
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    nodes = onnx.load(str(prepared)).graph.node
    divisors = {node.input[1] for node in nodes if node.op_type == "Div"}
    energies = [node.name for node in nodes if node.op_type == "Add" and node.output[0] in divisors]
    quantize_static(
        str(prepared),
        str(path),
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "Gemm", "Add", "GlobalAveragePool", "AveragePool"],
        nodes_to_exclude=energies,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    prepared.unlink()


def quantize_openvino(path: Path, images: Iterable[np.ndarray], folder: Path) -> None:
    if not importlib.util.find_spec("nncf"):
        raise AutoNLError("int8 for OpenVINO needs nncf, which is not installed; install it by: pip install nncf")
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(str(path))
    inputs = list(images)
    # LightNL's sampler (1x1), and its kernel behind a transpose: a range a channel, which the plugin would put into
    # the product before it, where it fits no more
    names = [
        operation.get_friendly_name()
        for operation in model.get_ops()
        if operation.get_type_name() == "GroupConvolution"
        and (
            list(operation.input(1).get_shape())[-2:] == [1, 1]
            or operation.input(0).get_source_output().get_node().get_type_name() == "Transpose"
        )
    ]
    names += [  # x_sc^2 of its energy
        operation.get_friendly_name()
        for operation in model.get_ops()
        if operation.get_type_name() == "Multiply"
        and operation.input(0).get_source_output() == operation.input(1).get_source_output()
    ]
    scope = nncf.IgnoredScope(types=["MatMul", "ReduceSum", "Divide"], names=names, validate=False)
    converted = nncf.quantize(model, nncf.Dataset(inputs), ignored_scope=scope, subset_size=len(inputs))
    temporary = folder / f"int8-{path.name}"  # not its own: constants are still read from there
    openvino.save_model(converted, temporary)
    del model
    for suffix in (".xml", ".bin"):
        temporary.with_suffix(suffix).replace(path.with_suffix(suffix))

"""int8 after training, with images to find the ranges by, for ONNX Runtime and OpenVINO."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
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

    Weights have seven bits: a processor without VNNI adds pairs of products in 16 bits, which eight bits overflow, and
    nobody knows today where a file will run.
    """
    if form not in QUANTIZED:
        refuse("--quantize", form, f"int8 with --format {' or '.join(QUANTIZED)}")
    with quiet_root():  # ONNX Runtime warns through the root logger
        (quantize_onnx if form == "onnx" else quantize_openvino)(path, images, folder)


@contextlib.contextmanager
def quiet_root() -> Iterator[None]:
    """Errors alone from loggers without a level of their own; ours goes on telling of images that cannot be read."""
    root, ours = logging.getLogger(), logging.getLogger("autonl")
    before = root.level, ours.level
    root.setLevel(logging.ERROR)
    ours.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.setLevel(before[0])
        ours.setLevel(before[1])


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

    prepared = folder / f"prepared-{path.name}"  # not the file's own name, whatever that is
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    nodes = onnx.load(str(prepared)).graph.node
    divisors = {node.input[1] for node in nodes if node.op_type == "Div"}
    energies = [node.name for node in nodes if node.op_type == "Add" and node.output[0] in divisors]
    # channels behind the stem differ most, and a depthwise kernel works on one at a time: one range fits them badly
    stem, *others = [node for node in nodes if node.op_type == "Conv"]
    first = [stem.name, *(node.name for node in others[:1] if groups_of(node) > 1)]
    quantize_static(
        str(prepared),
        str(path),
        Reader(),
        quant_format=QuantFormat.QDQ,
        # a ReLU that is not named has the range of what it cuts off
        op_types_to_quantize=["Conv", "Relu", "Clip", "Gemm", "Add", "GlobalAveragePool", "AveragePool"],
        nodes_to_exclude=[*energies, *first],
        per_channel=True,
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    prepared.unlink()


def groups_of(convolution: Any) -> int:
    return next((attribute.i for attribute in convolution.attribute if attribute.name == "group"), 1)


def quantize_openvino(path: Path, images: Iterable[np.ndarray], folder: Path) -> None:
    if not importlib.util.find_spec("nncf"):
        raise AutoNLError("int8 for OpenVINO needs nncf, which is not installed; install it by: pip install nncf")
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino.Core().read_model(str(path))
    inputs = list(images)
    names = [operation.get_friendly_name() for operation in model.get_ops() if of_lightnl(operation)]
    scope = nncf.IgnoredScope(types=["ReduceSum", "Divide"], names=names, validate=False)
    seven_bits = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
    converted = nncf.quantize(
        model, nncf.Dataset(inputs), ignored_scope=scope, subset_size=len(inputs), advanced_parameters=seven_bits
    )
    temporary = folder / f"int8-{path.name}"  # not its own: constants are still read from there
    openvino.save_model(converted, temporary)
    del model
    for suffix in (".xml", ".bin"):
        temporary.with_suffix(suffix).replace(path.with_suffix(suffix))


def of_lightnl(operation: Any) -> bool:
    """Whether this operation of OpenVINO's belongs to a LightNL block and would not be itself in eight bits."""
    kind = operation.get_type_name()
    sources = [one.get_source_output() for one in operation.inputs()]
    before = [source.get_node().get_type_name() for source in sources]
    if kind == "MatMul":  # the classifier's second factor is a constant
        return "Constant" not in before
    if kind == "Multiply":  # x_sc^2 of its energy
        return bool(sources[0] == sources[1])
    # its sampler (1x1), and its kernel behind a transpose: a range a channel, which the plugin would put into the
    # product before it, where it fits no more
    return kind == "GroupConvolution" and (list(sources[1].get_shape())[-2:] == [1, 1] or before[0] == "Transpose")

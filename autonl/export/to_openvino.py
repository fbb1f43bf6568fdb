"""OpenVINO: an .xml with the graph and a .bin with the weights beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autonl.errors import AutoNLError
from autonl.export.custom_op import ATTRIBUTES, NAME, compile_library, has_custom_op, library_of
from autonl.export.formats import CustomOp, Format
from autonl.export.script import Runner


def write(model: nn.Module, image: torch.Tensor, path: Path, dynamic_batch: bool) -> None:
    import openvino

    if dynamic_batch:
        image = image.repeat(2, 1, 1, 1)
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic_batch else None
    custom_op = has_custom_op(model)
    with torch.no_grad():
        program = torch.export.export(model, (image,), dynamic_shapes=shapes)
        extensions = custom_op_extensions(library_of(path)) if custom_op else None
        converted = openvino.convert_model(program, extension=extensions)
    if custom_op:
        cancel_transposes(converted)
    # the converter forgets that the size is known; with it, inference takes two thirds of the time
    if not dynamic_batch:
        converted.reshape(list(image.shape))
    openvino.save_model(converted, path, compress_to_fp16=False)


def build_custom_op(path: Path) -> None:
    import openvino

    package = Path(openvino.__file__).parent
    library = next((package / "libs").glob("libopenvino.so*"), None)
    if library is None or int(openvino.__version__.split(".")[0]) < 2026:  # before, it had an older C++ ABI
        raise AutoNLError("--custom-op: needs OpenVINO 2026.0 or newer, as pip installs it on Linux, with its headers")
    # its library has the classes; it is in the process by then
    flags = ["-I", str(package / "include"), "-L", str(library.parent), f"-l:{library.name}"]
    compile_library(path, "openvino.cpp", flags)


def custom_op_extensions(library: Path) -> list[Any]:
    """What openvino.convert_model makes of LightNL where it is an operator of its own."""
    from openvino.frontend.pytorch import ConversionExtension
    from openvino.utils.node_factory import NodeFactory

    factory = NodeFactory()
    factory.add_extension(str(library))

    def translate(context: Any) -> Any:
        last = 3 + len(ATTRIBUTES)  # of deployed_lightnl's arguments, the shortcut, where there is one
        places = (0, 1, 2, last) if context.get_input_size() > last else (0, 1, 2)
        known = {name: context.get_values_from_const_input(place) for place, name in enumerate(ATTRIBUTES, 3)}
        return factory.create(NAME, [context.get_input(place) for place in places], known).outputs()

    return [str(library), ConversionExtension("autonl.deployed_lightnl.default", translate)]


def cancel_transposes(model: Any) -> None:
    """Take a map as it is where it would go from channels last to channels first and back again."""

    def order(node: Any) -> list[int]:
        return [int(axis) for axis in node.input_value(1).get_node().get_data()]

    for node in model.get_ordered_ops():
        before = node.input_value(0).get_node() if node.get_type_name() == "Transpose" else None
        if before and before.get_type_name() == "Transpose" and order(before) == [0, 3, 1, 2] == inverse(order(node)):
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(before.input_value(0))


def inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


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
        core = openvino.Core()
        if library_of(path).exists():
            core.add_extension(str(library_of(path)))
        compiled = core.compile_model(str(path), "CPU", settings)
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
    custom_op=CustomOp(
        build=build_custom_op,
        load="core = openvino.Core()\n"
        'core.add_extension(FILE + ".so")\n'
        'compiled = core.compile_model(FILE, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})',
    ),
)

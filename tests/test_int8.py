"""int8 files: what is in eight bits, what is not, and that they are smaller."""

import numpy as np
import pytest
from PIL import Image

from autonl.arch.codec import write_arch
from autonl.export import judge as judging
from autonl.export.formats import open_format
from autonl.export.run import Request, export
from autonl.models import resolve
from tests.test_export import SMALL, installed, written


@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_int8_leaves_the_energy_alone(name, tmp_path, monkeypatch):
    """Eight bits of an energy whose calibrated range is that of a few large images would be zero, and be divided by."""
    monkeypatch.setattr(judging, "INT8_AGREEMENT", 0.0)
    spec = resolve("digits").with_operator("lightnl_energy")
    write_arch(spec, tmp_path / "arch.yaml")
    path = tmp_path / {"onnx": "prepared.onnx", "openvino": "int8.xml"}[name]  # names that were once taken inside
    request = Request(name, path, quantize=True, calibrate="digits", images="digits", count=4)
    export(str(tmp_path / "arch.yaml"), request)
    chains = energies_of_onnx(path) if name == "onnx" else energies_of_openvino(path)
    assert len(chains) == sum(block.lightnl is not None for block in spec.blocks) > 0
    assert {kind for chain in chains for kind in chain} <= {"ReduceSum", "Div", "Divide", "Add"}


@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_int8_keeps_to_seven_bits(name, tmp_path, monkeypatch):
    """255 * 127 + 255 * 127 is more than 16 bits hold, and processors without VNNI add in those; 255 * 64 twice is not.

    Nor may ONNX Runtime give ReLU6's input, which nobody sees, a range; stem and first depthwise kernel are in float.
    """
    monkeypatch.setattr(judging, "INT8_AGREEMENT", 0.0)
    path = tmp_path / f"seven{open_format(name).suffix}"
    export("digits", Request(name, path, quantize=True, calibrate="digits", images="digits", count=4))
    if name == "openvino":
        assert largest_of_openvino(path) <= 64
        return
    import onnx

    graph = onnx.load(str(path)).graph
    made = {out: node for node in graph.node for out in node.output}
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    weights_of = [made.get(node.input[1]) for node in graph.node if node.op_type in ("Conv", "Gemm")]
    assert [found is None for found in weights_of] == [True] * 2 + [False] * (len(weights_of) - 2)
    largest = [abs(stored[found.input[0]].astype(int)).max() for found in weights_of[2:]]
    assert 0 < max(largest) <= 64
    clips = [node for node in graph.node if node.op_type == "Clip"]
    assert [made[node.input[0]].op_type for node in clips] == ["Conv"] * 2


def largest_of_openvino(path):
    import openvino

    nodes = openvino.Core().read_model(str(path)).get_ops()
    eight = [node for node in nodes if node.get_type_name() == "Constant" and node.get_element_type().size == 1]
    # depthwise kernels add no pairs
    dense = [node.data.astype(int) for node in eight if node.data.ndim > 1 and node.data.shape[1] > 1]
    assert [values.ndim for values in dense].count(2) == 1  # the classifier is among them
    return max(abs(values).max() for values in dense)


def energies_of_onnx(path):
    """The operators from each division by something, back to the sum that this comes from."""
    import onnx

    nodes = onnx.load(str(path)).graph.node
    made = {name: node for node in nodes for name in node.output}
    ends = [made[node.input[1]] for node in nodes if node.op_type == "Div" and node.input[1] in made]

    def before(node):
        return [made[name] for name in node.input if name in made]

    return [back_to_the_sum(end, lambda node: node.op_type, before) for end in ends]


def energies_of_openvino(path):
    import openvino

    def before(node):
        sources = [source.get_source_output().get_node() for source in node.inputs()]
        return [source for source in sources if source.get_type_name() != "Constant"]

    model = openvino.Core().read_model(str(path))
    ends = [before(node)[1:] for node in model.get_ops() if node.get_type_name() == "Divide"]
    return [back_to_the_sum(end[0], lambda node: node.get_type_name(), before) for end in ends if end]


def back_to_the_sum(node, kind, before):
    chain = [kind(node)]
    while chain[-1] != "ReduceSum":
        node = before(node)[0]
        chain.append(kind(node))
    return chain


@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_an_int8_file_is_smaller(tmp_path, name, monkeypatch):
    """Images in class folders; int8 of a random network may name other classes, but the file must be smaller."""
    arch, weights = written(SMALL, tmp_path)
    monkeypatch.setattr(judging, "INT8_AGREEMENT", 0.0)
    generator = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(0, 255, (64, 64, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{number}.png")
    suffix = open_format(name).suffix
    images = str(tmp_path / "images")
    sizes = []
    for quantize in (False, True):
        calibrate = images if quantize else None
        request = Request(
            name,
            tmp_path / f"{quantize}{suffix}",
            quantize=quantize,
            calibrate=calibrate,
            images=images,
            count=4,
            weights=weights,
        )
        sizes.append(export(arch, request).judged.bytes)
    assert sizes[1] < 0.6 * sizes[0]

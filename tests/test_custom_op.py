"""LightNL as one operator: the pass in C++ against float64, the networks and files that have it."""

import ctypes
import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import autonl
from autonl.errors import AutoNLError
from autonl.export import to_onnx
from autonl.export.custom_op import SOURCES, CustomLightNL, ShortcutBlock, deployed_lightnl, library_of, words_of
from autonl.export.deploy import deploy
from autonl.export.formats import FORMATS, WITH_CUSTOM_OP
from autonl.export.run import Request, export
from autonl.latency import time_networks
from autonl.nn.light_nonlocal import LightNL
from tests.test_export import SMALL, awake, installed, written

CXX = words_of("CXX", "c++")
needs_a_compiler = pytest.mark.skipif(not shutil.which(CXX[0]), reason=f"needs a C++ compiler: {CXX[0]}")

ENTRY = """#include "lightnl.h"
extern "C" void run(
    const float* x, const float* taps, const float* bias, const float* shortcut, float* z, long height, long width,
    long channels, long compact, long stride, float energy_eps) {
  autonl::lightnl(x, taps, bias, shortcut, z, {height, width, channels, compact, stride, energy_eps});
}
extern "C" bool is_spatial(long height, long width, long channels, long compact, long stride) {
  return autonl::is_spatial({height, width, channels, compact, stride, 0});
}
extern "C" const char* problem(
    long height, long width, long channels, long compact, long stride, long x_height, long x_width, long taps,
    long bias) {
  return autonl::problem({height, width, channels, compact, stride, 0}, x_height, x_width, taps, bias);
}
"""


@pytest.fixture(scope="module", params=["-O2 -march=native", "-O1"], ids=["native", "any"])
def compiled(request, tmp_path_factory):
    """The pass as functions of this process, for this processor and for any of its kind."""
    folder = tmp_path_factory.mktemp("pass")
    (folder / "entry.cpp").write_text(ENTRY)
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(SOURCES)]
    command = [*CXX, *request.param.split(), *strict, folder / "entry.cpp", "-o", folder / "entry.so"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "entry.so"))
    library.run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 5 + [ctypes.c_float]
    library.is_spatial.argtypes, library.is_spatial.restype = [ctypes.c_long] * 5, ctypes.c_bool
    library.problem.argtypes, library.problem.restype = [ctypes.c_long] * 9, ctypes.c_char_p
    return library


# height, width, channels, compact channels, stride; SPATIAL: (x_c x_sc^T) x_s has fewer multiply-adds
SPATIAL = [(3, 2, 17, 17, 3), (4, 4, 96, 24, 1), (7, 7, 160, 40, 1)]
SHAPES = [
    *SPATIAL,
    (1, 1, 1, 1, 1),
    (1, 5, 3, 2, 2),
    (6, 1, 4, 3, 1),
    (5, 7, 24, 6, 2),
    (8, 6, 36, 9, 1),
    (7, 7, 40, 10, 1),
    (14, 14, 80, 10, 2),
    (9, 11, 129, 16, 2),
]


@needs_a_compiler
@pytest.mark.parametrize("energy_eps", [0.0, 1e-3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_pass_agrees_with_float64(compiled, shape, energy_eps):
    height, width, channels, compact, stride = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, shortcut = torch.randn(2, 1, height, width, channels, generator=generator)
    taps = torch.randn(9, channels, generator=generator)
    bias = torch.randn(channels, generator=generator)
    for added in (None, shortcut):
        z = torch.full_like(x, torch.nan)
        addresses = [None if map_ is None else map_.data_ptr() for map_ in (x, taps, bias, added, z)]
        compiled.run(*addresses, *shape, energy_eps)
        exact = [None if map_ is None else map_.double() for map_ in (x, taps, bias, added)]
        expected = deployed_lightnl(*exact[:3], height, width, compact, stride, energy_eps, exact[3])
        assert (z - expected).norm() <= 2e-6 * expected.norm()


@needs_a_compiler
def test_both_orders_are_among_the_shapes(compiled):
    """By hand, 7 x 7 x 160: 49 49 (40 + 160) = 480,200 multiply-adds, the other way (49 + 49) 40 160 = 627,200."""
    assert [shape for shape in SHAPES if compiled.is_spatial(*shape)] == SPATIAL


@needs_a_compiler
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((7, 5, 8, 2, 1, 7, 5, 72, 8), None),
        ((7, 5, 8, 2, 1, 0, 0, 72, 8), b"x is not (N, H, W, C)"),
        ((7, 5, 8, 2, 1, 9, 5, 72, 8), b"another size"),
        ((7, 5, 8, 9, 1, 7, 5, 72, 8), b"compact is not between 1 and the channels"),
        ((7, 5, 8, 2, 0, 7, 5, 72, 8), b"stride is not positive"),
        ((7, 5, 8, 2, 1, 7, 5, 71, 8), b"taps are not (9, C)"),
    ],
)
def test_sizes_that_a_file_should_not_have(compiled, sizes, told):
    found = compiled.problem(*sizes)
    assert found is None if told is None else told in found


@needs_a_compiler
def test_the_pass_in_several_threads(compiled):
    """Each has memory of its own, also for maps of other sizes at the same time."""
    shapes = [shape for shape in SHAPES if shape[0] > 4] * 3

    def make(shape):
        height, width, channels, *_ = shape
        x = torch.ones(height, width, channels).cumsum(0)
        outs = []
        for _ in range(20):
            z = torch.empty_like(x)
            taps, bias = torch.ones(9, channels), torch.ones(channels)
            compiled.run(*(map_.data_ptr() for map_ in (x, taps, bias)), None, z.data_ptr(), *shape, 0.0)
            outs.append(z)
        return outs

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(make, shapes))
    for shape, outs in zip(shapes, together, strict=True):
        assert all(torch.equal(outs[0], out) for out in outs)
        assert torch.equal(outs[0], make(shape)[0])


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("energy", [False, True])
def test_the_operator_is_lightnl(stride, energy):
    block = LightNL(12, 0.25, stride, energy=energy)
    nn.init.normal_(block.bn.weight)
    nn.init.normal_(block.bn.bias)
    block.bn.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 12, 7, 10)
    with torch.no_grad():
        expected = block.eval().double()(x.double())
        z = CustomLightNL(block.float(), (7, 10))(x)
    assert (z - expected).norm() <= 1e-6 * expected.norm()
    assert (expected - x).norm() > 0.01 * x.norm()  # there is something to compare


@pytest.mark.parametrize("operator", ["lightnl", "lightnl_energy"])
@pytest.mark.parametrize("size", [64, (33, 96)])
def test_networks_with_it_give_the_same_outputs(operator, size):
    model = awake(autonl.create_model(SMALL.with_operator(operator)))
    deployed = deploy(model, size, custom_op=True)
    height, width = (size, size) if isinstance(size, int) else size
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.double()(x.double())
        assert (deployed(x) - expected).abs().max() <= 2e-6 * expected.abs().max()
        with pytest.raises(AutoNLError, match="is not allowed; allowed: "):  # its poolings are for one size too
            deployed(torch.zeros(1, 3, height + 16, width))
    kinds = [type(module) for module in deployed.modules()]
    assert (kinds.count(CustomLightNL), kinds.count(ShortcutBlock), kinds.count(LightNL)) == (5, 1, 0)


@pytest.fixture
def small(tmp_path):
    return written(SMALL, tmp_path)


def kinds_of_nodes(path):
    """The operators of a file that matter here, in order."""
    if path.suffix == ".onnx":
        import onnx

        return [node.op_type for node in onnx.load(path).graph.node]
    return re.findall(r'<layer id="\d+" name="[^"]*" type="(\w+)"', path.read_text())


@needs_a_compiler
@pytest.mark.parametrize(("operator", "dynamic_batch"), [("lightnl", False), ("lightnl_energy", True)])
@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_files_with_it(tmp_path, monkeypatch, name, operator, dynamic_batch):
    arch, weights = written(replace(SMALL, operator=operator), tmp_path)
    monkeypatch.chdir(tmp_path)
    out = Path("small.onnx" if name == "onnx" else "small.xml")
    library = out.with_name(f"{out.name}.so")
    request = Request(name, out, None, dynamic_batch, count=7, weights=weights, custom_op=True)
    exported = export(arch, request)
    assert library in exported.files
    about = json.loads(Path(f"{out}.json").read_text())
    runtime = {"onnx": "onnxruntime", "openvino": "openvino"}[name]
    assert about["custom_op"] == library.name
    release = importlib.import_module(runtime).__version__
    assert about["custom_op_built_for"] == f"{runtime} {release}, {platform.machine()}"
    assert about["bytes"] == sum(
        path.stat().st_size for path in (out, out.with_suffix(".bin"), library) if path.exists()
    )
    assert exported.judged.verdict.difference < 1e-5
    nodes = kinds_of_nodes(out)
    # the products are inside, of OpenVINO's the classifier is left; so is the addition of the shortcut
    assert [nodes.count(kind) for kind in ("LightNL", "MatMul")] == [5, {"onnx": 0, "openvino": 1}[name]]
    if name == "onnx":
        assert "Add" not in nodes
    else:
        assert nodes.count("Transpose") == 10  # one before and one behind each, and none for the shortcut
    export(arch, replace(request, custom_op=False))
    assert "LightNL" not in kinds_of_nodes(out)
    assert not library.exists()  # of a file that is gone


@needs_a_compiler
@pytest.mark.parametrize("name", [installed("onnx")])
def test_networks_without_lightnl_have_no_use_for_it(tmp_path, name):
    blocks = tuple(replace(block, lightnl=None) for block in SMALL.blocks)
    arch, weights = written(replace(SMALL, blocks=blocks), tmp_path)
    with pytest.raises(AutoNLError, match="--custom-op: is for LightNL, which this network does not have"):
        export(arch, Request(name, tmp_path / "out" / "small.onnx", count=1, weights=weights, custom_op=True))
    assert not (tmp_path / "out").exists()


def test_the_formats_that_have_it():
    modules = {name: importlib.import_module(f"autonl.export.to_{name}") for name in FORMATS}
    assert tuple(name for name, module in modules.items() if module.FORMAT.custom_op) == WITH_CUSTOM_OP


@needs_a_compiler
@pytest.mark.parametrize("name", [installed("onnx")])
def test_networks_without_lightnl_are_not_timed_with_it(name):
    with pytest.raises(AutoNLError, match="--custom-op: is for LightNL, which none of these networks has; leave it"):
        time_networks(["mobilenetv2_035"], "onnxruntime", (32, 32), rounds=1, custom_op=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The operator of ONNX Runtime, beside no file."""
    path = tmp_path_factory.mktemp("library") / "any.onnx"
    to_onnx.FORMAT.custom_op.build(path)
    return str(library_of(path))


X = np.random.default_rng(0).standard_normal((3, 5, 7, 8)).astype(np.float32)


# what is not as in a file of ours: attributes, x, shortcut, the lines of the taps
@needs_a_compiler
@pytest.mark.parametrize(
    ("changed", "x", "shortcut", "lines", "told"),
    [
        ({}, X, None, 9, None),
        ({}, X, X, 9, None),
        ({}, X[:0], X[:0], 9, None),
        ({}, X, X[:1], 9, "the shortcut is not like x"),
        ({}, X[0], None, 9, r"x is not \(N, H, W, C\)"),
        ({}, X[:, :4], None, 9, "x has another size than the network was exported for"),
        ({}, X, None, 8, r"taps are not \(9, C\), or bias is not \(C\)"),
        ({"compact": 9}, X, None, 9, "compact is not between 1 and the channels"),
        ({"stride": None}, X, None, 9, "stride"),
    ],
)
@pytest.mark.parametrize("name", [installed("onnx")])
def test_a_file_with_wrong_sizes_is_refused_and_ends_nothing(library, changed, x, shortcut, lines, told, name):
    import onnxruntime
    from onnx import TensorProto, helper

    known = {"height": 5, "width": 7, "compact": 2, "stride": 2, "energy_eps": 0.0} | changed
    known = {name: value for name, value in known.items() if value is not None}
    feeds = {"x": x} | ({} if shortcut is None else {"shortcut": shortcut})
    node = helper.make_node("LightNL", ["x", "taps", "bias", *list(feeds)[1:]], ["z"], domain="autonl", **known)
    graph = helper.make_graph(
        [node], "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * feeds[name].ndim) for name in feeds],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [
            helper.make_tensor("taps", TensorProto.FLOAT, [lines, 8], [1.0] * 8 * lines),
            helper.make_tensor("bias", TensorProto.FLOAT, [8], [0.5] * 8),
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("autonl", 1)]
    content = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(library)

    def run():
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]

    if told:
        with pytest.raises(Exception, match=told):
            run()
        return
    if not len(x):
        assert run().shape == x.shape
        return
    maps = [torch.from_numpy(map_) for map_ in feeds.values()]
    expected = deployed_lightnl(maps[0], torch.ones(9, 8), torch.full((8,), 0.5), *known.values(), *maps[1:])
    assert np.allclose(run(), expected, rtol=1e-5, atol=1e-5)


@needs_a_compiler
@pytest.mark.parametrize("name", [installed("onnx")])
def test_networks_are_timed_with_it(monkeypatch, name):
    """The second is one with LightNL; the first has no use for the operator."""
    built, honest = [], to_onnx.FORMAT.custom_op.build
    counting = replace(to_onnx.FORMAT.custom_op, build=lambda path: (built.append(path), honest(path)))
    monkeypatch.setattr(to_onnx, "FORMAT", replace(to_onnx.FORMAT, custom_op=counting))
    networks = ["mobilenetv2_035", "mobilenetv2_lightnl_035"]
    timings = time_networks(networks, "onnxruntime", (64, 64), rounds=1, custom_op=True)
    assert list(timings) == networks
    assert [path.name for path in built] == ["1.onnx"]


@needs_a_compiler
@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_the_script_finds_the_library_from_wherever_it_is_run(small, tmp_path, name):
    arch, weights = small
    suffix = ".onnx" if name == "onnx" else ".xml"
    export(arch, Request(name, tmp_path / f"small{suffix}", count=1, weights=weights, custom_op=True))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 140, 3)).astype(np.uint8)).save(tmp_path / "a.png")
    told = []
    for folder, script in ((tmp_path, f"small_{name}.py"), ("/", tmp_path / f"small_{name}.py")):
        command = [sys.executable, script, tmp_path / "a.png"]
        told.append(subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout)
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 5
    (tmp_path / f"small{suffix}.so").unlink()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1  # it was needed


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_variable_says_nothing(monkeypatch, blank):
    monkeypatch.setenv("CXX", blank)
    assert words_of("CXX", "c++") == ["c++"]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"CXX": "no-such-compiler"},
            "^--custom-op: needs a C.. compiler, and no-such-compiler does not run; CXX names",
        ),
        pytest.param(
            {"CXXFLAGS": "--no-such"}, r"^--custom-op: \S+ cannot compile it: .*error", marks=needs_a_compiler
        ),
    ],
)
@pytest.mark.parametrize("name", [installed("onnx")])
def test_what_cannot_be_compiled_leaves_nothing(small, tmp_path, monkeypatch, name, variables, told):
    arch, weights = small
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(AutoNLError, match=told):
        export(arch, Request(name, tmp_path / "out" / "small.onnx", count=1, weights=weights, custom_op=True))
    assert not (tmp_path / "out").exists()

"""LightNL as one operator: the pass in C++ against float64, the networks and files that have it."""

import ctypes
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import autonl
from autonl.errors import AutoNLError
from autonl.export.custom_op import SOURCES, CustomLightNL, ShortcutBlock, deployed_lightnl
from autonl.export.deploy import deploy
from autonl.export.run import Request, export
from autonl.nn.light_nonlocal import LightNL
from tests.test_export import SMALL, awake, installed, written

CXX = os.environ.get("CXX") or "c++"
needs_a_compiler = pytest.mark.skipif(not shutil.which(CXX), reason=f"needs a C++ compiler: {CXX}")

ENTRY = """#include "lightnl.h"
extern "C" void run(
    const float* x, const float* taps, const float* bias, const float* shortcut, float* z, long height, long width,
    long channels, long compact, long stride, float energy_eps) {
  autonl::lightnl(x, taps, bias, shortcut, z, {height, width, channels, compact, stride, energy_eps});
}
"""


@pytest.fixture(scope="module", params=["-O2 -march=native", "-O1"], ids=["native", "any"])
def lightnl_pass(request, tmp_path_factory):
    """The pass as a function of this process, for this processor and for any of its kind."""
    folder = tmp_path_factory.mktemp("pass")
    (folder / "entry.cpp").write_text(ENTRY)
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(SOURCES)]
    library = folder / "entry.so"
    subprocess.run([CXX, *request.param.split(), *strict, folder / "entry.cpp", "-o", library], check=True)
    function = ctypes.CDLL(str(library)).run
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 5 + [ctypes.c_float]
    return function


# height, width, channels, compact channels, stride; the order is spatial where noted
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 5, 3, 2, 2),
    (6, 1, 4, 3, 1),
    (3, 2, 17, 17, 3),  # spatial
    (5, 7, 24, 6, 2),
    (8, 6, 36, 9, 1),
    (7, 7, 40, 10, 1),
    (4, 4, 96, 24, 1),  # spatial
    (7, 7, 160, 40, 1),  # spatial
    (14, 14, 80, 10, 2),
    (9, 11, 129, 16, 2),
]


def is_spatial(height, width, channels, compact, stride):
    samples = -(-height // stride) * -(-width // stride)
    return height * width * samples * (compact + channels) < (samples + height * width) * compact * channels


@needs_a_compiler
@pytest.mark.parametrize("energy_eps", [0.0, 1e-3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_pass_agrees_with_float64(lightnl_pass, shape, energy_eps):
    height, width, channels, compact, stride = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, shortcut = torch.randn(2, 1, height, width, channels, generator=generator)
    taps = torch.randn(9, channels, generator=generator) / (height * width)
    bias = torch.randn(channels, generator=generator)
    for added in (None, shortcut):
        z = torch.full_like(x, torch.nan)
        addresses = [None if map_ is None else map_.data_ptr() for map_ in (x, taps, bias, added, z)]
        lightnl_pass(*addresses, *shape, energy_eps)
        exact = [None if map_ is None else map_.double() for map_ in (x, taps, bias, added)]
        expected = deployed_lightnl(*exact[:3], compact, stride, energy_eps, exact[3])
        assert (z - expected).norm() <= 2e-6 * expected.norm()


def test_both_orders_are_among_the_shapes():
    assert {is_spatial(*shape) for shape in SHAPES} == {True, False}


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
    kinds = [type(module) for module in deployed.modules()]
    assert (kinds.count(CustomLightNL), kinds.count(ShortcutBlock), kinds.count(LightNL)) == (5, 1, 0)


@pytest.fixture
def small(tmp_path):
    return written(SMALL, tmp_path)


@needs_a_compiler
@pytest.mark.parametrize("dynamic_batch", [False, True])
@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_files_with_it(small, tmp_path, name, dynamic_batch):
    arch, weights = small
    out = tmp_path / "out" / ("small.onnx" if name == "onnx" else "small.xml")
    exported = export(arch, Request(name, out, None, dynamic_batch, count=7, weights=weights, custom_op=True))
    assert out.with_name(f"{out.name}.so") in exported.files
    assert exported.judged.verdict.difference < 1e-5
    if name == "onnx":
        import onnx

        nodes = [node for node in onnx.load(out).graph.node if node.op_type in ("LightNL", "Add", "MatMul")]
        assert [node.op_type for node in nodes] == ["LightNL"] * 5  # the shortcut's addition is inside too
        assert sum(len(node.input) == 4 and node.input[3] != "" for node in nodes) == 1


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

"""The Triton kernels against the plain path in float64: interpreted on any machine, compiled where there is a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from autonl.nn import kernels
from autonl.nn.light_nonlocal import EPSILON, LightNL
from tests.conftest import PROVE

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: no device is visible here")
HAS_TRITON = find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: it is not installed")

BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}

# images, channels, height, width, ratio, stride, memory format, dtype, and how a tile of 16 channels divides them:
# several bands, blocks, parts of G, steps and ragged ends in maps this small
INTERPRETED = [
    (1, 24, 9, 9, 0.25, 2, "channels_last", "float32",
     {"positions": 32, "step": 16, "bands": 2, "gram_parts": 2, "gram_positions": 16}),
    (2, 20, 5, 9, 0.25, 1, "contiguous_format", "float32", {"bands": 2, "gram_parts": 3, "gram_positions": 16}),
    (1, 17, 4, 5, 0.125, 2, "channels_last", "float32", {}),
    (4, 3, 3, 3, 0.5, 1, "channels_last", "float32", {}),
    (2, 8, 1, 3, 0.25, 3, "contiguous_format", "float32", {"bands": 2, "gram_parts": 1, "spatial": True}),
    (2, 36, 4, 4, 0.5, 1, "channels_last", "float16", {"spatial": True}),
    (2, 17, 3, 5, 0.25, 2, "contiguous_format", "float16", {"spatial": True}),
    (2, 36, 4, 5, 0.5, 2, "channels_last", "float16", {"positions": 32, "step": 16}),
    (3, 12, 5, 6, 0.25, 2, "channels_last", "float16", {"gathered": True, "bands": 2, "gram_parts": 1}),
    (2, 20, 4, 5, 0.5, 1, "contiguous_format", "float16", {"gathered": True}),
    (2, 12, 5, 7, 0.25, 1, "contiguous_format", "float32", {"gathered": True, "bands": 2, "gram_positions": 16}),
]  # fmt: skip
BY_ENERGY = (0, 2, 4, 6, 8, 9)  # of these: every way to make G
COPIED = 2  # of these: what is saved comes back as copies, maps in another layout, as when it is kept on the CPU
LARGE = (5, 7)  # of these: features whose products are beyond float16, by energy: their cubes would be too


def random_block(chs: int, ratio: float, stride: int, energy: bool = False) -> LightNL:
    block = LightNL(chs, ratio, stride, energy=energy, bn_eps=1e-3, bn_momentum=0.3)
    nn.init.normal_(block.bn.weight)
    nn.init.normal_(block.bn.bias)
    nn.init.normal_(block.bn.running_mean)
    nn.init.uniform_(block.bn.running_var, 0.5, 2.0)
    block.fused = True
    return block


def error(value: Tensor, expected: Tensor) -> float:
    if not value.isfinite().all():
        return float("inf")
    return ((value.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def queue_up(device: str) -> None:
    """Keep a GPU busy for a while, so that what is launched next waits in line and can overlap."""
    if device == "cuda":
        torch.cuda._sleep(20_000_000)


def errors(images: int, chs: int, height: int, width: int, ratio: float, stride: int, layout: str, dtype: torch.dtype,
           device: str, energy: bool, scale: float = 1, level: float = 0,
           saving: AbstractContextManager = nullcontext()) -> dict[str, float]:  # fmt: skip
    """Norm-wise errors of outputs, running statistics and all gradients of the kernels against float64.

    level   mean of the features in their standard deviations: with it channels agree, and products are larger
    saving  around the forward pass in training; if there is one, dz has another layout as well
    """
    from autonl.nn.kernels import eager

    block = random_block(chs, ratio, stride, energy).to(device)
    exact = LightNL(chs, ratio, stride, energy=energy, bn_eps=1e-3, bn_momentum=0.3).to(device).double()
    exact.load_state_dict(block.state_dict())
    exact.fused = False
    block.bn.eps = exact.bn.eps = 1e-3 * scale**2
    x = scale * (level + torch.randn(images, chs, height, width, device=device))
    x = x.to(dtype, memory_format=getattr(torch, layout))
    arguments = (block.depthwise, block.bn, (block.compact_chs, stride, EPSILON if energy else 0.0))
    with torch.no_grad():
        queue_up(device)
        block.eval()
        found = {"inference": error(eager.lightnl(x, *arguments), exact.eval()(x.double()))}
    block.train()
    x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    queue_up(device)
    with saving:
        z, exact_z = eager.lightnl(x, *arguments), exact.train()(exact_x)
    dz = torch.randn_like(z) if isinstance(saving, nullcontext) else torch.randn(z.shape, device=device).to(z.dtype)
    queue_up(device)
    z.backward(dz)
    exact_z.backward(dz.double())
    found |= {"z": error(z, exact_z), "dx": error(x.grad, exact_x.grad)}
    for (name, parameter), expected in zip(block.named_parameters(), exact.parameters(), strict=True):
        found[name] = error(parameter.grad, expected.grad)
    for (name, buffer), expected in zip(block.named_buffers(), exact.buffers(), strict=True):
        found[name] = error(buffer, expected.double())
    return found


def triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in version("triton").split(".")[:2])


def interpret() -> None:
    """In a process of its own: TRITON_INTERPRET is read when Triton is imported."""
    from autonl.nn.kernels import eager, launch

    kernels.supported = eager.still_supported = lambda *_: True
    torch.manual_seed(0)
    torch.set_num_threads(1)
    launch.CHUNKS = 2  # of the BN's sums: several steps each in maps this small
    found = []
    for number, (*shape, dtype, division) in enumerate(INTERPRETED):
        tile = launch.Tile(**{"positions": 16, "channels": 16, "warps": 4} | division)
        launch.forward_tile = launch.depthwise_backward_tile = lambda *_, tile=tile: tile
        launch.input_backward_tile = lambda *_, tile=tile: replace(tile, bands=tile.bands + 1)
        forms: list[tuple] = [(False, 1.0), *([(True, 1.0)] if number in BY_ENERGY else [])]
        forms += [(True, 300.0, 3.0)] if number in LARGE else []
        forms += [(True, 1e-3)] if number == BY_ENERGY[1] else []  # where EPSILON is half of the energy
        found.append([errors(*shape, getattr(torch, dtype), "cpu", *form) for form in forms])
        if number in LARGE:  # and tiny ones, whose gradients are beyond float16
            tiny = errors(*shape, getattr(torch, dtype), "cpu", True, 1e-6)
            found[-1].append({name: tiny[name] for name in ("inference", "z")})
        if number == COPIED:
            copied = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, torch.clone)
            found[-1].append(errors(*shape, getattr(torch, dtype), "cpu", False, saving=copied))
    print(json.dumps(found))


def interpreted(script: str, *arguments: str, timeout: int = 120) -> Any:
    """What a script prints last, in a process of its own where Triton interprets kernels."""
    if triton_version() < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("needs NumPy before 2.4: Triton's interpreter before 3.7 does not run with later ones")
    root = str(Path(__file__).parents[2])  # the package need not be installed
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, script, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@NEEDS_TRITON
def test_interpreted_kernels_agree_with_float64() -> None:
    for case, forms in zip(INTERPRETED, interpreted(__file__), strict=True):
        for found in forms:
            assert max(found.values()) < BOUNDS[case[7]], (case, found)


@pytest.mark.parametrize("training", [False, True])
def test_cpu_takes_the_plain_path(training: bool) -> None:
    block = random_block(8, 0.25, 2).train(training)
    assert not kernels.supported(torch.randn(2, 8, 5, 5), block.depthwise, block.bn, block.compact_chs)


def recording(graphs: list, backend: Callable) -> Callable:
    """A backend of torch.compile that notes which of our operators each graph holds."""

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append([str(node.target) for node in graph.graph.nodes if "autonl" in str(node.target)])
        return backend(graph, inputs)

    return record


def operators(training: bool) -> list[str]:
    return [f"autonl.lightnl_{'training' if training else 'inference'}.default"]


@NEEDS_TRITON
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_traces_one_operator_without_a_break(
    training: bool, energy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors that claim to be on a GPU: nothing runs."""
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(kernels, "has_bfloat16", lambda device: True)
    graphs = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.set_grad_enabled(training):
        block = LightNL(24, 0.25, 2, energy=energy).train(training)
        block.fused = True
        x = torch.empty(4, 24, 14, 14).to(memory_format=torch.channels_last)
        z = torch.compile(block, fullgraph=True, backend=recording(graphs, lambda graph, inputs: graph))(x)
    assert graphs == [operators(training)]
    assert (z.shape, z.stride()) == (x.shape, x.stride())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU for Triton to compile for. Nothing can run on it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", gpu)


@NEEDS_TRITON
@pytest.mark.usefixtures("hopper")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # an error would make torch distrust every kernel
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous_format"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_compile_sees_the_kernels_and_saves_nothing_for_z(
    layout: str, dtype: str, energy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block and a residual, forward and backward, up to the graphs that a compiler gets. Nothing runs."""
    from autonl.nn.kernels import passes

    monkeypatch.setattr(passes, "can_overlap", lambda: True)
    monkeypatch.setattr(kernels, "supported", lambda *_: True)
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def with_residual(x: Tensor) -> Tensor:
        return block(x) + x

    with FakeTensorMode(allow_non_fake_inputs=True):
        block = LightNL(24, 0.25, 2, energy=energy).train()
        block.fused = True
        x = torch.empty(4, 24, 14, 14, dtype=getattr(torch, dtype)).to(memory_format=getattr(torch, layout))
        compiler = aot_autograd(fw_compiler=note, partition_fn=min_cut_rematerialization_partition)
        torch.compiler.reset()
        z = torch.compile(with_residual, fullgraph=True, backend=compiler)(x.requires_grad_())
        z.sum().backward()
    assert (z.dtype, z.shape, z.stride()) == (x.dtype, x.shape, x.stride())
    assert (x.grad.dtype, x.grad.stride()) == (x.dtype, x.stride())
    assert block.depthwise.weight.grad.dtype == torch.float32
    launches = [sum("triton_kernel_wrapper" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert launches == [2, 4]  # z is left to the compiler
    maps = [node for node in graphs[1].graph.nodes if node.op == "placeholder" and node.meta["val"].shape == x.shape]
    assert len(maps) == 3  # x, u and dz


@NEEDS_TRITON
def test_what_torch_compile_normalises_is_batch_norm() -> None:
    from autonl.nn.kernels import launch

    x, u = torch.randn(2, 3, 8, 5, 5).unbind()
    gamma, beta = torch.randn(2, 8).unbind()
    statistics = torch.stack([u.mean((0, 2, 3)), u.var((0, 2, 3), correction=0)])
    expected = torch.nn.functional.batch_norm(u, None, None, gamma, beta, training=True, eps=0.1) + x
    torch.testing.assert_close(launch.normalised(x, u, gamma, beta, statistics, 0.1), expected)


def compile_only(planned: Any, *tensors: Tensor | None) -> Any:
    """A launch up to machine code, in place of running it."""
    compiled = planned.kernel.warmup(*tensors, *planned.scalars, grid=planned.grid, **planned.named)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 227 * 1024  # bytes that a program on a Hopper chip may have
    assert compiled.metadata.launch_pdl == ("launch_pdl" in planned.untraced)
    if compiled.metadata.launch_pdl:  # it may be there before what it reads: it waits before it touches any memory
        before, _ = compiled.asm["ptx"].split("griddepcontrol.wait")
        assert not re.search(r"\b(ld|st|red|atom)\.global|cp\.async", before)
    return compiled


@NEEDS_TRITON
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("chs", "size"), [(24, 56), (96, 14), (320, 7), (320, 36)])
def test_only_kernels_within_a_pass_overlap(chs: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from autonl.nn.kernels import launch, passes

    monkeypatch.setattr(passes, "can_overlap", lambda: True)
    problem = launch.Problem(2, chs, size, size, True, torch.bfloat16, chs // 4, 1, 1e-5, 0.0)
    training = launch.training_plan.__wrapped__(problem, 0.1, True, True, None, ())
    plans = [
        training,
        launch.inference_plan.__wrapped__(problem, None, ()),
        launch.backward_plan.__wrapped__(problem, None, None, ()),
    ]
    for plan in plans:
        early = [one.untraced.get("launch_pdl", False) for one in plan.launches]
        assert early == [False] + [True] * (len(plan.launches) - 1)  # x may not be there yet
        assert [one.constants.get("FOLLOWS", False) for one in plan.launches] == early
        assert [one.constants.get("LEADS", False) for one in plan.launches] == [*early[1:], False]
    traced = []
    monkeypatch.setattr(
        passes, "wrap_triton", lambda kernel: {training.launches[1].grid: lambda *_, **known: traced.append(known)}
    )
    passes.run_traced(training.launches[1])
    assert (traced[0]["FOLLOWS"], traced[0]["LEADS"]) == (False, False)
    assert "launch_pdl" not in traced[0]
    statistics = next(one for one in training.launches if one.kernel.__name__ == "batch_statistics")
    compile_only(statistics, *(torch.zeros(chs) for _ in range(4)), torch.zeros((), dtype=torch.int64))


@NEEDS_TRITON
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("training", [False, True])
def test_nan_stays_where_values_are_held_in_float16(training: bool) -> None:
    """A training that has diverged must not go on. As a GPU bounds values: the interpreter's NumPy keeps NaN anyway."""
    from autonl.nn.kernels import launch

    bounds: list[str] = []

    def run(planned: Any, *tensors: Tensor | None) -> None:
        bounds.extend(re.findall(r"\b(?:min|max)\S*\.xorsign\S*", compile_only(planned, *tensors).asm["ptx"]))

    block, x = LightNL(24, 0.25, 1), torch.zeros(2, 24, 7, 7, dtype=torch.bfloat16)
    weight, gamma, beta, *running = (block.depthwise.weight, block.bn.weight, block.bn.bias, *block.bn.buffers())
    if training:
        saved = launch.Saved(x, x, torch.zeros(2, 6, 24), torch.zeros(2, 24), weight, gamma)
        launch.training_backward(x, saved, 1, 1e-5, 0.0, run)
    else:
        launch.inference(x, weight, (gamma, beta, *running[:2]), 6, 1, 1e-5, 0.0, run)
    assert bounds
    assert all(".NaN" in bound for bound in bounds), bounds


@NEEDS_TRITON
@pytest.mark.skipif(not PROVE, reason="compiles some hundred kernels: make prove")
@pytest.mark.parametrize("energy", [0.0, EPSILON])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("hopper")
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(
    dtype: str, energy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter does not see what the compiler refuses, a variable that changes its shape in a loop for one."""
    from autonl.nn.kernels import launch, passes
    from benchmarks.settle import alternatives

    monkeypatch.setattr(passes, "can_overlap", lambda: True)

    # the last one as in a segmentation: many compact channels on a map of more than 32 x 32
    for chs, size, stride in ((24, 56, 1), (40, 28, 2), (96, 14, 2), (320, 7, 1), (320, 36, 1)):
        block = random_block(chs, 0.25, stride)
        weight, gamma, beta, *running = (block.depthwise.weight, block.bn.weight, block.bn.bias, *block.bn.buffers())
        x = torch.zeros(2, chs, size, size, dtype=getattr(torch, dtype)).to(memory_format=torch.channels_last)
        inference, forward, backward, inputs = (
            [None, *([] if dtype == "float32" else alternatives(size, chs, 0.25, stride, what))]
            for what in ("inference", "forward", "backward", "input")
        )
        norm = (gamma, beta, *running[:2])
        for tile in inference:
            launch.inference(x, weight, norm, block.compact_chs, stride, 1e-5, energy, compile_only, tile)
        for tile in forward:
            _, saved = launch.training(
                x, weight, gamma, beta, block.compact_chs, stride, 1e-5, energy, tuple(running), 0.1, compile_only, tile
            )
        for tile, input_tile in zip_longest(backward, inputs):
            launch.training_backward(x, saved, stride, 1e-5, energy, compile_only, tile, input_tile)


@NEEDS_GPU
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(getattr(torch, name), bound) for name, bound in BOUNDS.items()])
@pytest.mark.parametrize(
    "case",
    [
        (1, 17, 7, 7, 0.25, 3, "contiguous_format"),
        (1000, 8, 14, 15, 0.125, 1, "channels_last"),
        (3, 10, 5, 7, 0.125, 2, "contiguous_format"),
        (2, 24, 57, 56, 0.25, 2, "channels_last"),
        (4, 40, 28, 28, 0.25, 1, "channels_last"),
        (16, 96, 14, 14, 0.25, 2, "channels_last"),
        (16, 320, 7, 7, 0.25, 1, "channels_last"),
        (4, 192, 15, 9, 0.25, 1, "contiguous_format"),
        (2, 24, 20, 20, 0.25, 2, "contiguous_format"),
    ],
)
def test_compiled_kernels_agree_with_float64(case: tuple, dtype: torch.dtype, bound: float, energy: bool) -> None:
    torch.manual_seed(0)
    for _ in range(2):  # the second time without Triton's binder
        found = errors(*case, dtype, "cuda", energy)
        assert max(found.values()) < bound, found


@NEEDS_GPU
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [(2, 24, 57, 56, 0.25, 2, "channels_last"), (4, 40, 28, 28, 0.25, 1, "channels_last")])
@pytest.mark.parametrize("gram_parts", [0, 1])
def test_compiled_gathered_kernels_agree_with_float64(
    gram_parts: int, case: tuple, dtype: str, energy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the table uses them or not. Triton's interpreter has no products of bfloat16."""
    from autonl.nn.kernels import launch
    from benchmarks.settle import forget_plans

    torch.manual_seed(0)
    tile = launch.Tile(64, 32, warps=4, bands=2, stages=1, gathered=True, gram_parts=gram_parts)
    monkeypatch.setattr(launch, "forward_tile", lambda *_: tile)
    monkeypatch.setattr(launch, "depthwise_backward_tile", lambda *_: tile)
    forget_plans()
    found = [errors(*case, getattr(torch, dtype), "cuda", energy) for _ in range(2)]  # the second time from addresses
    forget_plans()
    assert max(max(one.values()) for one in found) < BOUNDS[dtype], found


@NEEDS_GPU
@pytest.mark.parametrize("scale", [1e-2, 1e3])
@pytest.mark.parametrize(("chs", "size", "stride"), [(24, 56, 1), (40, 28, 2), (96, 14, 1), (320, 7, 1), (320, 20, 2)])
def test_compiled_kernels_agree_for_small_and_large_features(chs: int, size: int, stride: int, scale: float) -> None:
    """With channels that agree: products grow with their number, and are held in float16.

    u is then not around zero, and as bfloat16 it is rounded by twice as much of what BN leaves of it.
    """
    torch.manual_seed(0)
    found = errors(8, chs, size, size, 0.25, stride, "channels_last", torch.bfloat16, "cuda", False, scale, 1.0)
    assert max(found.values()) < 2 * BOUNDS["bfloat16"], found


@NEEDS_GPU
def test_large_values_do_not_overflow_in_float16() -> None:
    block = random_block(24, 0.25, 2).cuda().train()
    x = (30 * torch.randn(2, 24, 112, 112, device="cuda")).half().requires_grad_()
    block(x).float().square().mean().backward()
    assert all(t.isfinite().all() for t in (x.grad, *(p.grad for p in block.parameters())))


@NEEDS_GPU
@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_sees_the_kernels(training: bool, energy: bool) -> None:
    torch.manual_seed(0)
    block = random_block(24, 0.25, 2, energy).cuda().train(training)
    eager = random_block(24, 0.25, 2, energy).cuda().train(training)
    eager.load_state_dict(block.state_dict())
    x = torch.randn(4, 24, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    results = []
    graphs = []
    compiled = torch.compile(block, fullgraph=True, backend=recording(graphs, lookup_backend("inductor")))
    for function, module in ((compiled, block), (eager, eager)):
        leaf = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            z = function(leaf)
        if training:
            z.square().sum().backward()
        results.append(
            [z, *module.buffers(), *([leaf.grad, *(p.grad for p in module.parameters())] if training else [])]
        )
    assert graphs == [operators(training)]
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@NEEDS_GPU
def test_export_is_plain_and_sync_batch_norm_too() -> None:
    block = random_block(8, 0.25, 2).cuda().eval()
    x = torch.randn(2, 8, 9, 9, device="cuda")
    assert kernels.supported(x, block.depthwise, block.bn, block.compact_chs) is False  # gradients of eval mode
    with torch.no_grad():
        assert kernels.supported(x, block.depthwise, block.bn, block.compact_chs)
        graph = torch.export.export(block, (x,)).graph
        assert not [node for node in graph.nodes if "autonl" in str(node.target)]
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(block).train()
    assert not kernels.supported(x, synced.depthwise, synced.bn, synced.compact_chs)


if __name__ == "__main__":
    interpret()

"""The Triton kernels against the plain path in float64: interpreted on any machine, compiled where there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autonl.nn import kernels
from autonl.nn.light_nonlocal import LightNL

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: no device is visible here")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: it is not installed")

# images, channels, height, width, ratio, stride, memory format; tiles of 16 positions and channels put several bands,
# blocks and ragged ends into maps this small
INTERPRETED = [
    (2, 24, 9, 9, 0.25, 2, "channels_last", 2, True),
    (2, 20, 7, 9, 0.25, 1, "contiguous_format", 1, False),
    (2, 17, 4, 5, 0.125, 2, "channels_last", 1, False),
    (2, 8, 1, 3, 0.25, 3, "contiguous_format", 2, True),
]


def random_block(chs: int, ratio: float, stride: int) -> LightNL:
    block = LightNL(chs, ratio, stride, bn_eps=1e-3, bn_momentum=0.3)
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


def errors(images: int, chs: int, height: int, width: int, ratio: float, stride: int, layout: str, dtype: torch.dtype,
           device: str) -> dict[str, float]:  # fmt: skip
    """Norm-wise errors of outputs, running statistics and all gradients of the kernels against float64."""
    from autonl.nn.kernels import ops

    block = random_block(chs, ratio, stride).to(device)
    exact = LightNL(chs, ratio, stride, bn_eps=1e-3, bn_momentum=0.3).to(device).double()
    exact.load_state_dict(block.state_dict())
    exact.fused = False
    x = torch.randn(images, chs, height, width, device=device).to(dtype, memory_format=getattr(torch, layout))
    arguments = (block.depthwise.weight, block.bn, block.compact_chs, stride)
    with torch.no_grad():
        found = {"inference": error(ops.inference(x, *arguments), exact.eval()(x.double()))}
    x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    z, exact_z = ops.training(x, *arguments), exact.train()(exact_x)
    dz = torch.randn_like(z)
    z.backward(dz)
    exact_z.backward(dz.double())
    found |= {"z": error(z, exact_z), "dx": error(x.grad, exact_x.grad)}
    for (name, parameter), expected in zip(block.named_parameters(), exact.parameters(), strict=True):
        found[name] = error(parameter.grad, expected.grad)
    for (name, buffer), expected in zip(block.named_buffers(), exact.buffers(), strict=True):
        found[name] = error(buffer, expected.double())
    return found


def interpret() -> None:
    """In a process of its own: TRITON_INTERPRET is read when Triton is imported."""
    from autonl.nn.kernels import launch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = []
    for *shape, bands, gram_first in INTERPRETED:
        tile = launch.Tile(16, 16, 4, bands=bands, gram_first=gram_first)
        launch.forward_tile = launch.depthwise_backward_tile = launch.input_backward_tile = lambda *_, tile=tile: tile
        found.append(errors(*shape, torch.float32, "cpu"))
    print(json.dumps(found))


@NEEDS_TRITON
def test_interpreted_kernels_agree_with_float64() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    for case, found in zip(INTERPRETED, json.loads(process.stdout.splitlines()[-1]), strict=True):
        assert max(found.values()) < 1e-5, (case, found)


@pytest.mark.parametrize("training", [False, True])
def test_cpu_takes_the_plain_path(training: bool) -> None:
    block = random_block(8, 0.25, 2).train(training)
    assert not kernels.supported(torch.randn(2, 8, 5, 5), block.depthwise, block.bn, block.compact_chs)


@NEEDS_TRITON
@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_traces_one_operator_without_a_break(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that claim to be on a GPU: nothing runs."""
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes if "autonl" in str(node.target)])
        return graph

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.set_grad_enabled(training):
        block = LightNL(24, 0.25, 2).train(training)
        block.fused = True
        x = torch.empty(4, 24, 14, 14).to(memory_format=torch.channels_last)
        z = torch.compile(block, fullgraph=True, backend=backend)(x)
    assert graphs == [[f"autonl.lightnl_{'training' if training else 'inference'}.default"]]
    assert (z.shape, z.stride()) == (x.shape, x.stride())


@NEEDS_GPU
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 5e-3)])
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
    ],
)
def test_compiled_kernels_agree_with_float64(case: tuple, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    found = errors(*case, dtype, "cuda")
    assert max(found.values()) < bound, found


@NEEDS_GPU
def test_large_values_do_not_overflow_in_float16() -> None:
    block = random_block(24, 0.25, 2).cuda().train()
    x = (30 * torch.randn(2, 24, 112, 112, device="cuda")).half().requires_grad_()
    block(x).float().square().mean().backward()
    assert all(t.isfinite().all() for t in (x.grad, *(p.grad for p in block.parameters())))


@NEEDS_GPU
@pytest.mark.parametrize("training", [False, True])
def test_torch_compile_sees_the_kernels(training: bool) -> None:
    torch.manual_seed(0)
    block = random_block(24, 0.25, 2).cuda().train(training)
    eager = random_block(24, 0.25, 2).cuda().train(training)
    eager.load_state_dict(block.state_dict())
    x = torch.randn(4, 24, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    results = []
    for function, module in ((torch.compile(block, fullgraph=True), block), (eager, eager)):
        leaf = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            z = function(leaf)
        if training:
            z.square().sum().backward()
        results.append(
            [z, *module.buffers(), *([leaf.grad, *(p.grad for p in module.parameters())] if training else [])]
        )
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

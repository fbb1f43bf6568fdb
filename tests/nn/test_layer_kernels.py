"""Depthwise convolutions and BN with its activation by kernels, against float64: interpreted, or on a GPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv2d

from autonl import create_model
from autonl.nn import kernels
from tests.conftest import PROVE
from tests.nn.test_kernels import BOUNDS, NEEDS_GPU, NEEDS_TRITON, compile_only, error, hopper, interpreted, recording

__all__ = ["hopper"]  # a fixture

# images, channels, height, width, kernel, stride, dtype: ragged ends of rows, columns and pieces of a row
DEPTHWISE = [
    (1, 24, 9, 7, 3, 1, "float32"),
    (2, 16, 5, 4, 5, 2, "float32"),
    (2, 16, 8, 7, 3, 2, "float32"),
    (1, 8, 7, 5, 5, 1, "float16"),
    (1, 8, 1, 1, 5, 2, "float32"),
    (2, 8, 2, 3, 3, 2, "float16"),
    (2, 8, 6, 16, 3, 1, "float32"),
]
# images, channels, height, width, activation, dtype
NORM_ACT = [
    (2, 24, 5, 7, "silu", "float32"),
    (3, 16, 4, 4, "relu6", "float32"),
    (1, 64, 3, 3, "identity", "float32"),
    (2, 128, 3, 2, "relu", "float32"),
    (2, 40, 9, 9, "silu", "float16"),
    (1, 136, 3, 5, "silu", "float32"),
    (2, 8, 9, 9, "identity", "float32"),
]
LAYERS = {"silu": nn.SiLU, "relu": nn.ReLU, "relu6": nn.ReLU6, "identity": nn.Identity}


def channels_last(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)


def depthwise_errors(
    images: int, chs: int, height: int, width: int, kernel: int, stride: int, dtype: torch.dtype, device: str
) -> dict[str, float]:
    from autonl.nn.kernels.depthwise_passes import depthwise

    x = channels_last(images, chs, height, width, dtype=dtype, device=device).requires_grad_()
    weight = torch.randn(chs, 1, kernel, kernel, device=device, requires_grad=True)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    y = depthwise(x, weight, stride)
    exact_y = conv2d(exact_x, exact_weight, stride=stride, padding=kernel // 2, groups=chs)
    dy = channels_last(*y.shape, dtype=dtype, device=device)
    y.backward(dy)
    exact_y.backward(dy.double())
    return {"y": error(y, exact_y), "dx": error(x.grad, exact_x.grad), "dw": error(weight.grad, exact_weight.grad)}


def random_norm(chs: int, act: str, device: str) -> BatchNormAct2d:
    bn = BatchNormAct2d(chs, eps=1e-3, momentum=0.3, act_layer=LAYERS[act], apply_act=act != "identity").to(device)
    for value in (bn.weight, bn.bias, bn.running_mean):
        nn.init.normal_(value)
    return bn


def norm_act_errors(
    images: int, chs: int, height: int, width: int, act: str, dtype: torch.dtype, device: str, first: float = 0.0
) -> dict[str, float]:
    """first: what the first position of the first image is off by, in standard deviations."""
    from autonl.nn.kernels.norm_act_passes import norm_act

    bn = random_norm(chs, act, device)
    exact = copy.deepcopy(bn).double()
    x = channels_last(images, chs, height, width, dtype=torch.float32, device=device)
    x[0, :, 0, 0] += first
    x = (3 * x + 5 * torch.randn(chs, 1, 1, device=device)).to(dtype, memory_format=torch.channels_last)
    exact_x = x.requires_grad_().detach().double().requires_grad_()
    y, exact_y = norm_act(x, bn, act), exact(exact_x)
    dy = channels_last(*y.shape, dtype=dtype, device=device)
    y.backward(dy)
    exact_y.backward(dy.double())
    found = {"y": error(y, exact_y), "dx": error(x.grad, exact_x.grad)}
    for (name, value), expected in zip(bn.named_parameters(), exact.parameters(), strict=True):
        found[name] = error(value.grad, expected.grad)
    for (name, value), expected in zip(bn.named_buffers(), exact.buffers(), strict=True):
        found[name] = error(value, expected.double())
    return found


def interpret() -> None:
    """In a process of its own: TRITON_INTERPRET is read when Triton is imported."""
    from autonl.nn.kernels import depthwise_passes, norm_act_passes

    torch.manual_seed(0)
    torch.set_num_threads(1)
    norm_act_passes.PROGRAMS = 6  # several tiles a program in maps this small, and several steps to merge theirs
    norm_act_passes.MERGING = replace(norm_act_passes.MERGING, positions=16)
    choose = depthwise_passes.choice_for
    found: list[dict[str, float]] = []
    for number, (*shape, dtype) in enumerate(DEPTHWISE):
        small = {"warps": 1, "pairs": 2, "columns": 16, "channels": 16, "programs": 1 + number % 3}
        depthwise_passes.choice_for = lambda problem, small=small: choose(problem)._replace(**small)
        found.append(depthwise_errors(*shape, getattr(torch, dtype), "cpu"))
    found += [norm_act_errors(*shape, getattr(torch, dtype), "cpu") for (*shape, dtype) in NORM_ACT]
    found.append(norm_act_errors(2, 8, 23, 23, "identity", torch.float32, "cpu", first=1000.0))
    small |= {"rows": 2, "weight_rows": 2, "wide": 1}
    depthwise_passes.choice_for = lambda problem: choose(problem)._replace(**small)
    print(json.dumps(found + module_errors()))


MODULES = [  # mode, autocast, folded, bound: what a network's layers are given
    (True, False, False, 1e-5),
    (True, True, False, 5e-3),
    (True, False, True, 1e-5),
    (False, False, False, 1e-5),
]


def module_errors() -> list[dict[str, float]]:
    """Of a depthwise convolution and BN with its activation that `use_layer_kernels` has changed, as if this was a GPU;
    and how many passes were not made by kernels, whose number is known."""
    from autonl.nn.kernels import depthwise_passes, layers, norm_act_passes, passes

    passes_made: list[object] = []

    def carry_out(plan: object, *rest: object) -> None:
        passes_made.append(plan)
        passes.carry_out(plan, *rest)

    depthwise_passes.carry_out = norm_act_passes.carry_out = carry_out
    layers.can_take = lambda x, dtype: x.is_contiguous(memory_format=torch.channels_last)
    found = []
    for training, autocast, folded, _ in MODULES:
        conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        network = nn.Sequential(conv, random_norm(8, "silu", "cpu")).train(training)
        layers.use_layer_kernels(network)
        if folded:
            conv.bias = nn.Parameter(torch.randn(8), requires_grad=False)  # BN takes it away: its gradient is zero
        exact = copy.deepcopy(network).double()
        for layer, kind in zip(exact, (nn.Conv2d, BatchNormAct2d), strict=True):
            layer.__class__ = kind
        passes_made.clear()
        x = channels_last(2, 8, 3, 4, dtype=torch.float32, device="cpu").requires_grad_()
        exact_x = x.detach().double().requires_grad_()
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.set_autocast_enabled("cuda", autocast)
        y, exact_y = network(x), exact(exact_x)
        torch.set_autocast_enabled("cuda", False)
        dy = channels_last(*y.shape, dtype=y.dtype, device="cpu")
        y.backward(dy)
        exact_y.backward(dy.double())
        result = {"y": error(y, exact_y), "dx": error(x.grad, exact_x.grad)}
        for (name, value), expected in zip(network.named_parameters(), exact.parameters(), strict=True):
            if value.requires_grad:
                result[name] = error(value.grad, expected.grad)
        for (name, value), expected in zip(network.named_buffers(), exact.buffers(), strict=True):
            result[name] = error(value, expected.double())
        result["passes"] = abs(len(passes_made) - 2 * (not folded) - 2 * training)
        result["dtype"] = float(y.dtype != (torch.float16 if autocast else torch.float32))
        found.append(result)
    return found


@NEEDS_TRITON
def test_interpreted_kernels_agree_with_float64() -> None:
    cases: list[tuple] = [*DEPTHWISE, *NORM_ACT, ("far from the mean", "float32")]
    bounded = [(case, BOUNDS[case[-1]]) for case in cases] + [(case, case[-1]) for case in MODULES]
    for (case, bound), found in zip(bounded, interpreted(__file__), strict=True):
        assert max(found.values()) < bound, (case, found)


def test_a_network_keeps_its_weights_and_its_outputs() -> None:
    from autonl.nn.kernels.layers import FusedDepthwise, FusedNormAct, use_layer_kernels

    torch.manual_seed(0)
    network = create_model("digits")
    plain = copy.deepcopy(network)
    use_layer_kernels(network)
    fused = copy.deepcopy(network)
    kinds = [type(layer) for layer in fused.modules()]
    blocks = len([name for name, _ in plain.named_modules() if name.endswith("conv_dw")])
    assert kinds.count(FusedDepthwise) == blocks  # LightNL's own is left to LightNL
    assert kinds.count(FusedNormAct) == sum(isinstance(layer, BatchNormAct2d) for layer in plain.modules())
    assert list(fused.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 3, 32, 32)
    for training in (False, True):
        assert torch.equal(fused.train(training)(x), plain.train(training)(x))


@NEEDS_TRITON
def test_torch_compile_traces_depthwise_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that claim to be on a GPU: nothing runs. BN and activations are left to the compiler."""
    from autonl.nn.kernels import layers

    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(kernels, "has_bfloat16", lambda device: True)
    graphs: list[list[str]] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        network = nn.Sequential(
            nn.Conv2d(16, 16, 5, 2, padding=2, groups=16, bias=False), BatchNormAct2d(16, act_layer=nn.SiLU)
        )
        layers.use_layer_kernels(network)
        x = torch.empty(4, 16, 14, 14).to(memory_format=torch.channels_last)
        backend: Callable = recording(graphs, lambda graph, inputs: graph)
        y = torch.compile(network, fullgraph=True, backend=backend)(x)
    assert graphs == [["autonl.depthwise.default"]]
    assert (y.shape, y.is_contiguous(memory_format=torch.channels_last)) == ((4, 16, 7, 7), True)


@NEEDS_TRITON
@pytest.mark.skipif(not PROVE, reason="compiles some fifty kernels: make prove")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autonl.nn.kernels import depthwise_passes, norm_act_passes, passes

    monkeypatch.setattr(passes, "can_overlap", lambda: True)
    for chs, size, kernel, stride in (
        (24, 57, 3, 1),
        (72, 28, 5, 1),
        (144, 56, 5, 2),
        (120, 15, 3, 2),
        (1152, 7, 5, 1),
    ):
        x = channels_last(2, chs, size, size, dtype=getattr(torch, dtype), device="cpu")
        weight = torch.zeros(chs, 1, kernel, kernel)
        dy = depthwise_passes.forward(x, weight, stride, compile_only)
        depthwise_passes.backward(x, dy, weight, stride, compile_only)
        bn = random_norm(chs, "silu", "cpu")
        running = (bn.running_mean, bn.running_var, bn.num_batches_tracked)
        y, statistics = norm_act_passes.training(x, bn.weight, bn.bias, "silu", 1e-3, running, 0.1, compile_only)
        norm_act_passes.training_backward(y, x, bn.weight, bn.bias, statistics, "silu", 1e-3, compile_only)


@NEEDS_GPU
@pytest.mark.parametrize(("dtype", "bound"), [(getattr(torch, name), bound) for name, bound in BOUNDS.items()])
@pytest.mark.parametrize(
    "case",
    [
        (3, 24, 57, 56, 3, 1),
        (16, 72, 56, 56, 5, 1),
        (8, 144, 56, 55, 5, 2),
        (8, 48, 112, 112, 3, 2),
        (1000, 8, 14, 15, 3, 1),
        (32, 480, 14, 14, 5, 1),
        (32, 1152, 7, 7, 5, 1),
        (1, 8, 3, 2, 5, 2),
        (512, 32, 112, 112, 3, 1),  # grids at their largest
        (512, 48, 112, 112, 5, 2),
    ],
)
def test_compiled_depthwise_agrees_with_float64(case: tuple, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    for _ in range(2):  # the second time without Triton's binder
        found = depthwise_errors(*case, dtype, "cuda")
        assert max(found.values()) < bound, found


@NEEDS_GPU
@pytest.mark.parametrize(("dtype", "bound"), [(getattr(torch, name), bound) for name, bound in BOUNDS.items()])
@pytest.mark.parametrize(
    "case",
    [
        (8, 32, 112, 112, "silu"),
        (16, 72, 56, 57, "silu"),
        (1000, 8, 14, 15, "relu6"),
        (32, 1152, 7, 7, "silu"),
        (32, 320, 7, 7, "identity"),
        (2, 2056, 3, 3, "relu"),
        (512, 48, 112, 112, "silu"),
    ],
)
def test_compiled_norm_act_agrees_with_float64(case: tuple, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        found = norm_act_errors(*case, dtype, "cuda")
        assert max(found.values()) < bound, found


if __name__ == "__main__":
    interpret()

"""Kernels compiled before their first use are those that are used, for a GPU that is not here."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from autonl.nn.kernels import norm_tensors
from autonl.nn.kernels.layers import use_kernels
from autonl.nn.light_nonlocal import LightNL
from tests.nn.test_kernels import NEEDS_TRITON, hopper

__all__ = ["hopper"]  # a fixture


def some_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1, bias=False),
        BatchNormAct2d(40, act_layer=nn.SiLU),
        nn.Conv2d(40, 40, 5, 2, padding=2, groups=40, bias=False),
        LightNL(40, 0.25, 1, energy=True),
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that Triton is asked to compile from now on, whatever it has compiled before."""
    from triton import JITFunction

    from autonl.nn.kernels import backward, depthwise, forward, gathered, gathered_backward, norm_act, passes

    monkeypatch.setattr(passes, "can_overlap", lambda: True)
    for module in (backward, depthwise, forward, gathered, gathered_backward, norm_act):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    names: list[str] = []
    compile_one = JITFunction._do_compile

    def record(kernel: Any, *arguments: Any) -> Any:
        names.append(kernel.fn.__name__)
        return compile_one(kernel, *arguments)

    monkeypatch.setattr(JITFunction, "_do_compile", record)
    return names


def launch_like(planned: Any, *tensors: Tensor | None) -> None:
    """As `passes.run_bound` asks Triton for a kernel, but for the launch."""
    from autonl.nn.kernels.passes import FUSION

    options = planned.constants | planned.options | planned.untraced | FUSION
    planned.kernel.warmup(*tensors, *planned.scalars, grid=planned.grid, **options)


@NEEDS_TRITON
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    # 6 of BN, 5 of the convolution, 7 of LightNL in training, and in 16 bits another in inference
    ("precision", "count"),
    [("bfloat16", 19), ("float32", 18)],
)
def test_a_training_finds_its_kernels_compiled(
    precision: str, count: int, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autonl.nn.kernels import depthwise_passes, launch, norm_act_passes
    from autonl.nn.kernels.ahead import compile_kernels

    network = some_network().to(memory_format=torch.channels_last)
    use_kernels(network)
    before = copy.deepcopy(network.state_dict())
    dtype = getattr(torch, precision)
    monkeypatch.setattr("autonl.nn.kernels.ahead.dtype_of", lambda images: dtype)  # under autocast or not
    compile_kernels(network, torch.zeros(2, 3, 11, 12), threads=2)
    assert len(set(compiled)) == count
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in network.modules())

    compiled.clear()
    _, norm, conv, block = network
    large, small = (
        torch.zeros(2, 40, *size).to(dtype, memory_format=torch.channels_last) for size in ((11, 12), (6, 6))
    )
    y = depthwise_passes.forward(large, conv.weight, 2, launch_like)
    depthwise_passes.backward(large, y, conv.weight, 2, launch_like)
    gamma, beta, *running = norm_tensors(norm)
    known: Any = "silu", norm.eps
    _, statistics = norm_act_passes.training(large, gamma, beta, *known, running, norm.momentum, launch_like)
    norm_act_passes.training_backward(large, large, gamma, beta, statistics, *known, launch_like)
    weight, (gamma, beta, *running) = block.depthwise.weight, norm_tensors(block.bn)
    known = 10, 1, block.bn.eps, 1e-6
    launch.inference(small, weight, (gamma, beta, *running[:2]), *known, launch_like)
    _, saved = launch.training(small, weight, gamma, beta, *known, running, block.bn.momentum, launch_like)
    launch.training_backward(small, saved, *known[1:], launch_like)
    assert compiled == []


@NEEDS_TRITON
def test_nothing_is_compiled_for_networks_without_kernels(compiled: list[str]) -> None:
    from autonl.nn.kernels.ahead import compile_kernels

    compile_kernels(some_network(), torch.zeros(2, 3, 11, 12))
    assert compiled == []

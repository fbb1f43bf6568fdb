"""Kernels compiled before their first use are those that are used, for a GPU that is not here."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from autonl.nn.kernels.layers import use_kernels
from autonl.nn.light_nonlocal import LightNL
from tests.nn.test_kernels import NEEDS_TRITON, hopper

__all__ = ["hopper"]  # a fixture
IMAGES = torch.zeros(2, 3, 11, 12)


def some_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1, bias=False),
        BatchNormAct2d(40, act_layer=nn.SiLU),
        nn.Conv2d(40, 40, 5, 2, padding=2, groups=40, bias=False),
        LightNL(40, 0.25, 1, energy=True),
    )


@pytest.fixture
def network() -> nn.Sequential:
    network = some_network().to(memory_format=torch.channels_last)
    use_kernels(network)
    return network


@pytest.fixture
def compiled(hopper: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that Triton is asked to compile from now on, whatever it has compiled before, for layers
    that take the CPU for a GPU. None is launched."""
    from triton import JITFunction

    from autonl.nn import kernels
    from autonl.nn.kernels import ahead, depthwise_passes, eager, launch, layers, norm_act_passes, passes

    def can_take(x: Tensor, dtype: torch.dtype) -> bool:
        return x.is_cpu and x.is_contiguous(memory_format=torch.channels_last)

    def carry_out(plan: passes.Plan, run: passes.Run, tensors: Any) -> None:
        passes.carry_out(plan, run if run is ahead.compile_ahead else passes.run_bound, tensors)

    monkeypatch.setattr(passes, "can_overlap", lambda: True)
    monkeypatch.setattr(kernels, "can_run", lambda x, dtype: x.is_cpu)
    monkeypatch.setattr(layers, "can_take", can_take)
    monkeypatch.setattr(eager, "still_supported", lambda *_: True)
    monkeypatch.setattr(eager, "KNOWN", {})
    for module in (depthwise_passes, eager, launch, norm_act_passes):
        monkeypatch.setattr(module, "carry_out", carry_out)
    for kernel in list_of_kernels():
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    names: list[str] = []
    compile_one, run_one = JITFunction._do_compile, JITFunction.run

    def record(kernel: Any, *arguments: Any) -> Any:
        names.append(kernel.fn.__name__)
        return compile_one(kernel, *arguments)

    def run(kernel: Any, *arguments: Any, warmup: bool, **named: Any) -> Any:
        return run_one(kernel, *arguments, warmup=True, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", record)
    monkeypatch.setattr(JITFunction, "run", run)
    return names


@pytest.fixture
def autocast() -> Iterator[Any]:
    """As on a GPU."""
    before = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")

    def to(dtype: torch.dtype) -> None:
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", dtype != torch.float32)

    yield to
    torch.set_autocast_dtype("cuda", before[0])
    torch.set_autocast_enabled("cuda", before[1])


def train_and_evaluate(
    network: nn.Sequential, dtype: torch.dtype, layout: torch.memory_format = torch.channels_last
) -> None:
    """Layer by layer, over maps in memory."""
    for layer, size in zip(network[1:], ((11, 12), (11, 12), (6, 6)), strict=True):
        x = torch.zeros(2, 40, *size).to(dtype, memory_format=layout).requires_grad_()
        y = layer.train()(x)
        y.backward(torch.zeros_like(y))
        with torch.no_grad():
            layer.eval()(x)


@NEEDS_TRITON
@pytest.mark.parametrize(
    # 6 of BN, 5 of the convolution, 7 of LightNL in training, and in 16 bits another in inference
    ("dtype", "count"),
    [(torch.bfloat16, 19), (torch.float32, 18)],
)
def test_a_training_finds_its_kernels_compiled(
    dtype: torch.dtype, count: int, network: nn.Sequential, compiled: list[str], autocast: Any
) -> None:
    from autonl.nn.kernels.ahead import compile_kernels

    met: list[torch.device] = []
    network.register_forward_hook(lambda _, inputs, output: met.append(output.device))
    before = copy.deepcopy(network.state_dict())
    autocast(dtype)
    compile_kernels(network, IMAGES, threads=2)
    assert len(set(compiled)) == count
    assert met == []
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in network.modules())

    compiled.clear()
    train_and_evaluate(network, dtype)
    assert compiled == []


@NEEDS_TRITON
def test_kernels_are_compiled_side_by_side(
    network: nn.Sequential, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 of them: each waits for another to be under way."""
    import triton.compiler

    from autonl.nn.kernels.ahead import compile_kernels

    both, compile_one = threading.Barrier(2), triton.compiler.compile

    def meet(*arguments: Any, **named: Any) -> Any:
        both.wait(timeout=60)
        return compile_one(*arguments, **named)

    monkeypatch.setattr(triton.compiler, "compile", meet)
    compile_kernels(network, IMAGES, threads=2)
    assert not both.broken


@NEEDS_TRITON
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_maps_have_the_layout_of_images_or_weights(layout: torch.memory_format, compiled: list[str]) -> None:
    from autonl.nn.kernels.ahead import compile_kernels

    network = some_network()
    network[3].fused = True
    compile_kernels(network, IMAGES.contiguous(memory_format=layout), threads=2)
    assert len(set(compiled)) == 7
    compiled.clear()
    train_and_evaluate(network, torch.float32, torch.contiguous_format)
    assert (compiled == []) == (layout == torch.contiguous_format)


@NEEDS_TRITON
def test_a_kernel_that_does_not_compile_fails_where_it_is_used(
    network: nn.Sequential, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.compiler

    from autonl.nn.kernels.ahead import compile_kernels

    compile_one = triton.compiler.compile

    def refuse(source: Any, *arguments: Any, **named: Any) -> Any:
        if source.fn.__name__ == "moments":
            raise RuntimeError("no moments")
        return compile_one(source, *arguments, **named)

    monkeypatch.setattr(triton.compiler, "compile", refuse)
    compile_kernels(network, IMAGES, threads=2)
    compiled.clear()
    with pytest.raises(RuntimeError, match="no moments"):
        train_and_evaluate(network, torch.float32)
    assert compiled == ["moments"]


@NEEDS_TRITON
def test_ctrl_c_ends_the_wait_and_leaves_triton_as_it_was(
    network: nn.Sequential, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.compiler

    from autonl.nn.kernels import ahead

    started: list[str] = []
    cancelled = threading.Event()

    def slow(source: Any, *_: Any, **__: Any) -> Any:
        started.append(source.fn.__name__)
        assert cancelled.wait(timeout=60)
        raise RuntimeError("of a kernel")

    class Interrupted(ahead.ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            if not cancel_futures:
                raise KeyboardInterrupt
            super().shutdown(wait=False, cancel_futures=True)
            cancelled.set()
            super().shutdown()

    with monkeypatch.context() as patch:
        patch.setattr(triton.compiler, "compile", slow)
        patch.setattr(ahead, "ThreadPoolExecutor", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            ahead.compile_kernels(network, IMAGES, threads=1)
        assert len(started) <= 1  # all others were never begun
        for kernel in list_of_kernels():
            kernel.device_caches.clear()  # they hold on to the slow compiler
    ahead.compile_kernels(network, IMAGES, threads=2)
    compiled.clear()
    train_and_evaluate(network, torch.float32)
    assert compiled == []


def list_of_kernels() -> list[Any]:
    from triton import JITFunction

    from autonl.nn.kernels import backward, depthwise, forward, gathered, gathered_backward, norm_act

    modules = (backward, depthwise, forward, gathered, gathered_backward, norm_act)
    return [kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, JITFunction)]


@NEEDS_TRITON
def test_nothing_is_compiled_for_networks_without_kernels(compiled: list[str]) -> None:
    from autonl.nn.kernels.ahead import compile_kernels

    compile_kernels(some_network(), IMAGES)
    assert compiled == []

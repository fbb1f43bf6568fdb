"""LightNL in eager mode from its second time on: kernels that are not here are started from addresses. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autonl.nn import kernels
from autonl.nn.light_nonlocal import LightNL
from tests.nn.test_kernel_launches import Compiled
from tests.nn.test_kernels import NEEDS_TRITON, random_block

pytestmark = NEEDS_TRITON


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As if this was a GPU, with kernels that do nothing. A list that grows when it is asked whether they can run."""
    from triton.runtime import driver

    from autonl.nn.kernels import eager, launch, passes

    found: list[str] = []
    monkeypatch.setattr(kernels, "can_run", lambda x, dtype: not found.append("supported"))
    monkeypatch.setattr(passes, "run_bound", lambda planned, *tensors: Compiled())
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # where a CPU's tensors are
    plans = (launch.inference_plan, launch.training_plan, launch.backward_plan)
    for plan in plans:
        plan.cache_clear()
    eager.KNOWN.clear()
    yield found
    for plan in plans:
        plan.cache_clear()
    eager.KNOWN.clear()


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype, memory_format=torch.channels_last)


def fused(chs: int = 8, training: bool = True) -> LightNL:
    return random_block(chs, 0.25, 1).train(training)


def run(block: LightNL, x: Tensor) -> Tensor | None:
    """As the block itself does it with a map on a GPU."""
    from autonl.nn.kernels import eager

    return eager.lightnl(x, block.depthwise, block.bn, (block.compact_chs, block.stride, block.energy_eps))


def started(plan: Any) -> list[dict[str, int]]:
    """The addresses that a plan's kernels were started with last, by the names of its tensors."""
    return [dict(zip(launch.tensors, launch.compiled.direct[-1][9:], strict=False)) for launch in plan.launches]


def test_forward_and_backward_pass_share_what_is_kept(asked: list[str]) -> None:
    from autonl.nn.kernels import eager

    block, x = fused(), channels_last(2, 8, 5, 5)
    for _ in range(2):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        z = run(block, leaf)
        dz = torch.randn_like(z)
        gradients = torch.autograd.grad(z, (leaf, *block.parameters()), dz)
    assert asked == ["supported"]  # once
    (known,) = eager.KNOWN.values()
    forward, merge, normalise = started(known.plan)
    assert (normalise["x"], normalise["z"]) == (leaf.data_ptr(), z.data_ptr())
    assert normalise["out"] == forward["out"]  # u
    assert merge["running_mean"] == block.bn.running_mean.data_ptr()
    assert merge["running_variance"] == block.bn.running_var.data_ptr()
    assert merge["batches_tracked"] == block.bn.num_batches_tracked.data_ptr()
    sums, _, depthwise, inputs = started(
        eager.launch.backward_plan(known.problem, None, None, (-1, *[torch.float32] * 4))
    )
    assert (sums["dz"], sums["u"]) == (dz.data_ptr(), forward["out"])
    assert (sums["statistics"], depthwise["gram"]) == (normalise["statistics"], forward["gram"])
    assert inputs["dx"] == gradients[0].data_ptr()
    assert inputs["d_weight"] == gradients[1].data_ptr()
    kept = sorted([forward["out"], forward["gram"], normalise["statistics"]])
    assert kept == [forward["out"], forward["gram"], normalise["statistics"]]
    assert forward["gram"] - forward["out"] >= x.nbytes
    assert normalise["statistics"] - forward["gram"] >= 4 * 2 * 2 * 8
    assert all(address % 16 == 0 for address in kept)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_what_is_kept_as_tensors(asked: list[str], layout: torch.memory_format) -> None:
    """By hand: u, G and the statistics one behind the other, each from a multiple of 256 bytes on."""
    from autonl.nn.kernels import eager

    block, x = fused(), torch.randn(2, 8, 3, 5).half().contiguous(memory_format=layout)
    run(block, x)
    (known,) = eager.KNOWN.values()
    assert known.size == 512 + 256 + 256  # 480, 128 and 64 bytes
    kept = torch.zeros(known.size, dtype=torch.uint8)
    u, gram, statistics = known.tensors_in(kept)
    assert (u.dtype, u.shape, u.stride()) == (x.dtype, x.shape, x.stride())
    assert (gram.dtype, gram.shape) == (torch.float32, (2, 2, 8))
    assert (statistics.dtype, statistics.shape) == (torch.float32, (2, 8))
    places = [tensor.data_ptr() - kept.data_ptr() for tensor in (u, gram, statistics)]
    assert places == [0, 512, 768] == [0, known.gram, known.statistics]


def changed(change: Callable[[LightNL], object]) -> Callable[[LightNL, Tensor], Tensor]:
    def apply(block: LightNL, x: Tensor) -> Tensor:
        change(block)
        return x

    return apply


CHANGES: dict[str, Callable[[LightNL, Tensor], Tensor]] = {
    "a smaller map": lambda block, x: channels_last(2, 8, 5, 4),
    "fewer images": lambda block, x: x[:1],
    "another layout": lambda block, x: x.contiguous(),
    "another dtype": lambda block, x: x.half(),
    "weights of another dtype": changed(lambda block: block.depthwise.half()),
    "a BN of another dtype": changed(lambda block: block.bn.half()),
    "evaluation": changed(lambda block: block.eval()),
    "another epsilon": changed(lambda block: setattr(block.bn, "eps", 0.5)),
    "another momentum": changed(lambda block: setattr(block.bn, "momentum", 0.5)),
    "another stride": changed(lambda block: setattr(block, "stride", 2)),
    "by energy": changed(lambda block: setattr(block, "energy", True)),
    "statistics that are not tracked": changed(lambda block: setattr(block.bn, "track_running_stats", False)),
    "another kind of BN": changed(lambda block: setattr(block.bn, "__class__", type("Other", (nn.BatchNorm2d,), {}))),
    "no running mean": changed(lambda block: setattr(block.bn, "running_mean", None)),
    "gaps in the weights": changed(
        lambda block: setattr(block.depthwise, "weight", nn.Parameter(torch.randn(8, 1, 3, 6)[..., ::2]))
    ),
    "gaps in gamma": changed(lambda block: setattr(block.bn, "weight", nn.Parameter(torch.randn(16)[::2]))),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_what_has_changed_is_asked_again(asked: list[str], change: str | None) -> None:
    block, x = fused(), channels_last(2, 8, 5, 5)
    with torch.no_grad():
        run(block, x)
        asked.clear()
        x = CHANGES[change](block, x) if change else x
        run(block, x)
    assert bool(asked) == bool(change)


def test_weights_at_another_place_are_read_there(asked: list[str]) -> None:
    """As after an optimiser's step that is not in place, or loading with assign=True."""
    from autonl.nn.kernels import eager

    block, x = fused(training=False), channels_last(2, 8, 5, 5)
    with torch.no_grad():
        run(block, x)
        block.depthwise.weight = nn.Parameter(block.depthwise.weight.clone())
        run(block, x)
    (known,) = eager.KNOWN.values()
    (found,) = started(known.plan)
    assert found["weight"] == block.depthwise.weight.data_ptr()
    assert asked == ["supported"]


def test_the_mode_is_looked_at_each_time(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = fused(training=False), channels_last(2, 8, 5, 5)
    with torch.no_grad():
        run(block, x)
        asked.clear()
        run(block, x)
        assert asked == []
        with torch.enable_grad():
            run(block, x)
            assert asked == ["supported"]  # and refused: the plain path has a gradient here
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        run(block, x)
        assert asked == ["supported"] * 2


def test_blocks_of_a_kind_share_what_is_known(asked: list[str]) -> None:
    from autonl.nn.kernels import eager

    x = channels_last(2, 8, 5, 5)
    for block in (fused(), fused(), fused()):
        run(block, x)
    assert (len(eager.KNOWN), asked) == (1, ["supported"])


def test_what_is_known_is_bounded(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from autonl.nn.kernels import eager

    monkeypatch.setattr(eager, "PLANS", 3)
    block = fused()
    for width in range(2, 10):
        run(block, channels_last(2, 8, 5, width))
        assert 1 <= len(eager.KNOWN) <= 3

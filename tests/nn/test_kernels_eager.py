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

    from autonl.nn.kernels import passes
    from benchmarks.settle import forget_plans

    found: list[str] = []
    monkeypatch.setattr(kernels, "can_run", lambda x, dtype: not found.append("supported"))
    monkeypatch.setattr(passes, "run_bound", lambda planned, *tensors: Compiled())
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # where a CPU's tensors are
    forget_plans()
    yield found
    forget_plans()


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype, memory_format=torch.channels_last)


def fused(chs: int = 8, training: bool = True) -> LightNL:
    return random_block(chs, 0.25, 1).train(training)


def run(block: LightNL, x: Tensor) -> Tensor | None:
    """As the block itself does it with a map on a GPU."""
    from autonl.nn.kernels import eager

    return eager.lightnl(x, block.depthwise, block.bn, (block.compact_chs, block.stride, block.energy_eps))


def addresses_of(plan: Any, count: int) -> dict[str, int]:
    """What a plan's launches were started with last, by the names of its tensors: one name has one address in all."""
    assert len(plan.launches) == count
    pairs = {pair for one in plan.launches for pair in zip(one.tensors, one.compiled.direct[-1][9:], strict=False)}
    found = dict(pairs)
    assert len(found) == len(pairs - {("-", None)}) + ("-" in found)
    return found


def places(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_kernels_get_the_addresses_of_what_they_read_and_write(asked: list[str]) -> None:
    from autonl.nn.kernels import eager

    block, x = fused(), channels_last(2, 8, 5, 5)
    for _ in range(2):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        z = run(block, leaf)
        dz = torch.randn_like(z)
        dx, d_weight, d_gamma, d_beta = torch.autograd.grad(z, (leaf, *block.parameters()), dz)
    assert asked == ["supported"]  # once
    (known,) = eager.KNOWN.values()
    ours = {"x": leaf, "weight": block.depthwise.weight, "gamma": block.bn.weight}
    forward = addresses_of(known.plan, 3)
    theirs = {"z": z, "beta": block.bn.bias, "batches_tracked": block.bn.num_batches_tracked}
    theirs |= {"running_mean": block.bn.running_mean, "running_variance": block.bn.running_var}
    assert forward.items() >= places(ours | theirs).items()
    kinds = (-1, *[torch.float32] * 4)
    backward = addresses_of(eager.launch.backward_plan(known.problem, None, None, kinds), 4)
    theirs = {"dz": dz, "dx": dx, "d_weight": d_weight, "d_gamma": d_gamma, "d_beta": d_beta}
    assert backward.items() >= places(ours | theirs).items()
    u, gram, statistics = kept = [forward[name] for name in ("out", "gram", "statistics")]
    assert kept == [backward[name] for name in ("u", "gram", "statistics")]
    assert gram - u >= x.nbytes
    assert statistics - gram >= 4 * 2 * 2 * 8
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
    assert places == [0, 512, 768] == [0, known.gram_offset, known.statistics_offset]
    elsewhere = torch.zeros(known.size + 1, dtype=torch.uint8)[1:]  # as a hook of saved tensors may give it back
    assert [tensor.shape for tensor in known.tensors_in(elsewhere)] == [x.shape, (2, 2, 8), (2, 8)]


def changed(change: Callable[[LightNL], object]) -> Callable[[LightNL, Tensor], Tensor]:
    def apply(block: LightNL, x: Tensor) -> Tensor:
        change(block)
        return x

    return apply


def with_tensor(name: str, tensor: Tensor, parameter: bool = False) -> Callable[[LightNL, Tensor], Tensor]:
    """A BN's."""
    return changed(lambda block: setattr(block.bn, name, nn.Parameter(tensor) if parameter else tensor))


# and whether the kernels can do it all the same
CHANGES: dict[str, tuple[Callable[[LightNL, Tensor], Tensor], bool]] = {
    "a smaller map": (lambda block, x: channels_last(2, 8, 5, 4), True),
    "fewer images": (lambda block, x: x[:1], True),
    "another layout": (lambda block, x: x.contiguous(), True),
    "another dtype": (lambda block, x: x.half(), True),
    "weights of another dtype": (changed(lambda block: block.depthwise.half()), True),
    "gamma of another dtype": (with_tensor("weight", torch.ones(8).half(), parameter=True), True),
    "beta of another dtype": (with_tensor("bias", torch.ones(8).half(), parameter=True), True),
    "a mean of another dtype": (with_tensor("running_mean", torch.zeros(8).half()), True),
    "a variance of another dtype": (with_tensor("running_var", torch.ones(8).half()), True),
    "a count of another dtype": (with_tensor("num_batches_tracked", torch.tensor(0, dtype=torch.int32)), True),
    "evaluation": (changed(lambda block: block.eval()), True),
    "another epsilon": (changed(lambda block: setattr(block.bn, "eps", 0.5)), True),
    "another momentum": (changed(lambda block: setattr(block.bn, "momentum", 0.5)), True),
    "another stride": (changed(lambda block: setattr(block, "stride", 2)), True),
    "by energy": (changed(lambda block: setattr(block, "energy", True)), True),
    "a cumulative average": (changed(lambda block: setattr(block.bn, "momentum", None)), False),
    "statistics that are not tracked": (changed(lambda block: setattr(block.bn, "track_running_stats", False)), False),
    "not affine": (changed(lambda block: setattr(block.bn, "affine", False)), False),
    "of other channels": (changed(lambda block: setattr(block.bn, "num_features", 9)), False),
    "another kind of BN": (changed(lambda block: setattr(block.bn, "__class__", Other)), False),
    "what is no BN": (changed(lambda block: setattr(block, "bn", nn.Identity())), False),
    "no running mean": (changed(lambda block: setattr(block.bn, "running_mean", None)), False),
    "gaps in the weights": (
        changed(lambda block: setattr(block.depthwise, "weight", nn.Parameter(torch.randn(8, 1, 3, 6)[..., ::2]))),
        False,
    ),
    "gaps in gamma": (with_tensor("weight", torch.randn(16)[::2], parameter=True), False),
    "gaps in beta": (with_tensor("bias", torch.randn(16)[::2], parameter=True), False),
    "gaps in the mean": (with_tensor("running_mean", torch.zeros(16)[::2]), False),
    "a variance elsewhere": (with_tensor("running_var", torch.ones(8, device="meta")), False),
}


class Other(nn.BatchNorm2d):
    """One that computes something else, for all that is known."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_asked_again(asked: list[str], change: str) -> None:
    block, x = fused(), channels_last(2, 8, 5, 5)
    apply, taken = CHANGES[change]
    with torch.no_grad():
        assert run(block, x) is not None
        assert run(block, x) is not None
        assert asked == ["supported"]
        x = apply(block, x)
        assert (run(block, x) is not None) == taken
    assert asked == ["supported"] * 2


def test_weights_at_another_place_are_read_there(asked: list[str]) -> None:
    """As after an optimiser's step that is not in place, or loading with assign=True."""
    from autonl.nn.kernels import eager

    block, x = fused(training=False), channels_last(2, 8, 5, 5)
    with torch.no_grad():
        run(block, x)
        block.depthwise.weight = nn.Parameter(block.depthwise.weight.clone())
        run(block, x)
    (known,) = eager.KNOWN.values()
    assert addresses_of(known.plan, 1)["weight"] == block.depthwise.weight.data_ptr()
    assert asked == ["supported"]


@pytest.mark.parametrize("mode", ["gradients", "another device", "functorch", "tracing", "exporting"])
def test_the_mode_is_looked_at_each_time(asked: list[str], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation with gradients on takes the plain path, which has them; the others are for `can_run` to refuse."""
    block, x = fused(training=False), channels_last(2, 8, 5, 5)
    with torch.no_grad():
        run(block, x)
        asked.clear()
        run(block, x)
        assert asked == []
        if mode == "gradients":
            with torch.enable_grad():
                assert run(block, x) is None
        elif mode == "functorch":
            torch.func.vmap(lambda value: (run(block, x), value)[1])(torch.ones(2))
        else:
            place, name, value = {
                "another device": (torch.cuda, "current_device", 1),
                "tracing": (torch.jit, "is_tracing", True),
                "exporting": (torch.compiler, "is_exporting", True),
            }[mode]
            monkeypatch.setattr(place, name, lambda: value)
            run(block, x)
    assert asked == ["supported"]


def test_what_cannot_be_started_from_addresses_goes_through_the_binder(asked: list[str]) -> None:
    """Maps and slopes at odd addresses; a launch hook of Triton's, which wants to see every launch."""
    from triton import knobs

    from autonl.nn.kernels import eager

    def hook(metadata: object) -> None: ...

    block, x = fused(), channels_last(2, 8, 5, 5)
    odd = torch.randn(401)[1:].view(2, 5, 5, 8).permute(0, 3, 1, 2)
    for _ in range(2):
        run(block, x.requires_grad_()).backward(torch.randn_like(x))
    (known,) = eager.KNOWN.values()
    backward = eager.launch.backward_plan(known.problem, None, None, (-1, *[torch.float32] * 4))

    def counts() -> list[int]:
        return [len(plan.launches[0].compiled.direct) for plan in (known.plan, backward)]

    before = counts()
    run(block, odd)
    assert counts() == before
    run(block, x).backward(odd)
    assert counts() == [before[0] + 1, before[1]]
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(block, x).backward(torch.randn_like(x))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert counts() == [before[0] + 1, before[1]]


def test_there_is_no_second_derivative(asked: list[str]) -> None:
    block, x = fused(), channels_last(2, 8, 5, 5).requires_grad_()
    (dx,) = torch.autograd.grad(run(block, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


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

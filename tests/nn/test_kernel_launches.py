"""How the Triton kernels are started: with the right arguments, with and without Triton's binder. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.nn.test_kernels import NEEDS_TRITON, random_block


@NEEDS_TRITON
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "division",
    [{}, {"bands": 2, "gram_parts": 2}, {"spatial": True}, {"gathered": True}, {"gathered": True, "gram_parts": 1}],
)
def test_a_launch_without_the_binder_hands_over_the_same_arguments(division: dict, training: bool) -> None:
    """Nothing runs: every launch is only looked at."""
    from autonl.nn.kernels import launch

    launches: list[tuple[launch.Launch, tuple]] = []
    block = random_block(24, 0.25, 2)
    x = torch.randn(2, 24, 7, 7)
    tile = launch.Tile(64, 16, 4, **division)
    weight, gamma, beta, *running = (block.depthwise.weight, block.bn.weight, block.bn.bias, *block.bn.buffers())

    def run(planned: launch.Launch, *tensors: Tensor | None) -> None:
        launches.append((planned, tensors))

    if training:
        _, saved = launch.training(x, weight, gamma, beta, 6, 2, 1e-5, 0.0, tuple(running), 0.1, run, tile)
        launch.training_backward(x, saved, 2, 1e-5, 0.0, run, tile)
    else:
        launch.inference(x, weight, (gamma, beta, *running[:2]), 6, 2, 1e-5, 0.0, run, tile)
    assert len(launches) == 1 + ("gram_parts" in division) + 6 * training
    for planned, tensors in launches:
        names = planned.kernel.arg_names
        bound = dict(zip(names, (*tensors, *planned.scalars), strict=False)) | planned.constants
        assert len(bound) == len(tensors) + len(planned.scalars) + len(planned.constants)
        assert [id(bound[name]) for name in names] == [id(value) for value in (*tensors, *planned.values)]


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("images", "size", "training", "bands", "gram_parts"),
    [
        (1, 28, False, 1, 0),
        (1, 32, False, 1, 0),
        (1, 33, False, 1, 1),
        (1, 56, False, 3, 1),
        (1, 28, True, 1, 0),
        (383, 56, True, 4, 1),
        (384, 56, True, 1, 0),
        (384, 64, True, 1, 0),
        (384, 65, True, 6, 1),
    ],
)
def test_where_a_program_makes_an_image(images: int, size: int, training: bool, bands: int, gram_parts: int) -> None:
    """Bands that each make G for themselves would make it more than once."""
    from autonl.nn.kernels.tiles import forward_tile

    tile = forward_tile(images, 24, 6, size**2, torch.bfloat16, training)
    assert tile.gathered
    assert (tile.bands, tile.gram_parts) == (bands, gram_parts)


def passes_of(run: Callable, dtype: torch.dtype, parameters: torch.dtype) -> dict[str, Callable]:
    """Every pass over the same small map, of that dtype."""
    from autonl.nn.kernels import depthwise_passes, launch, norm_act_passes

    x = torch.zeros(2, 8, 6, 6, dtype=dtype).to(memory_format=torch.channels_last)
    weight, (gamma, beta, mean, variance) = torch.zeros(8, 1, 3, 3, dtype=parameters), torch.zeros(4, 8).to(parameters)
    running, statistics = (mean, variance, torch.tensor(0)), torch.zeros(2, 8)
    saved = launch.Saved(x, x, torch.zeros(2, 2, 8), statistics, weight, gamma)
    known = (2, 1, 1e-5, 0.0)
    return {
        "inference": lambda: launch.inference(x, weight, (gamma, beta, mean, variance), *known, run),
        "training": lambda: launch.training(x, weight, gamma, beta, *known, running, 0.1, run),
        "training_backward": lambda: launch.training_backward(x, saved, *known[1:], run),
        "depthwise": lambda: depthwise_passes.forward(x, weight, 1, run),
        "depthwise_backward": lambda: depthwise_passes.backward(x, x, weight, 1, run),
        "norm_act": lambda: norm_act_passes.training(x, gamma, beta, "relu", 1.0, running, 0.1, run),
        "norm_act_backward": lambda: norm_act_passes.training_backward(x, x, gamma, beta, statistics, "relu", 1.0, run),
    }


@NEEDS_TRITON
def test_kernels_are_compiled_anew_for_other_dtypes_and_kept_for_the_same() -> None:
    """A launch keeps what was compiled at its first run, whose dtypes must be those of all others."""
    seen: list[object] = []

    def run(planned: object, *tensors: Tensor | None) -> None:
        seen.append(planned)

    def launches(name: str, dtype: torch.dtype, parameters: torch.dtype) -> set[object]:
        seen.clear()
        passes_of(run, dtype, parameters)[name]()
        return set(seen)

    for name in passes_of(run, torch.float32, torch.float32):
        kinds = [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
        first = [launches(name, *kind) for kind in kinds]
        assert len(set.union(*first)) == sum(map(len, first)) > 0, name
        assert [launches(name, *kind) for kind in kinds] == first, name


class Compiled:
    """Stands in for Triton's CompiledKernel and notes how it is started."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.bound: list[tuple] = []
        self.direct: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *arguments: self.bound.append((grid, *arguments))

    def run(self, *arguments: object) -> None:
        self.direct.append(arguments)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """All kernels that the binder has compiled. Nothing runs."""
    from triton.runtime import driver

    from autonl.nn.kernels import passes

    found: list[Compiled] = []

    def run_bound(planned: passes.Launch, *tensors: Tensor | None) -> Compiled:
        found.append(Compiled())
        return found[-1]

    monkeypatch.setattr(passes, "run_bound", run_bound)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))
    return found


def forward_pass(x: Tensor) -> tuple:
    """A plan with two launches and two buffers, and the tensors it is for."""
    from autonl.nn.kernels import launch

    block = random_block(8, 0.25, 1)
    tile = launch.Tile(16, 16, 4, bands=2, gram_parts=2)
    plan = launch.inference_plan.__wrapped__(launch.problem_of(x, 2, 1, 1e-5, 0.0), tile, ())
    return plan, (x, torch.empty_like(x), block.depthwise.weight, *block.bn.parameters(), *list(block.bn.buffers())[:2])


@NEEDS_TRITON
def test_kernels_get_the_addresses_of_tensors_and_of_disjoint_buffers(compiled: list[Compiled]) -> None:
    from autonl.nn.kernels import passes

    plan, tensors = forward_pass(torch.randn(2, 8, 5, 5))
    for _ in range(2):
        passes.carry_out(plan, passes.run_again, tensors)
    gram, forward = (kernel.direct for kernel in compiled)
    assert [kernel.bound for kernel in compiled] == [[], []]
    for planned, calls in zip(plan.launches, (gram, forward), strict=True):
        assert len(calls) == 1
        assert calls[0][:9] == (*planned.grid, "stream", "function", "metadata", None, None, None)
        assert calls[0][9 + len(planned.tensors) :] == planned.values
    addresses = [tensor.data_ptr() for tensor in tensors]
    parts, scratch = gram[0][10], forward[0][11]
    assert gram[0][9] == addresses[0]
    assert forward[0][9:20] == (*addresses[:2], scratch, *addresses[2:], parts, None, None)
    (shape, dtype) = plan.buffers["gram_parts"]
    assert scratch - parts >= torch.empty(shape, dtype=dtype).nbytes
    assert parts % 16 == scratch % 16 == 0
    (shape, dtype) = plan.buffers["scratch"]
    assert plan.size - (scratch - parts) >= torch.empty(shape, dtype=dtype).nbytes


@NEEDS_TRITON
@pytest.mark.parametrize(("scratch", "direct"), [(0, True), (128, False)])
def test_a_known_launcher_is_called_in_c(scratch: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton 3.6's CudaLauncher calls it, where it would allocate nothing."""
    from autonl.nn.kernels import passes

    monkeypatch.setattr(passes, "LAUNCHER_IN_C", True)
    launcher = SimpleNamespace(
        launch="C", global_scratch_size=scratch, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=True
    )
    kernel = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
    in_c = ("C", ("function", False, True, None, None, "metadata", None, None, None))
    assert passes.starter(kernel) == (in_c if direct else (launcher, ("function", "metadata", None, None, None)))


@NEEDS_TRITON
def test_hooks_of_triton_see_every_launch(compiled: list[Compiled]) -> None:
    from triton import knobs

    from autonl.nn.kernels import passes

    plan, tensors = forward_pass(torch.randn(2, 8, 5, 5))
    passes.carry_out(plan, passes.run_again, tensors)

    def hook(metadata: object) -> None: ...

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        passes.carry_out(plan, passes.run_again, tensors)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    for planned, kernel in zip(plan.launches, compiled, strict=True):
        assert kernel.direct == []
        assert [(call[0], call[1 + len(planned.tensors) :]) for call in kernel.bound] == [
            (planned.grid, planned.values)
        ]


@NEEDS_TRITON
def test_tensors_at_odd_addresses_go_through_the_binder(compiled: list[Compiled]) -> None:
    """Kernels are compiled for addresses that are multiples of 16."""
    from autonl.nn.kernels import passes

    odd = torch.randn(2 * 8 * 25 + 1)[1:].view(2, 8, 5, 5)
    plan, tensors = forward_pass(odd)
    for count in (2, 4):
        passes.carry_out(plan, passes.run_again, tensors)
        assert (len(compiled), plan.calls) == (count, [])

"""How a pass is run: its launches one after the other, over tensors and buffers that only they see.

The first time every launch goes through Triton's binder, which looks at each argument, and every buffer is a tensor of
its own. From then on, in eager mode, one allocation holds all buffers and kernels get addresses: on small maps Python
would otherwise cost several times what the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from math import prod
from operator import itemgetter, or_
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton import knobs
from triton.runtime import driver

from autonl.nn.kernels import major_capability
from autonl.nn.kernels.tiles import Tile

FUSION = {"enable_fp_fusion": True}  # multiply-adds, which Triton leaves out from 3.10 on unless asked
ALIGNMENT = 16  # bytes: kernels are compiled for addresses that are multiples of it
LAUNCHER_IN_C = triton.__version__.startswith("3.6.")  # the one with the parameters that `starter` knows
ALONE = {"FOLLOWS": False, "LEADS": False}  # a kernel that others neither wait for nor overlap
PLANS = 1024  # plans that are kept, of every pass
SPACING = 256  # bytes: what buffers in one allocation are rounded up to, a few lines of the cache

Buffers: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


def can_overlap() -> bool:
    """Whether a kernel's programs can come to this GPU while the last of the kernel before are still at work, where
    they wait (`pieces.chain`): less of it idles between two kernels."""
    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return major_capability(torch.device("cuda", torch.cuda.current_device())) >= 9


class Launch:
    """A kernel with everything settled but its tensors, which come first among its parameters.

    tensors    what a plan calls them; - for one that this launch does without
    constants  by name, of which a kernel takes its own
    untraced   options that torch.compile does not know
    """

    def __init__(
        self, kernel: Any, tensors: str, grid: tuple[int, int, int], scalars: tuple[Any, ...],
        constants: dict[str, Any], tile: Tile,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.tensors = tensors.split()
        self.grid = grid
        self.scalars = scalars
        known = constants | ALONE
        self.constants = {name: known[name] for name in kernel.arg_names if name in known}
        self.options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self.untraced: dict[str, Any] = {"maxnreg": tile.registers} if tile.registers else {}
        self.compiled: Any = None

    @property
    def named(self) -> dict[str, Any]:
        """What Triton is given by name: a kernel is compiled for all of it, in this order."""
        return self.constants | self.options | self.untraced | FUSION

    @property
    def values(self) -> tuple[Any, ...]:
        """All but the tensors, as the kernel orders them."""
        return (*self.scalars, *self.constants.values())


class Plan:
    """What a pass launches, the names of the tensors it is given, and its buffers: shapes and dtypes by name."""

    def __init__(self, tensors: str, buffers: Buffers, launches: Sequence[Launch]) -> None:
        self.tensors = tensors.split()
        self.buffers = buffers
        self.launches = launches
        if can_overlap():  # the first waits for whatever made x, whatever takes z waits for the last
            for before, after in pairwise(launches):
                before.constants["LEADS"] = after.constants["FOLLOWS"] = after.untraced["launch_pdl"] = True
        self.calls: list[tuple[Any, ...]] = []  # how to start each kernel by itself, once all are compiled
        self.offsets: list[int] = []  # of the buffers in one allocation, bytes
        self.size = 0

    def settle(self) -> None:
        """All that a run over addresses needs, where this Triton's compiled kernels have what it takes."""
        compiled = [launch.compiled for launch in self.launches]
        if not all(hasattr(kernel, name) for kernel in compiled for name in ("run", "function", "packed_metadata")):
            return
        size, offsets = 0, []
        for shape, dtype in self.buffers.values():
            offsets.append(size)
            size += -(-prod(shape) * dtype.itemsize // SPACING) * SPACING
        self.size, self.offsets = size, offsets
        places = {name: place for place, name in enumerate((*self.tensors, *self.buffers))} | {"-": -1}
        picks = [itemgetter(*(places[name] for name in launch.tensors)) for launch in self.launches]
        self.calls = [  # last: another thread may be about to run this plan
            (*starter(kernel), launch.grid, pick, launch.values)
            for launch, kernel, pick in zip(self.launches, compiled, picks, strict=True)
        ]


def starter(kernel: Any) -> tuple[Any, tuple[Any, ...]]:
    """What starts a compiled kernel, and what that takes between grid and stream and the kernel's own arguments.

    That is CompiledKernel.run; in a Triton whose launcher is known, the C function that it would call, 3 us less.
    """
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    hooks = (None, None, None)  # what the hooks would be told, before and after
    if LAUNCHER_IN_C and not getattr(run, "global_scratch_size", 1) and not run.profile_scratch_size:
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (function, *flags, None, None, metadata, *hooks)
    return run, (function, metadata, *hooks)


# How a launch is made in all cases but `run_addresses`: one of the next three, or `ahead.compile_ahead`
Run: TypeAlias = Callable[..., Any]


def plan_for(make: Any, run: Run, x: Tensor, others: tuple[Tensor | None, ...], *key: Any) -> Plan:
    """The plan that `make` makes of a key.

    x, others  tensors that come from outside: kernels are compiled for their dtypes
    """
    if run is run_traced:  # sizes may be symbols
        return make.__wrapped__(*key, ())
    kinds = [None if tensor is None else tensor.dtype for tensor in others]
    return make(*key, (x.get_device(), x.dtype, *kinds))


def run_bound(launch: Launch, *tensors: Tensor | None) -> Any:
    """Through Triton's binder, which looks at the dtype and the alignment of every argument and may compile."""
    return launch.kernel[launch.grid](*tensors, *launch.scalars, **launch.named)


def run_again(launch: Launch, *tensors: Tensor | None) -> None:
    """The first time as above, then without the binder, which costs more than the launch itself.

    Right only where the binder would find what it found the first time: plans are kept by dtypes and device, and the
    tensors' addresses are multiples of 16.
    """
    if launch.compiled is None:
        launch.compiled = run_bound(launch, *tensors)
    else:
        launch.compiled[launch.grid](*tensors, *launch.values)


def run_traced(launch: Launch, *tensors: Tensor | None) -> None:
    """Where torch.compile has to see the kernel, which waits for all before it to end as others do."""
    constants = {name: ALONE.get(name, value) for name, value in launch.constants.items()}
    wrap_triton(launch.kernel)[launch.grid](*tensors, *launch.scalars, **constants, **launch.options)


def carry_out(plan: Plan, run: Run, tensors: Sequence[Tensor | None]) -> None:
    """Make a plan's launches. The first tensor is x, whose device has the buffers."""
    if run is run_again:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if ready(plan, addresses):
            run_addresses(plan, addresses, tensors[0])
            return
        if not aligned(addresses):
            run = run_bound
    x: Any = tensors[0]
    named: dict[str, Tensor | None] = dict(zip(plan.tensors, tensors, strict=True))
    named |= {name: x.new_empty(shape, dtype=dtype) for name, (shape, dtype) in plan.buffers.items()}
    for launch in plan.launches:
        run(launch, *(named.get(name) for name in launch.tensors))
    if run is run_again and not plan.calls:
        plan.settle()


def aligned(addresses: Sequence[int | None]) -> bool:
    return not reduce(or_, filter(None, addresses)) % ALIGNMENT


def ready(plan: Plan, addresses: Sequence[int | None]) -> bool:
    """Whether a plan's kernels can be started with these for its tensors."""
    return bool(plan.calls) and aligned(addresses) and not hooked()


def run_addresses(plan: Plan, addresses: list[Any], x: Any) -> None:
    """Each kernel started as CompiledKernel.__getitem__ would, less what looks at its arguments and at hooks."""
    if plan.size:
        workspace = x.new_empty(plan.size, dtype=torch.uint8)
        start = workspace.data_ptr()
        addresses += [start + offset for offset in plan.offsets]
    addresses.append(None)  # what "-" stands for
    stream = driver.active.get_current_stream(x.get_device())
    for start_kernel, known, grid, pick, values in plan.calls:
        start_kernel(*grid, stream, *known, *pick(addresses), *values)


def hooked() -> bool:
    """Whether somebody, a profiler for one, wants to see every launch of Triton's."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # None, a function, or a chain of them
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

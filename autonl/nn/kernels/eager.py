"""LightNL in eager mode. On small maps Python takes longer than the kernels, so what is found out of a kind of map and
block is known from its second time on, when kernels are started from addresses: see `passes`.

A key tells what `supported` and the plans look at, but for where tensors lie in memory and the mode that PyTorch is in,
which are looked at each time.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autonl.nn import kernels
from autonl.nn.kernels import launch, norm_tensors, readable, weight_of
from autonl.nn.kernels.passes import ALIGNMENT, PLANS, SPACING, carry_out, plan_for, ready, run_addresses, run_again

Settings: TypeAlias = tuple[int, int, float]  # compact_chs, stride, energy_eps
Key: TypeAlias = tuple[Any, ...]


class Known:
    """A kind of map and block: its plans, and how u, G and the statistics, which the backward pass needs, lie in one
    allocation."""

    def __init__(self, x: Tensor, bn: nn.BatchNorm2d, settings: Settings, tensors: tuple[Any, ...]) -> None:
        compact_chs, stride, energy_eps = settings
        self.problem = launch.problem_of(x, compact_chs, stride, bn.eps, energy_eps)
        self.layout = torch.channels_last if self.problem.channels_last else torch.contiguous_format
        if not bn.training:
            self.plan = plan_for(launch.inference_plan, run_again, x, tensors[:-1], self.problem, None)
            return
        self.plan = plan_for(launch.training_plan, run_again, x, tensors, self.problem, bn.momentum, True, True, None)
        shapes = x.shape, (x.shape[0], compact_chs, x.shape[1]), (2, x.shape[1])
        self.parts: list[tuple[int, int, torch.dtype, Any]] = []  # first byte, bytes, dtype, shape
        self.size = 0
        for shape, dtype in zip(shapes, (x.dtype, torch.float32, torch.float32), strict=True):
            size = prod(shape) * dtype.itemsize
            self.parts.append((self.size, size, dtype, shape))
            self.size += -(-size // SPACING) * SPACING
        _, (self.gram_offset, *_), (self.statistics_offset, *_) = self.parts

    def tensors_in(self, kept: Tensor) -> list[Tensor]:
        """u, G and the statistics."""
        if kept.data_ptr() % ALIGNMENT:  # somebody saved it elsewhere
            kept = kept.clone()
        flat = [kept[first : first + size].view(dtype) for first, size, dtype, _ in self.parts]
        u, *others = (part.view(shape) for part, (*_, shape) in zip(flat, self.parts, strict=True))
        images, chs, height, width = u.shape
        if self.problem.channels_last:
            u = flat[0].view(images, height, width, chs).permute(0, 3, 1, 2)
        return [u, *others]


KNOWN: dict[Key, Known] = {}


def tensors_of(depthwise: nn.Module, bn: nn.Module) -> tuple[Any, ...]:
    """The depthwise kernel, gamma and beta, running mean and variance, number of batches."""
    return weight_of(depthwise), *norm_tensors(bn)


def key_of(x: Tensor, depthwise: Any, bn: Any, settings: Settings, tensors: tuple[Any, ...]) -> Key | None:
    """None for layers that the kernels do not know, and where a tensor is missing."""
    if type(depthwise) is not nn.Conv2d or type(bn) is not nn.BatchNorm2d:
        return None
    weight, gamma, beta, mean, variance, batches = tensors
    if weight is None or gamma is None or beta is None or mean is None or variance is None or batches is None:
        return None
    return (
        *(x.shape, x.stride(), x.dtype, x.get_device(), settings),
        *(weight.dtype, gamma.dtype, beta.dtype, mean.dtype, variance.dtype, batches.dtype),
        *(bn.training, bn.eps, bn.momentum, bn.affine, bn.track_running_stats, bn.num_features),
    )


def lightnl(x: Tensor, depthwise: nn.Conv2d, bn: nn.BatchNorm2d, settings: Settings) -> Tensor | None:
    """z; None where the kernels cannot stand in for the plain path."""
    tensors = tensors_of(depthwise, bn)
    key = key_of(x, depthwise, bn, settings, tensors)
    known = KNOWN.get(key) if key else None
    sure = known is not None and still_supported(x, tensors, bn.training)
    if not sure and not kernels.supported(x, depthwise, bn, settings[0]):
        return None
    if known is None:
        known = Known(x, bn, settings, tensors)
        if len(KNOWN) >= PLANS:
            KNOWN.clear()
        if key:
            KNOWN[key] = known
    weight, gamma, beta, *running = tensors
    if bn.training:
        return Training.apply(x, weight, gamma, beta, running, known)
    z = torch.empty_like(x)
    carry_out(known.plan, run_again, (x, z, *tensors[:-1]))
    return z


def still_supported(x: Tensor, tensors: tuple[Any, ...], training: bool) -> bool:
    """What a key does not tell."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if x.get_device() != torch.cuda.current_device() or (torch.is_grad_enabled() and not training):
        return False
    weight, gamma, beta, mean, variance, _ = tensors
    placed = readable(weight, x) and readable(gamma, x) and readable(beta, x)
    return placed and readable(mean, x) and readable(variance, x)


class Training(torch.autograd.Function):
    """One node, and running statistics moved by the kernel that has the new ones at hand."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, running: list[Tensor], known: Known
    ) -> Tensor:
        z, kept = torch.empty_like(x), x.new_empty(known.size, dtype=torch.uint8)
        first = kept.data_ptr()
        mean, variance, batches = running
        addresses = [x.data_ptr(), first, z.data_ptr(), first + known.gram_offset, first + known.statistics_offset]
        addresses += [weight.data_ptr(), gamma.data_ptr(), beta.data_ptr()]
        addresses += [mean.data_ptr(), variance.data_ptr(), batches.data_ptr()]
        if ready(known.plan, addresses):
            run_addresses(known.plan, addresses, x)
        else:
            u, gram, statistics = known.tensors_in(kept)
            carry_out(known.plan, run_again, (x, u, z, gram, statistics, weight, gamma, beta, *running))
        ctx.save_for_backward(x, kept, weight, gamma)
        ctx.known = known
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        # with create_graph=True alone gradients are on here; the wrapper costs as much as a launch
        function = once_differentiable(Training.gradients) if torch.is_grad_enabled() else Training.gradients
        return *function(ctx, dz), None, None

    @staticmethod
    def gradients(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, kept, weight, gamma = ctx.saved_tensors
        known: Known = ctx.known
        # x may have been saved elsewhere and copied back, in another layout
        x, dz = x.contiguous(memory_format=known.layout), dz.contiguous(memory_format=known.layout)
        plan = plan_for(launch.backward_plan, run_again, x, (dz, weight, gamma), known.problem, None, None)
        dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
        d_gamma, d_beta = torch.empty_like(gamma), torch.empty_like(gamma)
        first = kept.data_ptr()
        addresses = [x.data_ptr(), dz.data_ptr(), first, first + known.gram_offset, first + known.statistics_offset]
        addresses += [weight.data_ptr(), gamma.data_ptr()]
        addresses += [dx.data_ptr(), d_weight.data_ptr(), d_gamma.data_ptr(), d_beta.data_ptr()]
        if ready(plan, addresses):
            run_addresses(plan, addresses, x)
        else:
            carry_out(plan, run_again, (x, dz, *known.tensors_in(kept), weight, gamma, dx, d_weight, d_gamma, d_beta))
        return dx, d_weight, d_gamma, d_beta

"""The kernels as operators of torch.library, for torch.compile. `eager` does without their overhead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import triton_op

from autonl.nn.kernels import launch, norm_tensors


def inference(
    x: Tensor, weight: Tensor, bn: nn.BatchNorm2d, compact_chs: int, stride: int, energy_eps: float
) -> Tensor:
    norm: Any = norm_tensors(bn)[:4]  # kernels.supported: none is None
    return lightnl_inference(x, weight, *norm, compact_chs, stride, bn.eps, energy_eps)


def training(x: Tensor, weight: Tensor, bn: nn.BatchNorm2d, compact_chs: int, stride: int, energy_eps: float) -> Tensor:
    gamma, beta, running_mean, running_variance, batches_tracked = norm_tensors(bn)
    # an operator with a gradient must not change its inputs: the running statistics move out here
    z, _, _, statistics = lightnl_training(x, weight, gamma, beta, compact_chs, stride, bn.eps, energy_eps)
    momentum, count = bn.momentum or 0.0, x.shape[0] * x.shape[2] * x.shape[3]
    mean, variance = statistics.unbind()
    with torch.no_grad():
        batches_tracked.add_(1)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_variance.lerp_((variance * (count / (count - 1))).to(running_variance.dtype), momentum)
    return z


@triton_op("autonl::lightnl_inference", mutates_args=())
def lightnl_inference(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor,
    compact_chs: int, stride: int, eps: float, energy_eps: float,
) -> Tensor:  # fmt: skip
    norm = (gamma, beta, mean, variance)
    return launch.inference(x, weight, norm, compact_chs, stride, eps, energy_eps, launch.run_traced)


@triton_op("autonl::lightnl_training", mutates_args=())
def lightnl_training(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, compact_chs: int, stride: int, eps: float, energy_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, saved = launch.training(x, weight, gamma, beta, compact_chs, stride, eps, energy_eps, run=launch.run_traced)
    return z, saved.u, saved.gram, saved.statistics


@triton_op("autonl::lightnl_training_backward", mutates_args=())
def lightnl_training_backward(
    dz: Tensor, x: Tensor, u: Tensor, gram: Tensor, statistics: Tensor, weight: Tensor, gamma: Tensor,
    stride: int, eps: float, energy_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    saved = launch.Saved(x, u, gram, statistics, weight, gamma)
    return launch.training_backward(dz, saved, stride, eps, energy_eps, launch.run_traced)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, gamma, _, _, *ctx.known = inputs
    ctx.save_for_backward(x, *output[1:], weight, gamma)
    ctx.mark_non_differentiable(*output[1:])


def backward(ctx: Any, dz: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    return *lightnl_training_backward(dz, *ctx.saved_tensors, *ctx.known), None, None, None, None


lightnl_training.register_autograd(backward, setup_context=setup_context)

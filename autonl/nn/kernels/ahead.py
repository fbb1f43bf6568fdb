"""Compile a network's kernels side by side before their first use: one after the other they take a minute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from triton import AsyncCompileMode

from autonl.nn.kernels import depthwise_passes, launch, norm_act_passes, norm_tensors, weight_of
from autonl.nn.kernels.layers import ACTIVATIONS, FusedDepthwise, FusedNormAct, by_kernels, dtype_of
from autonl.nn.kernels.passes import Launch


def compile_kernels(network: nn.Module, images: Tensor, threads: int | None = None) -> None:
    """All that the network's layers by kernels need to be trained on images like these, and evaluated, under the
    autocast in force. One that does not compile fails where it is used."""
    pool = ThreadPoolExecutor(threads)
    mode = AsyncCompileMode(pool)
    try:
        copy_context().run(rehearse_all, mode, network, images)  # whatever happens, the mode stays in that context
        pool.shutdown()
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C
        for kernel in mode.future_kernels.values():  # into Triton's cache, or out of it
            kernel.result(ignore_errors=True)


def rehearse_all(mode: AsyncCompileMode, network: nn.Module, images: Tensor) -> None:
    mode.__enter__()  # it would leave only when all are compiled
    for layer, x in inputs_of(network, images):
        rehearse(layer, x)


def inputs_of(network: nn.Module, images: Tensor) -> Iterator[tuple[nn.Module, Tensor]]:
    """The layers by kernels with what they are given, on the device that has shapes and no memory."""
    shapes: list[tuple[nn.Module, torch.Size]] = []
    rehearsed = copy.deepcopy(network).to("meta").eval()
    for layer in rehearsed.modules():
        layer._forward_hooks.clear()  # somebody's, who waits for real maps
        layer._forward_pre_hooks.clear()
        if by_kernels(layer):
            layer.register_forward_pre_hook(lambda layer, inputs: shapes.append((layer, inputs[0].shape)))
    with torch.no_grad():
        rehearsed(torch.empty(images.shape, dtype=next(network.parameters()).dtype, device="meta"))
    weights = [weight for weight in network.parameters() if weight.ndim == 4]
    turned = not all(tensor.is_contiguous() for tensor in (images, *weights))  # either makes maps channels-last
    layout = torch.channels_last if turned else torch.contiguous_format
    for layer, shape in shapes:
        yield layer, torch.empty(shape, dtype=dtype_of(images), device="meta", memory_format=layout)


def rehearse(layer: Any, x: Tensor) -> None:
    """The passes of a layer, with kernels that are compiled in place of being run."""
    if isinstance(layer, FusedDepthwise):
        weight, stride = weight_of(layer), layer.stride[0]
        y = depthwise_passes.forward(x, weight, stride, compile_ahead)
        depthwise_passes.backward(x, y, weight, stride, compile_ahead)
    elif isinstance(layer, FusedNormAct):
        gamma, beta, *running = norm_tensors(layer)
        act, eps, momentum = ACTIVATIONS[type(layer.act)], layer.eps, layer.momentum or 0.0
        _, statistics = norm_act_passes.training(x, gamma, beta, act, eps, running, momentum, compile_ahead)
        norm_act_passes.training_backward(x, x, gamma, beta, statistics, act, eps, compile_ahead)
    else:
        weight, (gamma, beta, *running) = weight_of(layer.depthwise), norm_tensors(layer.bn)
        stride, momentum, eps = layer.stride, layer.bn.momentum or 0.0, (layer.bn.eps, layer.energy_eps)
        launch.inference(x, weight, (gamma, beta, *running[:2]), layer.compact_chs, stride, *eps, compile_ahead)
        _, saved = launch.training(
            x, weight, gamma, beta, layer.compact_chs, stride, *eps, running, momentum, compile_ahead
        )
        launch.training_backward(x, saved, stride, *eps, compile_ahead)


def compile_ahead(planned: Launch, *tensors: Tensor | None) -> None:
    """A `passes.Run` for tensors without memory: kernels are compiled for dtypes, and addresses as `run_again` asks."""
    kinds = [None if tensor is None else tensor.dtype for tensor in tensors]
    planned.kernel.warmup(*kinds, *planned.scalars, grid=planned.grid, **planned.named)

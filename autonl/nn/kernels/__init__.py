"""LightNL in a few Triton kernels instead of a dozen launches: `supported` says where, `lightnl` does it.
What is around LightNL is in `layers`.

Nothing here needs Triton until a tensor on a GPU comes along.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COMPACT_CHS = 128  # the rows of G that a program holds
MOST_IMAGES = 65535  # the third axis of a CUDA grid
HAS_TRITON = find_spec("triton") is not None and torch.version.cuda is not None


def exporting() -> bool:
    """torch.compiler.is_exporting(), which torch 2.11 takes for True under torch.compile too."""
    if not torch.compiler.is_exporting():
        return False
    return not torch.compiler.is_dynamo_compiling() or getattr(torch.compiler, "_is_exporting_flag", True)


@lru_cache
def major_capability(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).major


@torch.compiler.assume_constant_result  # called when torch.compile traces, not traced
def has_bfloat16(device: torch.device) -> bool:
    return major_capability(device) >= 8


def missing_on(device: torch.device) -> str | None:
    """Why no network can use the kernels there; None where one can."""
    if device.type != "cuda":
        return "they need a CUDA GPU"
    if not HAS_TRITON:
        return "they need Triton, which is not installed"
    return None if has_bfloat16(device) else "they need a GPU of compute capability 8 or newer"


def is_plain(x: Tensor) -> bool:
    """A tensor with memory behind it: not being traced or compiled, no subclass."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, nn.Parameter)


def can_run(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels can work on maps like x, as that dtype. Exported graphs are always plain."""
    if not x.is_cuda or not HAS_TRITON or x.ndim != 4 or dtype not in DTYPES:
        return False
    if exporting() or torch.jit.is_tracing():
        return False
    # Triton launches on the current device; functorch's vmap and grad do not see into a launch
    elsewhere = not torch.compiler.is_compiling() and x.get_device() != torch.cuda.current_device()
    if elsewhere or torch._C._are_functorch_transforms_active():
        return False
    images, chs, height, width = x.shape
    return 0 < images <= MOST_IMAGES and 0 < chs * height * width < 2**31 and has_bfloat16(x.device)


def norm_tensors(bn: nn.Module) -> tuple[Any, ...]:
    """gamma and beta, running mean and variance, number of batches: None for one that pruning or nn.DataParallel has
    made another thing of. As attributes they take twenty times as long to find, and a GPU waits for launches."""
    parameters, buffers = bn._parameters, bn._buffers
    running = buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")
    return parameters.get("weight"), parameters.get("bias"), *running


def weight_of(conv: nn.Module) -> Any:
    """Likewise."""
    return conv._parameters.get("weight")


def known_norm(bn: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether a BN is as the kernels know it: of x's channels, affine, its running statistics moved by a momentum."""
    if not bn.affine or not bn.track_running_stats or bn.momentum is None or bn.num_features != x.shape[1]:
        return False
    gamma, beta, mean, variance, batches = norm_tensors(bn)
    if not (readable(gamma, x) and readable(beta, x) and readable(mean, x) and readable(variance, x)):
        return False
    # nn.BatchNorm2d refuses a single value a channel, and says so
    return not bn.training or (batches is not None and x.shape[0] * x.shape[2] * x.shape[3] > 1)


def readable(parameter: Tensor | None, x: Tensor) -> bool:
    """Whether a kernel on x's device finds a parameter's values one behind the other."""
    return parameter is not None and parameter.device == x.device and parameter.is_contiguous()


def supported(x: Tensor, depthwise: nn.Module, bn: nn.Module, compact_chs: int) -> bool:
    """Whether the kernels can stand in for BN(depthwise(compact_nonlocal(x))) + x."""
    if not can_run(x, x.dtype) or compact_chs > MOST_COMPACT_CHS:
        return False
    # a subclass, SyncBatchNorm for one, computes something else
    if type(depthwise) is not nn.Conv2d or type(bn) is not nn.BatchNorm2d:
        return False
    weight = weight_of(depthwise)
    if not readable(weight, x) or not known_norm(bn, x):
        return False
    if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        return False
    if bn.training or not torch.is_grad_enabled():
        return True
    return not any(t.requires_grad for t in (x, weight, *norm_tensors(bn)[:2]))


def lightnl(x: Tensor, depthwise: nn.Conv2d, bn: nn.BatchNorm2d, settings: tuple[int, int, float]) -> Tensor | None:
    """z = BN(DepthwiseConv3x3(y)) + x by the kernels; the BN's running statistics move as they do in the plain path.
    None where they cannot stand in for it.

    settings  the number of compact channels, the stride, and what is added to the energy that y is divided by; 0:
              LightNL as published
    """
    plain = is_plain(x)
    # `eager` asks for itself, and is not imported where there is no Triton
    if not (plain and x.is_cuda and HAS_TRITON) and not supported(x, depthwise, bn, settings[0]):
        return None
    if plain:
        from autonl.nn.kernels import eager

        return eager.lightnl(x, depthwise, bn, settings)
    from autonl.nn.kernels import ops

    function = ops.training if bn.training else ops.inference
    return function(x, weight_of(depthwise), bn, *settings)

"""A network's layers by kernels: LightNL by `use_kernels`, what is around it by `use_layer_kernels`, depthwise
convolutions and, in training, BN with its activation.

The latter get another class, whose `forward` takes the kernels where they can be used: names, weights and copies stay
as they are.
"""

from __future__ import annotations

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from autonl.nn.kernels import DTYPES, HAS_TRITON, MOST_IMAGES, exporting, has_bfloat16
from autonl.nn.light_nonlocal import LightNL

ACTIVATIONS = {nn.SiLU: "silu", nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Identity: "identity"}


def use_kernels(network: nn.Module) -> None:
    """Let the kernels do every LightNL of a network, where they can."""
    for block in network.modules():
        if isinstance(block, LightNL):
            block.fused = True


def use_layer_kernels(network: nn.Module) -> None:
    """Let the kernels do the layers around LightNL, where they can."""
    inside = {layer for block in network.modules() if isinstance(block, LightNL) for layer in block.modules()}
    for layer in network.modules():
        if layer in inside:
            continue
        if type(layer) is nn.Conv2d and is_depthwise(layer):
            layer.__class__ = FusedDepthwise
        elif type(layer) is BatchNormAct2d and type(layer.act) in ACTIVATIONS and type(layer.drop) is nn.Identity:
            layer.__class__ = FusedNormAct


def is_depthwise(conv: nn.Conv2d) -> bool:
    size, stride = conv.kernel_size[0], conv.stride[0]
    square = conv.kernel_size == (size, size) and conv.stride == (stride, stride)
    known = size in (3, 5) and stride in (1, 2) and conv.padding == (size // 2, size // 2) and conv.dilation == (1, 1)
    whole = conv.groups == conv.in_channels == conv.out_channels and conv.in_channels % 8 == 0 and conv.bias is None
    return square and known and whole and conv.padding_mode == "zeros"


def can_take(x: Tensor, dtype: torch.dtype) -> bool:
    """A map that the kernels of this file take, as `dtype`: on a GPU, channels-last."""
    if not x.is_cuda or not HAS_TRITON or exporting() or torch.jit.is_tracing() or dtype not in DTYPES:
        return False
    if not x.is_contiguous(memory_format=torch.channels_last) or not 0 < x.shape[0] <= MOST_IMAGES:
        return False
    if not torch.compiler.is_compiling() and x.get_device() != torch.cuda.current_device():
        return False  # Triton launches on the current device
    return x[0].numel() < 2**31 and has_bfloat16(x.device)


class FusedDepthwise(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        # folding a BN gives a bias
        if not can_take(x, dtype) or x.shape[1] != self.in_channels or not is_depthwise(self):
            return super().forward(x)
        from autonl.nn.kernels.depthwise_passes import depthwise

        return depthwise(x.to(dtype), self.weight, self.stride[0])


class FusedNormAct(BatchNormAct2d):
    traced = False

    def forward(self, x: Tensor) -> Tensor:
        plain = not self.training or not self.affine or not self.track_running_stats or self.momentum is None
        # under torch.compile its own kernels do the same
        if plain or (torch.compiler.is_compiling() and not self.traced) or not can_take(x, x.dtype) or x.shape[1] % 8:
            return super().forward(x)
        if x.numel() == x.shape[1] or x.numel() >= 2**34:  # T8, an eighth of them, is a whole number of 32 bits
            return super().forward(x)
        from autonl.nn.kernels.norm_act_passes import norm_act

        return norm_act(x, self, ACTIVATIONS[type(self.act)])

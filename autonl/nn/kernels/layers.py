"""A network's layers by kernels: LightNL, around it depthwise convolutions and, in training, BN with its activation.

Those around it get another class, whose `forward` takes the kernels where they can be used: names, weights and copies
stay as they are.
"""

from __future__ import annotations

import torch
from timm.layers import BatchNormAct2d
from timm.models import register_notrace_module
from torch import Tensor, nn

from autonl.nn.kernels import (
    DTYPES,
    MOST_COMPACT_CHS,
    can_run,
    is_plain,
    known_norm,
    norm_tensors,
    readable,
    weight_of,
)
from autonl.nn.light_nonlocal import LightNL

ACTIVATIONS = {nn.SiLU: "silu", nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Identity: "identity"}


def use_kernels(network: nn.Module) -> None:
    """Let the kernels do every layer that they know of a network, where they can."""
    use_lightnl_kernels(network)
    use_layer_kernels(network)


def use_lightnl_kernels(network: nn.Module) -> None:
    for block in network.modules():
        if isinstance(block, LightNL):
            block.fused = True


def use_layer_kernels(network: nn.Module) -> None:
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
    """A map that the kernels of this file take, as that dtype."""
    return can_run(x, dtype) and x.is_contiguous(memory_format=torch.channels_last)


def dtype_of(x: Tensor) -> torch.dtype:
    """What a convolution of x works in."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


@register_notrace_module
class FusedDepthwise(nn.Conv2d):
    """A convolution of which `is_depthwise` holds."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.takes(x):
            return super().forward(x)
        from autonl.nn.kernels.depthwise_passes import depthwise

        return depthwise(x.to(dtype_of(x)), weight_of(self), self.stride[0])

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels can stand in: never where F.conv2d would refuse."""
        weight = weight_of(self)
        if weight is None or (x.dtype != weight.dtype and not torch.is_autocast_enabled("cuda")):
            return False
        if not can_take(x, dtype_of(x)) or x.dtype not in DTYPES or weight.dtype not in DTYPES:
            return False  # autocast leaves float64 as it is
        # folding a BN gives a bias
        return x.shape[1] == self.in_channels and self._parameters.get("bias", weight) is None and readable(weight, x)


@register_notrace_module
class FusedNormAct(BatchNormAct2d):
    def forward(self, x: Tensor) -> Tensor:
        if not is_plain(x) or not self.takes(x):  # under torch.compile its own kernels do the same
            return super().forward(x)
        from autonl.nn.kernels.norm_act_passes import norm_act

        return norm_act(x, self, ACTIVATIONS[type(self._modules["act"])])

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels can stand in, for training."""
        if not self.training or type(self._modules["act"]) not in ACTIVATIONS or not can_take(x, x.dtype):
            return False
        # a load is of eight channels; rows of channels are counted in 32 bits
        return x.shape[1] % 8 == 0 and x.numel() < 2**33 and known_norm(self, x)


def by_kernels(layer: nn.Module) -> bool:
    """A layer that kernels do on a GPU, for all that it tells itself."""
    tensors: tuple[Tensor | None, ...] = (None,)
    if isinstance(layer, LightNL) and layer.fused and layer.compact_chs <= MOST_COMPACT_CHS:
        tensors = weight_of(layer.depthwise), *norm_tensors(layer.bn)
    elif isinstance(layer, FusedNormAct):
        tensors = norm_tensors(layer)
    elif isinstance(layer, FusedDepthwise):
        tensors = (weight_of(layer),)
    return all(tensor is not None for tensor in tensors)  # without one of them the plain path is taken

"""The form of a network that runtimes like: the same outputs in eval mode, at one size of image, with less to do."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, SelectAdaptivePool2d
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, EdgeResidual, InvertedResidual, SqueezeExcite
from timm.models.efficientnet import EfficientNet, EfficientNetFeatures
from timm.models.mobilenetv3 import MobileNetV3, MobileNetV3Features
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from autonl.arch.spec import check_resolution
from autonl.errors import refuse
from autonl.export.custom_op import CustomLightNL, with_shortcut
from autonl.nn.light_nonlocal import EPSILON, LightNL, freeze_association
from autonl.nn.shapes import output_sizes

Layout = Literal["channels_first", "channels_last"]  # how the runtime keeps its maps
LAYOUTS: tuple[Layout, ...] = ("channels_first", "channels_last")
FEW_CHANNELS = 16  # one AVX-512 register: up to here a product of all channels costs no more than slicing some of them

BLOCKS = (InvertedResidual, DepthwiseSeparableConv, EdgeResidual)  # that add a shortcut behind their last norm
# kind of module -> its convolutions, each with the BN behind it
FOLDED = {
    EfficientNet: (("conv_stem", "bn1"), ("conv_head", "bn2")),
    EfficientNetFeatures: (("conv_stem", "bn1"),),
    MobileNetV3: (("conv_stem", "bn1"),),
    MobileNetV3Features: (("conv_stem", "bn1"),),
    InvertedResidual: (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")),
    DepthwiseSeparableConv: (("conv_dw", "bn1"), ("conv_pw", "bn2")),
    EdgeResidual: (("conv_exp", "bn1"), ("conv_pwl", "bn2")),
}


def deploy(
    model: nn.Module, size: int | tuple[int, int], layout: Layout = "channels_first", custom_op: bool = False
) -> nn.Module:
    """A copy of the network for inference on images of that size, with the same outputs.

    BN is folded into the convolutions before it. LightNL is written for the runtimes, see `DeployedLightNL`, in the
    cheaper order for its map. The means of SE and of the head are poolings of that map, which runtimes keep in
    their own layout. Any batch size; other image sizes are refused.

    layout  what the runtime keeps its maps in: channels_first for ONNX Runtime, ExecuTorch and Core ML, channels_last
            for OpenVINO and LiteRT. It decides how LightNL's products are written, not what goes in or comes out.
    custom_op  LightNL is one operator of the runtime's, see `autonl.export.custom_op`

        torch.onnx.export(autonl.deploy(model, 224), ...)
    """
    if layout not in LAYOUTS:
        refuse("layout", layout, ", ".join(LAYOUTS))
    size = (size, size) if isinstance(size, int) else size
    check_resolution("size", size)
    deployed = freeze_association(copy.deepcopy(model).cpu().eval(), size)
    for parameter in deployed.parameters():
        parameter.requires_grad_(False)
    kinds = (LightNL, SqueezeExcite, SelectAdaptivePool2d)
    places = {name: module for name, module in deployed.named_modules() if isinstance(module, kinds)}
    inputs = input_sizes(deployed, list(places), size)
    for name, module in places.items():
        replace_module(deployed, name, deployed_part(module, inputs[name], layout, custom_op))
    for module in list(deployed.modules()):
        for kind, pairs in FOLDED.items():
            if isinstance(module, kind):
                for conv, norm in pairs:
                    fold(module, conv, norm)
        if isinstance(module, nn.Sequential):  # a segmentation's head, a downsampling of timm's
            for conv, norm in itertools.pairwise([name for name, _ in module.named_children()]):
                fold(module, conv, norm)
    for name, module in list(deployed.named_modules()):
        if type(module) in BLOCKS and (block := with_shortcut(module)):
            replace_module(deployed, name, block)
    return deployed


def deployed_part(module: nn.Module, size: tuple[int, int], layout: Layout, custom_op: bool) -> nn.Module:
    if isinstance(module, LightNL):
        return CustomLightNL(module, size) if custom_op else DeployedLightNL(module, size, layout)
    if isinstance(module, SqueezeExcite):
        return DeployedSqueezeExcite(module, size)
    assert isinstance(module, SelectAdaptivePool2d)
    flat = module.pool_type in ("avg", "fast", "fastavg") and module(torch.zeros(1, 8, *size)).shape == (1, 8)
    return nn.Sequential(nn.AvgPool2d(size), nn.Flatten()) if flat else module


class DeployedLightNL(nn.Module):
    """z = DepthwiseConv3x3(x_c x_sc^T x_s) + x, of LightNL's weights, with its BN and its 1 / (H W) folded away.

    Positions are sampled by a depthwise 1x1 convolution with a stride: of the ways to write `[::s, ::s]` the one that
    every runtime keeps in its own layout and in its accelerated part. The products are bmm (matmul would leave
    an `expand` behind) of (N, C, H W) or, for a runtime that keeps channels last, of (N, H W, C), where a transpose
    to channels last is no work at all. There a slice of channels is copied position by position: of few channels all
    are multiplied instead, and x_sc, with zeros behind the compact ones, gives zeros to what x_c has too many.
    """

    sampler: Tensor | None
    mask: Tensor | None

    def __init__(self, block: LightNL, size: tuple[int, int], layout: Layout) -> None:
        super().__init__()
        self.channels, self.compact_chs = block.bn.num_features, block.compact_chs
        self.size, self.stride, self.layout = size, block.stride, layout
        self.order = block.order or block.order_at(*size)
        self.depthwise = fuse_conv_bn_eval(block.depthwise, block.bn)
        self.energy = block.energy
        share = 1 / (size[0] * size[1])
        if self.stride == 1:
            self.depthwise.weight.data *= share
            self.register_buffer("sampler", None)
        else:  # x_s is a factor twice; scaled here, no product is a bare sum over positions
            self.register_buffer("sampler", torch.full((self.channels, 1, 1, 1), share**0.5))
        few = self.compact_chs < self.channels <= FEW_CHANNELS
        masked = few and layout == "channels_last" and self.order == "channel"
        self.register_buffer("mask", (torch.arange(self.channels) < self.compact_chs).float() if masked else None)

    def forward(self, x: Tensor) -> Tensor:
        x_s = x if self.sampler is None else F.conv2d(x, self.sampler, stride=self.stride, groups=self.channels)
        y = self.channels_first(x, x_s) if self.layout == "channels_first" else self.channels_last(x, x_s)
        return self.depthwise(y) + x

    def channels_first(self, x: Tensor, x_s: Tensor) -> Tensor:
        """(N, C, H, W) and its samples -> (N, C, H, W)."""
        images, (height, width) = x.shape[0], self.size
        x_s = x_s.reshape(images, self.channels, -1)  # (N, C, S)
        x_sc = x_s[:, : self.compact_chs]  # (N, Cr, S)
        x_c = x_sc if self.sampler is None else x[:, : self.compact_chs].reshape(images, -1, height * width)
        if self.order == "channel":
            gram = self.over_energy(torch.bmm(x_s, x_sc.transpose(1, 2)), x_sc)  # (N, C, Cr)
            y = torch.bmm(gram, x_c)  # (N, C, Cr) (N, Cr, HW) -> (N, C, HW)
        else:
            affinity = torch.bmm(x_sc.transpose(1, 2), self.over_energy(x_c, x_sc))  # (N, S, HW)
            y = torch.bmm(x_s, affinity)  # (N, C, S) (N, S, HW) -> (N, C, HW)
        return y.reshape(images, self.channels, height, width)

    def over_energy(self, factor: Tensor, x_sc: Tensor) -> Tensor:
        """A factor of the product over |x_sc|^2 / (C_r H W), where LightNL is divided by its energy."""
        if not self.energy:
            return factor
        square = (x_sc * x_sc).sum((1, 2), keepdim=True)  # (N, 1, 1); a sampler has shared it out over H W
        count = self.compact_chs * (self.size[0] * self.size[1] if self.sampler is None else 1)
        return factor / (square / count + EPSILON)

    def channels_last(self, x: Tensor, x_s: Tensor) -> Tensor:
        """The same with every matrix transposed."""
        images, (height, width) = x.shape[0], self.size
        x, x_s = (map_.permute(0, 2, 3, 1).reshape(images, -1, self.channels) for map_ in (x, x_s))
        if self.mask is None:
            x_sc = x_s[:, :, : self.compact_chs]  # (N, S, Cr)
            x_c = x_sc if self.sampler is None else x[:, :, : self.compact_chs]
        else:
            x_sc, x_c = x_s * self.mask, x  # with Cr = C below
        if self.order == "channel":
            gram = self.over_energy(torch.bmm(x_sc.transpose(1, 2), x_s), x_sc)  # (N, Cr, C)
            y = torch.bmm(x_c, gram)  # (N, HW, Cr) (N, Cr, C) -> (N, HW, C)
        else:
            affinity = torch.bmm(self.over_energy(x_c, x_sc), x_sc.transpose(1, 2))  # (N, HW, S)
            y = torch.bmm(affinity, x_s)  # (N, HW, S) (N, S, C) -> (N, HW, C)
        return y.reshape(images, height, width, self.channels).permute(0, 3, 1, 2)


class DeployedSqueezeExcite(nn.Module):
    """timm's, with the mean as a pooling of the whole map."""

    def __init__(self, block: Any, size: tuple[int, int]) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(size)
        self.gate = nn.Sequential(block.conv_reduce, block.act1, block.conv_expand, block.gate)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.pool(x))


def input_sizes(model: nn.Module, names: list[str], size: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """(height, width) of the map that goes into each named module."""
    wrapped = copy.deepcopy(model)
    for name in names:  # what goes into a module is what comes out of an identity before it
        replace_module(wrapped, name, nn.Sequential(nn.Identity(), wrapped.get_submodule(name)))
    sizes = output_sizes(wrapped, [f"{name}.0" for name in names], size)
    return {name: sizes[f"{name}.0"][1:] for name in names}


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def fold(parent: nn.Module, conv_name: str, norm_name: str) -> None:
    """Put the BN into the convolution before it; its activation, or the LightNL behind it, takes its place."""
    conv: Any = getattr(parent, conv_name)
    norm: Any = getattr(parent, norm_name)
    bn, *behind = list(norm) if isinstance(norm, nn.Sequential) and len(norm) else [norm]
    if not (isinstance(conv, nn.Conv2d) and isinstance(bn, BatchNormAct2d | nn.BatchNorm2d)):
        return  # another kind of normalisation, which stays
    setattr(parent, conv_name, fuse_conv_bn_eval(conv, bn))
    rest = [bn.drop, bn.act] if isinstance(bn, BatchNormAct2d) else []
    rest = [part for part in (*rest, *behind) if not isinstance(part, nn.Identity)]
    setattr(parent, norm_name, rest[0] if len(rest) == 1 else nn.Sequential(*rest))

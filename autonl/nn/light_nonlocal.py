"""LightNL: the lightweight non-local block (Eq. 8 and 9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autonl.arch.macs import Order, cheaper_order, sampled
from autonl.arch.spec import LightNLSpec, check_resolution
from autonl.nn import kernels
from autonl.nn.shapes import output_sizes

EPSILON = 1e-6  # added to an energy, for maps of zeros


def compact_nonlocal(
    x: Tensor, compact_chs: int, stride: int, order: Order | None = None, energy: bool = False
) -> Tensor:
    """y = x_c x_sc^T x_s / (H W) (Eq. 9) for x of (N, C, H, W), in the given order of association.

    x_c are the first `compact_chs` channels, x_s the positions [::stride, ::stride], x_sc both.
    energy: divided by |x_sc|^2 / (C_r H W) too, image by image.
    """
    height, width = x.shape[-2:]
    positions = height * width
    x_s = sample(x, stride)  # (N, C, S)
    if order is None:
        order = cheaper_order(positions, x_s.shape[-1], compact_chs, x.shape[1])
    # The 1 / (H W) is shared out over the factors: no product, forward or backward, is then a bare
    # sum over H W positions, which leaves fp16's range at rms 2.3 on a 112 x 112 map.
    share = positions**-0.5
    shared = x[:, :compact_chs] * share  # (N, Cr, H, W)
    x_c = shared.flatten(2)  # (N, Cr, HW)
    multiply = multiply_transposed if channels_adjacent(x) else torch.bmm
    if order == "channel":  # x_s, the largest, is left as it is
        x_sc = sample(shared, stride)  # (N, Cr, S)
        gram = multiply(x_s, x_sc.mT)  # (N, C, S) (N, S, Cr) -> (N, C, Cr)
        gram = over_energy(gram, x_sc) if energy else gram
        y = multiply(gram, x_c)  # (N, C, Cr) (N, Cr, HW) -> (N, C, HW)
    else:
        x_c = over_energy(x_c, sample(shared, stride)) if energy else x_c
        affinity = multiply(x_s[:, :compact_chs].mT, x_c)  # (N, S, Cr) (N, Cr, HW) -> (N, S, HW)
        y = multiply(x_s * share, affinity)  # (N, C, S) (N, S, HW) -> (N, C, HW)
    return y.unflatten(2, (height, width))  # (N, C, H, W), in x's memory format


def sample(x: Tensor, stride: int) -> Tensor:
    """The positions [::stride, ::stride] of (N, C, H, W) as (N, C, S): a copy only where positions are left out."""
    if stride == 1:
        return x.flatten(2)
    if channels_adjacent(x):  # rows of channels are copied whole, and stay rows
        return x.permute(0, 2, 3, 1)[:, ::stride, ::stride].flatten(1, 2).mT  # (N, H, W, C) -> (N, S, C) -> (N, C, S)
    return x[:, :, ::stride, ::stride].flatten(2)


def channels_adjacent(x: Tensor) -> bool:
    """Channels-last in memory. Exported graphs are written channels-first, without a guard on strides."""
    return x.stride(1) == 1 and not kernels.exporting()


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a b as (b^T a^T)^T: the columns of the result are adjacent in memory, not its rows."""
    return torch.bmm(b.mT, a.mT).mT


def over_energy(factor: Tensor, shared_x_sc: Tensor) -> Tensor:
    """A factor of the product over |x_sc|^2 / (C_r H W), for (H W)^(-1/2) x_sc of (N, C_r, S)."""
    precise = torch.promote_types(shared_x_sc.dtype, torch.float32)
    square = shared_x_sc.to(precise).square().sum((1, 2), keepdim=True)  # (N, 1, 1)
    return (factor / (square / shared_x_sc.shape[1] + EPSILON)).to(factor.dtype)


def why_not_finite(network: nn.Module) -> str | None:
    """What may be the matter where a network's outputs are infinite."""
    if any(isinstance(block, LightNL) and not block.energy for block in network.modules()):
        return "LightNL grows with the cube of its input, not so with autonl train --nl lightnl_energy"
    return None


class LightNL(nn.Module):
    """Long-range context for a mobile network, 400x cheaper than a non-local block.

        y = x_c x_sc^T x_s / (H W)                       (Eq. 9)
        z = BN(DepthwiseConv3x3(y)) + x                  (Eq. 8)

    takes and returns (N, C, H, W). x_c keeps the first C_r = max(1, int(ratio C)) channels, x_s one position
    in stride x stride, S = ceil(H / stride) ceil(W / stride) of them, x_sc both. The BN's gamma is zero
    at birth, so a fresh block is the identity.

    The product associates in two orders with the same result and different MACs:

        channel   x_c (x_sc^T x_s)      (S + H W) C_r C     an affinity of C x C_r channels
        spatial   (x_c x_sc^T) x_s      H W S (C_r + C)     an affinity of H W x S positions

    The cheaper one for the shape at hand is taken. `freeze_association` fixes it for one input size,
    which an exported graph needs: there a choice by shape would become a guard that refuses other sizes.

    energy=True divides y by |x_sc|^2 / (C_r H W) too, image by image: the same MACs, and the block grows with x instead
    of with its cube. As published, an image whose features are a few times larger than usual leaves every
    further LightNL a cube larger, up to infinity, and the rare ones among the training images set the BN's scale, which
    leaves the branch next to nothing for all others. (In float16 the Gram matrix is made before it is divided: on a map
    of 56 x 56 that ends at an rms of 45.)

    On a GPU `fused = True` lets `nn.kernels` do all of this in a few launches. It is off because they are compiled at
    their first use, which a short training does not earn back: see docs/speed.md.
    """

    fused = False

    def __init__(
        self,
        channels: int,
        ratio: float = 0.25,
        stride: int = 2,
        *,
        energy: bool = False,
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.energy = energy
        self.compactness = LightNLSpec(ratio, stride)
        self.compact_chs = self.compactness.compact_chs(channels)
        self.stride = stride
        self.order: Order | None = None
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=bn_eps, momentum=bn_momentum)
        nn.init.zeros_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            members: Any = self._modules  # as attributes they are slow to find
            settings = self.compact_chs, self.stride, self.energy_eps
            z = kernels.lightnl(x, members["depthwise"], members["bn"], settings)
            if z is not None:
                return z
        y = compact_nonlocal(x, self.compact_chs, self.stride, self.order, self.energy)  # (N, C, H, W)
        return self.bn(self.depthwise(y)) + x

    @property
    def energy_eps(self) -> float:
        """What is added to the energy that y is divided by; 0: y is not divided."""
        return EPSILON if self.energy else 0.0

    def order_at(self, height: int, width: int) -> Order:
        """The cheaper order on a map of that size."""
        samples = sampled(height, width, self.stride)
        return cheaper_order(height * width, samples, self.compact_chs, self.bn.num_features)

    def extra_repr(self) -> str:
        order = "by shape" if self.order is None else self.order
        energy = ", energy=True" if self.energy else ""
        return f"ratio={self.compactness.ratio}, stride={self.stride}, order={order}{energy}"


def freeze_association(model: nn.Module, resolution: tuple[int, int] | None) -> nn.Module:
    """Fix the association order of every non-local block for images of (height, width); None frees it again.

    Other sizes still compute the same result, in an order that may cost more. Returns the model.
    Do it before torch.export, and before torch.compile where images come in many sizes: each order pattern would be
    compiled anew.
    """
    blocks: dict[str, Any] = {name: m for name, m in model.named_modules() if hasattr(m, "order_at")}
    sizes = {}
    if resolution is not None:
        check_resolution("resolution", resolution)
        sizes = output_sizes(model, blocks, resolution)
    for name, block in blocks.items():
        block.order = block.order_at(*sizes[name][1:]) if sizes else None
    return model

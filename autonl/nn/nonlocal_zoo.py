"""The operators that LightNL is compared with (Table 2), behind one interface.

Each takes and returns (N, C, H, W), adds its branch to x, and is the identity at birth: the BN that ends the
branch starts with gamma zero. Keys, queries and values keep all C channels, as in the paper's table.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autonl.arch.macs import PYRAMID, Order, cheaper_order
from autonl.arch.spec import OPERATORS, LightNLSpec
from autonl.errors import refuse_name
from autonl.nn.light_nonlocal import LightNL, compact_nonlocal

Transforms = Literal["separate", "shared key", "all shared", "none"]


class BNSettings(TypedDict):
    bn_eps: float
    bn_momentum: float


class NonLocal(nn.Module):
    """z = BN(W_z y) + x with y = theta(x) phi(x)^T g(x) / positions attended to (Eq. 1 to 7).

    transforms  which 1x1 convolutions there are: theta, phi and g ("separate", Eq. 1), theta and g (Eq. 3),
                g for all three (Eq. 5), none (Eq. 7)
    associate   take the cheaper order (Levi et al., Eq. 4) instead of always the H W x H W affinity
    pyramid     attend to keys and values pooled to these grids (Zhu et al.) instead of to all positions
    """

    def __init__(
        self,
        channels: int,
        transforms: Transforms = "none",
        *,
        associate: bool = True,
        pyramid: tuple[int, ...] = (),
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
    ) -> None:
        super().__init__()

        def pointwise() -> nn.Conv2d:
            return nn.Conv2d(channels, channels, 1, bias=False)

        self.associate = associate
        self.order: Order | None = None
        self.pyramid = pyramid
        self.g = nn.Identity() if transforms == "none" else pointwise()
        self.theta = pointwise() if transforms in ("separate", "shared key") else None
        self.phi = pointwise() if transforms == "separate" else None
        self.w_z = pointwise()
        self.bn = nn.BatchNorm2d(channels, eps=bn_eps, momentum=bn_momentum)
        nn.init.zeros_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        value = self.g(x)
        query = value if self.theta is None else self.theta(x)
        key = query if self.phi is None else self.phi(x)
        query, key, value = query.flatten(2), self.attended(key), self.attended(value)  # (N, C, HW), 2 x (N, C, S)
        # as in compact_nonlocal, 1 / S is shared out so that no product is a bare sum over positions
        share = key.shape[-1] ** (-1 / 3)
        query, key, value = query * share, key * share, value * share
        chs = x.shape[1]
        order = self.order or cheaper_order(query.shape[-1], key.shape[-1], chs, chs)
        if self.associate and order == "channel":
            gram = value @ key.mT  # (N, C, S) (N, S, C) -> (N, C, C)
            y = gram @ query  # (N, C, C) (N, C, HW) -> (N, C, HW)
        else:
            affinity = key.mT @ query  # (N, S, C) (N, C, HW) -> (N, S, HW)
            y = value @ affinity  # (N, C, S) (N, S, HW) -> (N, C, HW)
        return self.bn(self.w_z(y.unflatten(2, x.shape[-2:]))) + x

    def order_at(self, height: int, width: int) -> Order:
        chs, positions = self.bn.num_features, height * width
        samples = sum(grid * grid for grid in self.pyramid) if self.pyramid else positions
        return cheaper_order(positions, samples, chs, chs) if self.associate else "spatial"

    def attended(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, S): all positions, or the pyramid's cells."""
        if not self.pyramid:
            return x.flatten(2)
        return torch.cat([F.adaptive_avg_pool2d(x, grid).flatten(2) for grid in self.pyramid], dim=2)


class CompactNonLocal(nn.Module):
    """z = BN(W_z y) + x with LightNL's compact y (Eq. 9) and a 1x1 convolution in place of the depthwise one."""

    def __init__(
        self, channels: int, ratio: float = 0.25, stride: int = 2, *, bn_eps: float = 1e-5, bn_momentum: float = 0.1
    ) -> None:
        super().__init__()
        self.compact_chs = LightNLSpec(ratio, stride).compact_chs(channels)
        self.stride = stride
        self.order: Order | None = None
        self.w_z = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=bn_eps, momentum=bn_momentum)
        nn.init.zeros_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.w_z(compact_nonlocal(x, self.compact_chs, self.stride, self.order))) + x

    order_at = LightNL.order_at


class DepthwiseBranch(nn.Module):
    """The control: LightNL's depthwise kernel, BN and skip with no affinity, z = BN(DepthwiseConv3x3(x)) + x."""

    def __init__(self, channels: int, *, bn_eps: float = 1e-5, bn_momentum: float = 0.1) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=bn_eps, momentum=bn_momentum)
        nn.init.zeros_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.depthwise(x)) + x


def create_operator(
    operator: str, channels: int, ratio: float, stride: int, *, bn_eps: float = 1e-5, bn_momentum: float = 0.1
) -> nn.Module:
    """One operator of Table 2 by name; ratio and stride matter to LightNL and eq9 alone."""
    bn = BNSettings(bn_eps=bn_eps, bn_momentum=bn_momentum)
    match operator:
        case "lightnl":
            return LightNL(channels, ratio, stride, **bn)
        case "lightnl_energy":
            return LightNL(channels, ratio, stride, energy=True, **bn)
        case "wang":
            return NonLocal(channels, "separate", associate=False, **bn)
        case "levi":
            return NonLocal(channels, "separate", **bn)
        case "zhu":
            return NonLocal(channels, "separate", pyramid=PYRAMID, **bn)
        case "eq3":
            return NonLocal(channels, "shared key", **bn)
        case "eq5":
            return NonLocal(channels, "all shared", **bn)
        case "eq7":
            return NonLocal(channels, "none", **bn)
        case "eq9":
            return CompactNonLocal(channels, ratio, stride, **bn)
        case "depthwise":
            return DepthwiseBranch(channels, **bn)
    refuse_name("operator", operator, OPERATORS)

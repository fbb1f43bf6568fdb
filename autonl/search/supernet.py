"""One network that holds every network of a space: the largest one, its smaller candidates as masks.

The weights are those of the largest network, under the same names; every candidate is a prefix of them (channels,
hidden SE units), a core (kernels) or a grid (positions). A closed gate is exactly the identity.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from autonl.arch.codec import resolution_from
from autonl.arch.macs import sampled
from autonl.models import build
from autonl.nn.light_nonlocal import EPSILON
from autonl.search.cost import Cost
from autonl.search.evidence import affinity_distances, location_evidence, squeeze_evidence, weight_evidence
from autonl.search.gates import Gates, Reached
from autonl.search.masks import BlockMasks, Candidates, Masks
from autonl.search.space import Space


class SuperNet(nn.Module):
    """forward(x) gives logits under the gates' present choice; `macs()` what a choice costs.

    cost, where given, is what the search keeps within its budget in place of MACs.
    """

    def __init__(self, space: Space, cost: nn.Module | None = None) -> None:
        super().__init__()
        self.space = space
        self.resolution = resolution_from(space.resolution)
        self.gates = Gates(space)
        self.count = Cost(space, self.resolution)
        self.cost = cost or self.count
        self.network: Any = build(space.spec(space.largest))
        self.candidates = [
            Candidates.of(space, block.conv_pw.in_channels, block.conv_pwl.out_channels) for block in self.searched()
        ]
        self.masks = Masks(self.candidates, [block.conv_pwl.out_channels for block in self.searched()])

    def searched(self) -> list[Any]:
        """timm's blocks that the gates act on: all but the fixed first one."""
        return [block for stage in self.network.blocks for block in stage][1:]

    def forward(self, x: Tensor, gates: Tensor | None = None, observing: bool = False) -> Tensor:
        """gates: as they stand, where none are given; observing: gather evidence on the way."""
        network = self.network
        masks = self.masked(self.reached(gates))
        x = network.bn1(network.conv_stem(x))
        x = network.blocks[0][0](x)
        evidence = []
        for block, candidates, mask in zip(self.searched(), self.candidates, masks, strict=True):
            seen: list[Tensor] | None = [] if observing else None
            x = super_block(x, block, candidates, mask, seen)
            if seen is not None:
                evidence.append(torch.cat([weight_evidence(block, candidates), *seen]))
        if evidence:
            self.gates.observe(torch.stack(evidence))
        return network.forward_head(network.bn2(network.conv_head(x)))

    def masked(self, reached: Reached) -> list[BlockMasks]:
        norms = [block.bn3[1].bn for block in self.searched()] if self.space.ratios else []
        return self.masks(reached, [(norm.weight, norm.bias) for norm in norms])

    def macs(self, gates: Tensor | None = None) -> Tensor:
        """Multiply-accumulates under the gates (default: as they are), in float64, differentiable."""
        return cast(Tensor, self.count(self.reached(gates)))

    def reached(self, gates: Tensor | None = None) -> Reached:
        return Reached.by(self.gates() if gates is None else gates, self.gates.columns)


def super_block(
    x: Tensor, block: Any, candidates: Candidates, masks: BlockMasks, seen: list[Tensor] | None = None
) -> Tensor:
    """timm's inverted residual under masks; `seen` gathers the evidence of SE, location, ratio and stride."""
    shortcut = x
    x = block.bn1(block.conv_pw(x))
    depthwise = block.conv_dw
    x = F.conv2d(x, depthwise.weight * masks.kernel, None, depthwise.stride, depthwise.padding, groups=depthwise.groups)
    x = block.bn2(x)
    if candidates.squeezed:
        x = super_squeeze(x, block.se, candidates, masks, seen)
    x = F.conv2d(x, block.conv_pwl.weight * masks.mid)
    if candidates.compact:
        projection_bn, lightnl = block.bn3
        x = projection_bn(x)
        if seen is not None:
            seen.append(location_evidence(projection_bn, lightnl.bn))
        x = super_lightnl(x, lightnl, candidates, masks, seen)
    else:
        x = block.bn3(x)
    return torch.addcmul(shortcut, masks.keep.to(x.dtype), x) if block.has_skip else x


def super_squeeze(x: Tensor, se: Any, candidates: Candidates, masks: BlockMasks, seen: list[Tensor] | None) -> Tensor:
    """Squeeze and excite with a prefix of the hidden units; without it x is scaled by one."""
    pooled = x.mean((2, 3), keepdim=True)
    hidden = se.act1(F.conv2d(pooled, se.conv_reduce.weight * masks.mid, se.conv_reduce.bias))
    scale = se.gate(F.conv2d(hidden, se.conv_expand.weight * masks.se, se.conv_expand.bias))
    if seen is not None:
        seen.append(squeeze_evidence(scale, hidden, se.conv_expand.weight, candidates.squeezed))
    return x * torch.lerp(torch.ones_like(scale), scale, masks.squeeze.to(scale.dtype))


def super_lightnl(
    x: Tensor, lightnl: Any, candidates: Candidates, masks: BlockMasks, seen: list[Tensor] | None
) -> Tensor:
    """y = x_c diag(m) (x_sc^T x_s) / (H W): a ratio is a prefix mask m, a stride a share of the positions' sum."""
    height, width = x.shape[-2:]
    compact_chs = candidates.compact[-1]
    share = (height * width) ** (-1 / 3)
    scaled = x * share
    x_c = scaled[:, :compact_chs].flatten(2)  # (N, Cr, HW)
    grams = []  # one a stride, from the fewest positions to the most
    for stride in candidates.strides:
        x_s = scaled[:, :, ::stride, ::stride].flatten(2)  # (N, C, S)
        x_sc = x_c if stride == 1 else x_s[:, :compact_chs]
        grams.append(x_s @ x_sc.mT)  # (N, C, S) (N, S, Cr) -> (N, C, Cr)
    gram = grams[0]
    for before, after, reached in zip(grams, grams[1:], masks.stride[1:], strict=False):
        gram = gram + reached * (after - before)  # the positions that a finer grid adds
    if lightnl.energy:  # of the channels and positions that are chosen; the diagonal holds x_sc^2
        diagonal = gram[:, :compact_chs].diagonal(dim1=1, dim2=2).float() * masks.ratio  # (N, Cr)
        energy = diagonal.sum(1) / masks.ratio.sum() * share + EPSILON  # (N,)
        gram = (gram / energy.view(-1, 1, 1)).to(gram.dtype)
    y = (gram * masks.ratio.to(gram.dtype)) @ x_c  # (N, C, Cr) (N, Cr, HW) -> (N, C, HW)
    if seen is not None:
        counts = [sampled(height, width, stride) for stride in candidates.strides]
        seen.append(affinity_distances([g[:, :compact_chs] for g in grams], counts, candidates.compact))
    u = lightnl.depthwise(y.unflatten(2, (height, width)))
    return x + functional_call(lightnl.bn, dict(zip(("weight", "bias"), masks.affine, strict=True)), (u,))

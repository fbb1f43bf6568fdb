"""MACs as a differentiable function of the gates, through the one closed form of arch/macs.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autonl.arch.macs import inverted_residual_macs, layer_costs, nonlocal_macs
from autonl.arch.spec import LightNLSpec, map_sizes, share_of
from autonl.search.gates import Reached
from autonl.search.space import Space


class Cost(nn.Module):
    """Counts in float64, which is exact; float32 would be up to 16.7M only."""

    fixed: Tensor
    in_chs: Tensor
    out_chs: Tensor
    in_positions: Tensor
    out_positions: Tensor
    expand_steps: Tensor
    kernel_steps: Tensor
    se_steps: Tensor
    nonlocal_table: Tensor

    def __init__(self, space: Space, resolution: tuple[int, int]) -> None:
        super().__init__()
        spec = space.spec(space.largest)
        layers = layer_costs(spec, resolution)
        positions = [height * width for height, width in map_sizes(spec, resolution)]
        searched = layers[2:-2]  # behind the stem and the fixed first block, before head and classifier
        in_chs = [layer.in_chs for layer in searched]

        def constant(name: str, values: object) -> None:
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64), persistent=False)

        constant("fixed", sum(layer.macs for layer in layers) - sum(layer.macs for layer in searched))
        constant("in_chs", in_chs)
        constant("out_chs", [layer.out_chs for layer in searched])
        constant("in_positions", positions[1:-1])
        constant("out_positions", positions[2:])
        constant("expand_steps", _steps(space.expands))
        constant("kernel_steps", _steps([kernel**2 for kernel in space.kernels]))
        widths = [[share_of(chs, ratio) for ratio in space.se] or [0] for chs in in_chs]
        constant("se_steps", [_steps(row) for row in widths])
        constant(
            "nonlocal_table",  # (blocks, ratios, strides)
            [
                [
                    [
                        nonlocal_macs(space.operator, place, layer.out_chs, layer.height, layer.width)
                        for place in (LightNLSpec(ratio, stride) for stride in space.strides)
                    ]
                    for ratio in space.ratios
                ]
                or [[0] * len(space.strides)]
                for layer in searched
            ],
        )

    def forward(self, reached: Reached) -> Tensor:
        return self.fixed + self.blocks(reached).sum(-1)

    def blocks(self, reached: Reached) -> Tensor:
        """(blocks,): a block that is left out costs nothing, whatever its other gates say."""
        residual = inverted_residual_macs(
            self.in_chs,
            self.in_chs * (reached.expand.double() * self.expand_steps).sum(-1),
            self.out_chs,
            (reached.kernel.double() * self.kernel_steps).sum(-1),
            reached.squeeze.double() * (reached.se.double() * self.se_steps).sum(-1),
            self.in_positions,
            self.out_positions,
        )
        ratio, stride = chosen(reached.ratio.double()), chosen(reached.stride.double())
        compact = (ratio[..., :, None] * stride[..., None, :] * self.nonlocal_table).sum((-1, -2))
        return reached.keep.double() * (residual + reached.nonlocal_.double() * compact)


def _steps(sizes: Sequence[int]) -> list[int]:
    """What each candidate adds to the one before it."""
    return [after - before for before, after in itertools.pairwise([0, *sizes])]


def chosen(reached: Tensor) -> Tensor:
    """Reached candidates (1, 1, 0) -> the one chosen (0, 1, 0): reached and the next one not."""
    return reached - torch.cat([reached[..., 1:], torch.zeros_like(reached[..., :1])], -1)

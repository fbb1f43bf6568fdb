"""Where LightNL looks: one row of a block's affinity, the weights of all sampled positions in the sum at one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autonl.errors import AutoNLError
from autonl.nn.insertion import has_projection
from autonl.nn.light_nonlocal import LightNL, over_energy
from autonl.nn.nonlocal_zoo import CompactNonLocal


@dataclass(frozen=True)
class Affinities:
    """The affinity rows of one block for some positions in one image."""

    block: int
    rows: Tensor  # (P, ceil(H / stride), ceil(W / stride))
    stride: int  # one position in stride x stride is looked at
    map_size: tuple[int, int]  # H, W of the block's map
    share: float  # norm of what LightNL adds / norm of what it adds it to, over the whole map


def affinity_row(x: Tensor, position: tuple[int, int], compact_chs: int, stride: int, energy: bool = False) -> Tensor:
    """a(p, q) = x_c(p) . x_sc(q) / (H W) for the position p = (row, column) of a map x (C, H, W) and all sampled q.

    These are the weights in LightNL's sum, y(p) = sum_q a(p, q) x_s(q) (Eq. 9); with energy they are divided by
    |x_sc|^2 / (C_r H W) too. The result is (ceil(H / stride), ceil(W / stride)); nothing larger is made.
    """
    positions = x.shape[-2] * x.shape[-1]
    row, column = position
    sampled = x[:compact_chs, ::stride, ::stride]  # (Cr, Hs, Ws)
    weights = x[:compact_chs, row, column] @ sampled.flatten(1) / positions  # (Cr) (Cr, S) -> (S)
    if energy:
        weights = over_energy(weights, positions**-0.5 * sampled.flatten(1)[None])[0, 0]  # (S,), (1, Cr, S)
    return weights.unflatten(0, sampled.shape[1:])


@torch.no_grad()
def affinities(
    model: Any, image: Tensor, positions: Sequence[tuple[int, int]], blocks: Collection[int] | None = None
) -> list[Affinities]:
    """The rows of some blocks for some positions in an image, in one pass through the network.

    image      (1, 3, H, W), normalised as the network wants it
    positions  (x, y) in pixels of that image
    blocks     numbers as in `autonl profile`; default: at every size of the map the last that has LightNL
    """
    found = lightnl_blocks(model)
    if not found:
        raise AutoNLError("none of the network's blocks has LightNL: there is no affinity to show")
    for number in blocks or ():
        if number not in found:
            listed = ", ".join(map(str, found))
            raise AutoNLError(f"block {number}: has no LightNL; allowed, numbered as by autonl profile: {listed}")
    chosen = list(found) if blocks is None else list(blocks)
    height, width = image.shape[-2:]
    for x, y in positions:
        if not (0 <= x < width and 0 <= y < height):
            raise AutoNLError(
                f"position {x},{y}: outside of the {width}x{height} pixels that the network sees; "
                f"allowed: x from 0 to {width - 1}, y from 0 to {height - 1}"
            )
    passed: dict[int, tuple[Tensor, Tensor]] = {}  # what went into a block's LightNL, and what came out
    with ExitStack() as hooks:
        for number in chosen:

            def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor, number: int = number) -> None:
                passed[number] = inputs[0][0].float(), output[0].float()  # (C, H, W)

            hooks.callback(found[number].register_forward_hook(keep).remove)
        model(image)
    if blocks is None:
        chosen = sorted({before.shape[-2:]: number for number, (before, _) in sorted(passed.items())}.values())
    return [rows_of(number, found[number], *passed[number], positions, (height, width)) for number in chosen]


def rows_of(
    number: int,
    lightnl: Any,
    before: Tensor,
    after: Tensor,
    positions: Sequence[tuple[int, int]],
    image_size: tuple[int, int],
) -> Affinities:
    """The rows of one block, whose LightNL made `after` (C, H, W) of `before`."""
    height, width = before.shape[-2:]
    image_height, image_width = image_size
    places = [(y * height // image_height, x * width // image_width) for x, y in positions]
    energy = isinstance(lightnl, LightNL) and lightnl.energy
    rows = [affinity_row(before, place, lightnl.compact_chs, lightnl.stride, energy) for place in places]
    share = float((after - before).norm() / before.norm().clamp(min=1e-30))
    return Affinities(number, torch.stack(rows), lightnl.stride, (height, width), share)


def lightnl_blocks(model: nn.Module) -> dict[int, Any]:
    """The LightNL of every block that has one, by the number that `autonl profile` gives the block.

    The rival eq9 makes its affinity as LightNL does and counts as one.
    """
    blocks = [module for module in model.modules() if has_projection(module)]
    kinds = (LightNL, CompactNonLocal)
    found = {number: [m for m in block.modules() if isinstance(m, kinds)] for number, block in enumerate(blocks)}
    return {number: inside[0] for number, inside in found.items() if inside}

"""How the kernels divide their work: a small table, chosen on an H200 in bf16. Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work."""

    positions: int  # a step
    channels: int
    warps: int
    bands: int = 1  # programs that share an image's positions
    step: int = 0  # positions a step of the depthwise kernel; 0: as above
    stages: int = 3  # of the software pipeline of loads that feed products
    gram_parts: int = 0  # programs of a kernel of its own that share an image's G; 0: every band makes G for itself
    gram_positions: int = 128  # a step of that kernel
    gram_stages: int = 3
    spatial: bool = False  # inference on a map of one step: the affinity between positions instead of G


def power_of_two(value: int, low: int, high: int) -> int:
    """The smallest power of two that holds value, within the bounds."""
    return min(max(triton.next_power_of_2(value), low), high)


def compact_width(compact_chs: int) -> int:
    return power_of_two(compact_chs, 16, 128)


def forward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    """Chosen at batch 256."""
    if dtype == torch.float32:  # products without matrix units: small tiles, or the registers spill
        return Tile(positions=32, channels=power_of_two(chs, 16, 32), warps=4)
    if positions <= 64:
        return Tile(power_of_two(positions, 16, 64), power_of_two(chs, 16, 64), warps=4, stages=1)
    if positions <= 256:
        return Tile(positions=64, channels=power_of_two(chs, 16, 32), warps=4, stages=2)
    if positions <= 1024:
        return Tile(positions=128, channels=16 if chs % 32 else 32, warps=4)
    return Tile(64, power_of_two(chs, 16, 32), warps=4, bands=-(-positions // 256), gram_parts=1)


def depthwise_backward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    """Chosen at batch 512."""
    if dtype == torch.float32:
        return Tile(positions=16, channels=power_of_two(chs, 16, 32), warps=4)
    if positions <= 64:
        return Tile(power_of_two(positions, 16, 64), power_of_two(chs, 16, 64), warps=4, stages=1)
    if positions <= 256 or positions > 1024:
        return Tile(64, power_of_two(chs, 16, 32), warps=4, bands=-(-positions // 512), stages=1)
    return Tile(128, 16 if chs % 32 else 32, warps=4, stages=1)


def input_backward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(positions=16, channels=power_of_two(chs, 16, 32), warps=4)
    channels = 32 if 64 < chs <= 128 else power_of_two(chs, 16, 64)
    return Tile(power_of_two(positions, 16, 64), channels, warps=4, stages=1)


def pass_tile(chs: int, positions: int) -> Tile:
    """For kernels that only pass over memory: 4096 values a program."""
    channels = power_of_two(chs, 16, 64)
    return Tile(positions=power_of_two(positions, 16, 4096 // channels), channels=channels, warps=4)


def forward_alternatives(chs: int, positions: int) -> list[Tile]:
    """Tiles for 16-bit inputs that may beat `forward_tile`: `benchmarks.lightnl --settle` times them."""
    chosen = forward_tile(chs, positions, torch.bfloat16)
    if positions <= 64:
        spatial = replace(chosen, spatial=True, step=32)
        return [
            spatial,
            replace(spatial, step=16),
            replace(spatial, positions=64, channels=32),
            replace(chosen, step=16),
        ]
    if positions <= 256:
        return [replace(chosen, step=128), replace(chosen, stages=3), replace(chosen, warps=8)]
    if positions <= 1024:
        long = [replace(chosen, step=256), replace(chosen, warps=8), replace(chosen, positions=256, warps=8)]
        shared = [replace(chosen, bands=bands, gram_parts=parts) for bands, parts in ((1, 1), (2, 1), (2, 2), (4, 2))]
        whole = [replace(chosen, positions=64, channels=64, bands=bands, gram_parts=1) for bands in (3, 4, 7)]
        wide = replace(chosen, channels=32, bands=2, gram_parts=1)
        return unique([*long, *shared, *whole, wide, replace(wide, warps=8), replace(shared[1], step=256)])
    shared = replace(chosen, gram_parts=2, gram_positions=256)
    found = [replace(shared, bands=bands) for bands in (7, 13, 25, 49)]
    found += [replace(shared, step=128), replace(shared, step=128, warps=8), replace(shared, warps=2)]
    found += [replace(shared, positions=128, bands=bands) for bands in (7, 13, 25)]
    found += [replace(shared, positions=128, warps=8), replace(shared, stages=2), replace(shared, gram_stages=2)]
    found += [replace(shared, channels=16), replace(shared, channels=16, positions=128), replace(shared, gram_parts=4)]
    return found


def unique(tiles: list[Tile]) -> list[Tile]:
    return list(dict.fromkeys(tiles))


def backward_alternatives(chs: int, positions: int) -> list[Tile]:
    """The same for `depthwise_backward_tile`."""
    chosen = depthwise_backward_tile(chs, positions, torch.bfloat16)
    found = [replace(chosen, step=32), replace(chosen, warps=8), replace(chosen, stages=2)]
    if positions > 64:
        found += [replace(chosen, step=2 * chosen.positions), replace(chosen, bands=2 * chosen.bands)]
    if positions > 1024:
        found += [replace(chosen, bands=2 * chosen.bands, step=128), replace(chosen, positions=128)]
    return found

"""How the kernels divide their work: a small table, chosen on an H200 in bf16. Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

MANY = 384  # programs that keep an H200 busy, about three a multiprocessor


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work."""

    positions: int  # a step
    channels: int
    warps: int
    bands: int = 1  # programs that share an image's positions
    step: int = 0  # positions a step of the depthwise kernel; 0: as above
    stages: int = 3  # of the software pipeline of loads that feed products
    gram_parts: int = 0  # programs of a kernel of its own that share an image's G (one where `gathered`); 0: every band
    #                      makes G for itself
    gram_positions: int = 128  # a step of that kernel, or of G where `gathered`
    spatial: bool = False  # inference on a map of one step: the affinity between positions instead of G
    gathered: bool = False  # the kernels of `gathered`; only where `gathered_fits`
    registers: int = 0  # a thread has at most, so that another program fits beside the others; 0: what it likes


def power_of_two(value: int, low: int, high: int) -> int:
    """The smallest power of two that holds value, within the bounds."""
    return min(max(triton.next_power_of_2(value), low), high)


def compact_width(compact_chs: int) -> int:
    return power_of_two(compact_chs, 16, 128)


def gathered_fits(chs: int, compact_chs: int, positions: int) -> bool:
    """Where the kernels of `gathered` are worth a try, with 16-bit inputs: eight neighbours' compact channels are 128
    columns of a product at most, all channels are one block, and positions have an exact row (`place_of`)."""
    return compact_chs <= 16 and chs <= 64 and 256 < positions < 2**20


def gathered_tile(chs: int, positions: int) -> Tile:
    return Tile(64, power_of_two(chs, 16, 64), warps=4, bands=-(-positions // 784), stages=1, gathered=True)


def gathered_forward_tile(images: int, chs: int, positions: int, training: bool) -> Tile:
    """In one launch where a program an image is enough: smaller maps, in training larger ones too of many images."""
    tile = gathered_tile(chs, positions)
    apart = replace(tile, gram_parts=1, gram_positions=256)
    if training:
        alone = positions <= 1024 or (positions <= 4096 and images >= MANY)
        return replace(replace(tile, bands=1) if alone else apart, registers=112 if chs <= 32 else 0)
    if positions <= 1024:
        return replace(tile, positions=128, warps=8, bands=1)
    return replace(apart, bands=-(-positions // 1100))


def forward_tile(images: int, chs: int, compact_chs: int, positions: int, dtype: torch.dtype, training: bool) -> Tile:
    """Chosen at batch 256 for inference, 512 for training."""
    if dtype == torch.float32:  # products without matrix units: small tiles, or the registers spill
        return Tile(positions=32, channels=power_of_two(chs, 16, 32), warps=4)
    if positions <= 64:
        small = Tile(power_of_two(positions, 16, 64), power_of_two(chs, 16, 64), warps=4, stages=1)
        if training:
            if chs <= 256:
                return replace(small, step=16, registers=80 if compact_chs <= 64 else 0)
            return replace(small, channels=32, step=min(32, small.positions), warps=2)
        return replace(small, step=min(32, small.positions), spatial=True)
    if positions <= 256:
        tile = Tile(positions=64, channels=power_of_two(chs, 16, 32), warps=4, stages=2)
        return replace(tile, step=32) if training else tile
    if gathered_fits(chs, compact_chs, positions):
        return gathered_forward_tile(images, chs, positions, training)
    if positions <= 1024:
        return Tile(positions=128, channels=16 if chs % 32 else 32, warps=4)
    large = Tile(64 if training else 128, power_of_two(chs, 16, 32), warps=4, bands=-(-positions // 448))
    return replace(large, gram_parts=2, gram_positions=256)


def depthwise_backward_tile(chs: int, compact_chs: int, positions: int, dtype: torch.dtype) -> Tile:
    """Chosen at batch 512."""
    if dtype == torch.float32:
        return Tile(positions=16, channels=power_of_two(chs, 16, 32), warps=4)
    if positions <= 64:
        small = Tile(power_of_two(positions, 16, 64), power_of_two(chs, 16, 64), warps=4, stages=1)
        narrow = replace(small, channels=power_of_two(chs, 16, 32), step=min(32, small.positions), warps=2)
        return replace(narrow, registers=128 if chs <= 256 and compact_chs <= 64 else 0)
    if gathered_fits(chs, compact_chs, positions):
        return replace(gathered_tile(chs, positions), registers=128 if chs <= 32 else 0)
    if positions <= 256 or positions > 1024:
        return Tile(64, power_of_two(chs, 16, 32), warps=4, bands=-(-positions // 512), stages=1)
    return Tile(128, 16 if chs % 32 else 32, warps=4, stages=1)


def input_backward_tile(chs: int, positions: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(positions=16, channels=power_of_two(chs, 16, 32), warps=4)
    channels = 32 if 64 < chs <= 128 else power_of_two(chs, 16, 64)
    registers = 64 if positions > 1024 and chs <= 32 else 0
    bands = max(2, -(-positions // 784))  # of the gathered kernel alone
    return Tile(power_of_two(positions, 16, 64), channels, warps=4, bands=bands, stages=1, registers=registers)


def pass_tile(chs: int, positions: int, values: int = 4096) -> Tile:
    """For kernels that only pass over memory, with so many values a tile."""
    channels = power_of_two(chs, 16, 64)
    return Tile(positions=power_of_two(positions, 16, values // channels), channels=channels, warps=4)

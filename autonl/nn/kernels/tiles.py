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
    """Tiles for 16-bit inputs that may beat `forward_tile`: `benchmarks.lightnl --settle` times them.

    What speaks for them stands in the compiler's report for sm_90. On maps above 32 x 32 the 256 programs of
    gram_kernel fill a fifth of the GPU: more parts. On 7 x 7 maps G of 80 compact channels is padded to 128 rows and
    takes 125 registers a thread, the spatial form 80. Small steps of the depthwise kernel save up to a third of them.
    """
    chosen = forward_tile(chs, positions, torch.bfloat16)
    steps = [replace(chosen, step=step) for step in (16, 32) if step < chosen.positions]
    if positions <= 64:
        spatial = replace(chosen, spatial=True, step=16)
        narrow = replace(spatial, channels=32)
        found = [spatial, replace(spatial, step=32), replace(spatial, step=0), narrow, replace(narrow, step=32)]
        return unique([*found, replace(spatial, warps=8), *steps, replace(chosen, warps=8)])
    if positions <= 256:
        return [*steps, replace(chosen, gram_parts=1, step=16), replace(chosen, bands=2, gram_parts=1, step=16)]
    if positions <= 1024:
        short = replace(chosen, positions=64, step=16)
        wide = replace(short, channels=power_of_two(chs, 16, 64))
        found = [replace(form, bands=bands, gram_parts=2) for form in (short, wide) for bands in (2, 4)]
        return unique([*steps, replace(chosen, stages=4), replace(short, warps=2), *found])
    shares = [replace(chosen, gram_parts=parts) for parts in (2, 4, 7)]
    found = [replace(shares[1], step=step) for step in (16, 32)]
    found += [replace(shares[2], step=16), replace(shares[1], gram_positions=256, gram_stages=2, step=16)]
    found += [replace(found[0], bands=bands) for bands in (7, 25)]
    return [*shares, *found, replace(chosen, gram_positions=256), replace(chosen, gram_stages=4)]


def unique(tiles: list[Tile]) -> list[Tile]:
    return list(dict.fromkeys(tiles))


def backward_alternatives(chs: int, positions: int) -> list[Tile]:
    """The same for `depthwise_backward_tile`."""
    chosen = depthwise_backward_tile(chs, positions, torch.bfloat16)
    found = [replace(chosen, step=step) for step in (16, 32) if step < chosen.positions]
    if chosen.channels > 32:
        found += [replace(chosen, channels=32, step=step) for step in (16, 32)]
    if positions > 256:
        found += [replace(found[0], bands=2 * chosen.bands)]
    return found

# ruff: noqa: N803 - Triton writes what is known when a kernel is compiled in capitals
"""The way back through `gathered`, in Triton. The same X gives everything but dx:

A       = X^T du                     (9 Cr, C) an image
dG      = sum_t w[t] A[t],   dw[t] = sum_r G[r] A[t, r], summed over the images

WIDE is RP, but 16 at least: no product is narrower.
"""

import triton
import triton.language as tl

from autonl.nn.kernels.backward import sum_taps
from autonl.nn.kernels.gathered import around, load_taps, place_of, side_taps, within, without_padding
from autonl.nn.kernels.pieces import (
    chain,
    compact_tile,
    gram_block,
    half_range,
    mean_diagonal,
    narrow,
    offsets,
    slope_terms,
    slope_tile,
    this_program,
)


@triton.jit
def two_products(a, b, factor, c, d, other_factor):
    """factor a b + other_factor c d in float32; the factors, as `narrow` makes them, are 1 but for float16."""
    total = tl.dot(a, b, input_precision="ieee")
    if a.dtype == tl.float16:
        return total * factor + tl.dot(c, d, input_precision="ieee") * other_factor
    else:
        return tl.dot(c, d, total, input_precision="ieee")


@triton.jit
def exact_product(a, slope, total):
    """total + a slope, where a is what x holds and slope (float32) is not rounded to the 8 bits of a bfloat16: dw is
    what is left of large sums that cancel. A second product takes what the first one's rounding leaves."""
    high = half_range(slope, 7000.0, a.dtype)
    total = tl.dot(a, high, total, input_precision="ieee")
    if a.dtype == tl.bfloat16:
        total = tl.dot(a, (slope - high.to(tl.float32)).to(a.dtype), total, input_precision="ieee")
    return total


@triton.jit
def gathered_backward(
    dz, u, x,  # (N, C, H, W) in either memory format
    gram,  # (N, Cr, C) float32
    weight,  # (C, 1, 3, 3)
    gamma,  # (C,)
    statistics,  # (2, C) float32: mean and biased variance
    sums,  # (3, C) float32: d_beta, d_gamma, sum of dz^2
    du,  # (N, H W, C), float16 where x has 16 bits: du / steep
    taps,  # (9, C) like du: the depthwise kernels, the last tap first, divided by their largest weight
    steepness,  # (C,) float32: steep times the largest weight, so that dy = steepness DepthwiseConv3x3(du; taps)
    d_gram,  # (N, bands, Cr, C) float32: a band's x_c^T dy
    d_taps,  # (N, bands, 9, C) float32: a band's dw
    height, width,
    band,  # positions a program makes
    count,  # N H W
    eps,
    CHS: tl.constexpr, COMPACT: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr, WIDE: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """From dz to du, dw and dG, for one block of channels of a band of an image."""
    chain(FOLLOWS, LEADS)
    positions = height * width
    image, begin, end, channel, entry = this_program(positions, band, CB)
    real = channel < CHS
    compact, matrix, both = gram_block(channel, CHS, COMPACT, WIDE)
    dz += image * positions * CHS
    u += image * positions * CHS
    x += image * positions * CHS
    du += image * positions * CHS

    unit, drift, level, steep = slope_terms(statistics, sums, gamma, channel, count, eps, CHS)
    beside_sum = tl.zeros((8 * RP, CB), dtype=tl.float32)
    itself_sum = tl.zeros((WIDE, CB), dtype=tl.float32)
    for start in range(begin, end, P):
        position = start + tl.arange(0, P)
        there = position < end
        inside = there[:, None] & real[None, :]
        place = offsets(position, channel, positions, CHS, CHANNELS_LAST)
        slope = slope_tile(dz, u, place, inside, unit, drift, level)
        own_place = position[:, None] * CHS + channel[None, :]
        tl.store(du + own_place, half_range(slope, 7000.0, du.dtype.element_ty), mask=inside)
        # where not `there`, these two are zero
        beside = around(x, start, end, height, width, CHS, COMPACT, CHANNELS_LAST, P, RP)  # (P, 8 RP)
        itself = compact_tile(x, position, compact, there, positions, CHS, COMPACT, CHANNELS_LAST)  # (P, WIDE)
        beside_sum = exact_product(tl.trans(beside), slope, beside_sum)  # (8 RP, P) (P, CB)
        itself_sum = exact_product(tl.trans(itself), slope, itself_sum)  # (WIDE, P) (P, CB)

    sides, centre = load_taps(weight, channel, CHS)  # (8, CB), (CB,)
    gram += image * (COMPACT * CHS)
    image_gram = tl.load(gram + matrix, mask=both, other=0.0)  # (WIDE, CB)
    if ENERGY_EPS > 0:
        image_gram /= mean_diagonal(gram, CHS, COMPACT, WIDE) + ENERGY_EPS
    d_taps += entry * (9 * CHS)
    tl.store(d_taps + 4 * CHS + channel, tl.sum(itself_sum * image_gram, axis=0) * steep, mask=real)
    few = without_padding(image_gram, RP, WIDE, CB)
    by_tap = tl.reshape(beside_sum, (8, RP, CB))
    d_sides = tl.sum(by_tap * few[None, :, :], axis=1) * steep[None, :]  # (8, CB)
    tl.store(d_taps + side_taps()[:, None] * CHS + channel[None, :], d_sides, mask=real[None, :])
    dg = without_padding(itself_sum * centre[None, :], RP, WIDE, CB) + tl.sum(by_tap * sides[:, None, :], axis=0)
    _, small_matrix, small_both = gram_block(channel, CHS, COMPACT, RP)
    tl.store(d_gram + entry * (COMPACT * CHS) + small_matrix, dg * steep[None, :], mask=small_both)

    if entry == 0:  # what the next kernel needs of every channel
        tap = tl.arange(0, 16)[:, None]
        kernel = tl.load(weight + channel[None, :] * 9 + tap, mask=(tap < 9) & real[None, :], other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(kernel), axis=0)
        largest = tl.where(largest > 0, largest, 1.0)
        pointer = taps + (8 - tap) * CHS + channel[None, :]
        tl.store(pointer, (kernel / largest[None, :]).to(taps.dtype.element_ty), mask=(tap < 9) & real[None, :])
        tl.store(steepness + channel, largest * steep, mask=real)


@triton.jit
def depthwise_of_map(
    source, taps, position, channel, height, width, rows_below, CHS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr
):  # fmt: skip
    """DepthwiseConv3x3 of a map (H W, C) at a tile: (P, CB) in the map's dtype."""
    row, col = place_of(position, width)
    real = (channel < CHS)[None, :]
    there = position < height * width
    at_left = there & (col > 0)
    at_right = there & (col < width - 1)
    total = tl.zeros((P, CB), dtype=source.dtype.element_ty)
    for down in range(-1, rows_below):
        on_map = within(row + down, height)
        pointer = source + (position + down * width)[:, None] * CHS + channel[None, :]
        line = taps + (down + 1) * (3 * CHS) + channel[None, :]
        left = tl.load(pointer - CHS, mask=(at_left & on_map)[:, None] & real, other=0.0)
        middle = tl.load(pointer, mask=(there & on_map)[:, None] & real, other=0.0)
        right = tl.load(pointer + CHS, mask=(at_right & on_map)[:, None] & real, other=0.0)
        total += left * tl.load(line, mask=real, other=0.0)
        total += middle * tl.load(line + CHS, mask=real, other=0.0)
        total += right * tl.load(line + 2 * CHS, mask=real, other=0.0)
    return total


@triton.jit
def gathered_input_backward(
    dz, x,  # (N, C, H, W) in either memory format
    gram,  # (N, Cr, C) float32
    d_gram,  # (N, parts, Cr, C) float32: their sum is x_c^T dy
    du, taps, steepness, d_taps,  # as gathered_backward leaves them
    dx,  # like x
    d_weight,  # (C, 1, 3, 3)
    height, width, parts,
    band,  # positions a program makes
    rows_below,  # 2: a run-time bound keeps the loop over the kernel's rows rolled
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """From du and dG to dx, for a band of an image and all channels, which are one block; dw is summed on the way.

    With G and dG padded to (C, C), dx = dz + dy G^T + x_s (dG + dG^T): no product of the compact channels alone. What
    x_sc has through its energy is a diagonal of dG + dG^T.
    """
    chain(FOLLOWS, LEADS)
    positions = height * width
    image, begin, end, channel, entry = this_program(positions, band, CB)
    images = tl.num_programs(2)
    sum_taps(d_taps, d_weight, images * parts, entry, tl.num_programs(1) * images, CHS)
    dz += image * positions * CHS
    x += image * positions * CHS
    du += image * positions * CHS
    dx += image * positions * CHS
    real = (channel < CHS)[None, :]
    _, matrix, both = gram_block(channel, CHS, COMPACT, CB)  # (CB, CB)
    total = tl.zeros((CB, CB), dtype=tl.float32)
    for part in range(0, parts):
        total += tl.load(d_gram + (image * parts + part) * (COMPACT * CHS) + matrix, mask=both, other=0.0)
    both_slopes = (total + tl.trans(total)) / positions
    gram += image * (COMPACT * CHS)
    image_gram = tl.load(gram + matrix, mask=both, other=0.0)
    if ENERGY_EPS > 0:
        energy = mean_diagonal(gram, CHS, COMPACT, CB) + ENERGY_EPS
        image_gram /= energy
        through_energy = -tl.sum(tl.sum(total * image_gram, axis=1), axis=0) / (positions * energy)  # - <dG, G / E>
        own = (channel[:, None] == channel[None, :]) & both
        both_slopes = both_slopes / energy + tl.where(own, 2 * through_energy / COMPACT, 0.0)
    slopes, slope_factor = narrow(both_slopes, x.dtype.element_ty)
    factors, factor = narrow(tl.trans(image_gram), x.dtype.element_ty)
    steep = tl.load(steepness + channel[None, :], mask=real, other=0.0)
    for start in range(begin, end, P):
        position = start + tl.arange(0, P)
        here = (position < end)[:, None] & real
        row, col = place_of(position, width)
        sampled = (row % STRIDE == 0) & (col % STRIDE == 0)
        dy = depthwise_of_map(du, taps, position, channel, height, width, rows_below, CHS, P, CB).to(tl.float32)
        dy = (dy * steep).to(x.dtype.element_ty)  # (P, CB)
        place = offsets(position, channel, positions, CHS, CHANNELS_LAST)
        x_s = tl.load(x + place, mask=sampled[:, None] & here, other=0.0)  # (P, CB)
        branch = two_products(dy, factors, factor, x_s, slopes, slope_factor)  # (P, CB) (CB, CB) -> (P, CB)
        skip = tl.load(dz + place, mask=here, other=0.0).to(tl.float32)
        tl.store(dx + place, (skip + branch).to(dx.dtype.element_ty), mask=here)

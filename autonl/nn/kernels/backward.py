# ruff: noqa: N803 - Triton writes what is known when a kernel is compiled in capitals
"""LightNL backward in Triton. In comments P, CB and RP are a tile's positions, channels and compact channels.

With M = N H W values a channel, v = (u - mean) / sqrt(variance + eps), and everything per image:

    d_beta = sum dz,  d_gamma = sum dz v                                 over the batch
    du     = gamma / sqrt(variance + eps) (dz - d_beta / M - v d_gamma / M)
    dy[p]  = sum_t w[t] du[p - t],   dw[t] = sum_p du[p - t] y[p]        t: the nine taps; y = x_c G again
    dG     = x_c^T dy / (H W)                                            (Cr, C)
    dx     = dz                                                          the skip
           + x_sc dG         at the sampled positions                    through x_s
           + dy G^T          at the first Cr channels                    through x_c
           + x_s dG^T        at both                                     through x_sc

By energy, with the E of `forward`, G / E stands for G, dG is divided by E too, and x_sc has a part in E:

    dx     - 2 x_sc <dG, G / E> / Cr      at both, <,> the sum of all products

`norm_backward_sums` makes the first line, `depthwise_backward` the next three, `input_backward` the last. It also sums
dw over the batch, which as a kernel of its own would keep the GPU waiting.
"""

import triton
import triton.language as tl

from autonl.nn.kernels.pieces import (
    chain,
    compact_tile,
    depthwise_tile,
    gram_block,
    half_range,
    mean_diagonal,
    narrow,
    narrow_affinity,
    neighbours,
    offsets,
    product,
    slope_terms,
    slope_tile,
    store_taps,
    this_program,
)


@triton.jit
def norm_backward_sums(
    dz, u,  # (images, C, positions) in either memory format
    statistics,  # (2, C) float32: mean and biased variance
    sums,  # (chunks, 3, C) float32: a chunk's sums of dz, dz v and dz^2
    positions,
    chunk,  # positions a program
    eps,
    CHS: tl.constexpr, CHANNELS_LAST: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, TILES: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Channels-last maps come in as one long image. Of TILES tiles a step all loads are under way at once."""
    chain(FOLLOWS, LEADS)
    channel = tl.program_id(1) * CB + tl.arange(0, CB)
    real = channel < CHS
    centre = tl.load(statistics + channel, mask=real, other=0.0)
    inverse = tl.rsqrt(tl.load(statistics + CHS + channel, mask=real, other=1.0) + eps)
    image = tl.program_id(2).to(tl.int64) * positions * CHS
    plain_sum = tl.zeros((P, CB), dtype=tl.float32)
    scaled_sum = tl.zeros((P, CB), dtype=tl.float32)
    square_sum = tl.zeros((P, CB), dtype=tl.float32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, positions), P * TILES):
        for tile in tl.static_range(TILES):
            position = start + tile * P + tl.arange(0, P)
            inside = (position < positions)[:, None] & real[None, :]
            place = image + offsets(position.to(tl.int64), channel, positions, CHS, CHANNELS_LAST)
            slope = tl.load(dz + place, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
            plain_sum += slope
            scaled_sum += slope * (value - centre[None, :])
            square_sum += slope * slope
    out = sums + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * (3 * CHS) + channel
    tl.store(out, tl.sum(plain_sum, axis=0), mask=real)
    tl.store(out + CHS, tl.sum(scaled_sum, axis=0) * inverse, mask=real)
    tl.store(out + 2 * CHS, tl.sum(square_sum, axis=0), mask=real)


@triton.jit
def column_sums(matrix, column, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a matrix (rows, WIDTH), of which a program takes COLUMNS columns: (COLUMNS,)."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        pointer = matrix + row[:, None].to(tl.int64) * WIDTH + column[None, :]
        total += tl.load(pointer, mask=(row < rows)[:, None] & (column < WIDTH)[None, :], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def sum_taps(
    d_taps,  # (rows, 9, C) float32
    d_weight,  # (C, 1, 3, 3)
    rows,
    first, step,  # this program's number, and how many there are: they share the columns, in groups of 8
    CHS: tl.constexpr,
):  # fmt: skip
    for group in range(first, (9 * CHS + 7) // 8, step):  # few columns a program, or some would hold up all
        column = group * 8 + tl.arange(0, 8)
        total = column_sums(d_taps, column, rows, 9 * CHS, 256, 8)  # more rows at once would cost registers
        place = (column % CHS) * 9 + column // CHS
        tl.store(d_weight + place, total.to(d_weight.dtype.element_ty), mask=column < 9 * CHS)


@triton.jit
def sum_norm_gradients(
    partial_sums,  # (rows, 3, C) float32, as norm_backward_sums leaves them
    sums,  # (3, C) float32
    d_beta, d_gamma,  # (C,) the first two of these, in the parameters' dtype
    rows,
    CHS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    chain(FOLLOWS, LEADS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = column_sums(partial_sums, column, rows, 3 * CHS, ROWS, COLUMNS)
    tl.store(sums + column, found, mask=column < 3 * CHS)
    tl.store(d_beta + column, found.to(d_beta.dtype.element_ty), mask=column < CHS)
    of_gamma = (column >= CHS) & (column < 2 * CHS)
    tl.store(d_gamma + column - CHS, found.to(d_gamma.dtype.element_ty), mask=of_gamma)


@triton.jit
def depthwise_backward(
    dz, u, x,  # (N, C, H, W) in either memory format
    gram,  # (N, Cr, C) float32
    weight,  # (C, 1, 3, 3)
    gamma,  # (C,)
    statistics,  # (2, C) float32: mean and biased variance
    sums,  # (3, C) float32: d_beta, d_gamma, sum of dz^2
    dy,  # like x
    d_gram,  # (N, bands, Cr, C) float32: a band's x_c^T dy
    d_taps,  # (N, bands, 9, C) float32: a band's dw
    scratch,  # (programs, 2 band + 2 halo + 9, CB), float16 where x has 16 bits: du / steep, y / factor, the kernels
    height, width,
    band,  # positions a program makes
    halo,  # positions of du it needs before and after
    count,  # N H W
    eps,
    rows_below,  # 2: a run-time bound keeps the loop over the kernel's rows rolled
    CHS: tl.constexpr, COMPACT: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr, STEP: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """From dz to dy, dw and dG, for one block of channels of a band of an image."""
    chain(FOLLOWS, LEADS)
    positions = height * width
    image, begin, end, channel, entry = this_program(positions, band, CB)
    first = begin - halo  # the position that the scratch starts with
    column = tl.arange(0, CB)
    real = channel < CHS
    compact, matrix, both = gram_block(channel, CHS, COMPACT, RP)
    dz += image * positions * CHS
    u += image * positions * CHS
    x += image * positions * CHS
    dy += image * positions * CHS
    scratch += (entry * tl.num_programs(0) + tl.program_id(0)) * (2 * band + 2 * halo + 9) * CB
    y_scratch = scratch + (band + 2 * halo) * CB
    taps_map = y_scratch + band * CB

    unit, drift, level, steep = slope_terms(statistics, sums, gamma, channel, count, eps, CHS)
    for start in range(first, end + halo, P):
        position = start + tl.arange(0, P)
        there = (position >= 0) & (position < positions) & (position < end + halo)
        inside = there[:, None] & real[None, :]
        place = offsets(position, channel, positions, CHS, CHANNELS_LAST)
        du = slope_tile(dz, u, place, inside, unit, drift, level)
        pointer = scratch + (position - first)[:, None] * CB + column[None, :]
        tl.store(pointer, half_range(du, 7000.0, scratch.dtype.element_ty), mask=there[:, None])
    # dy[p] takes du at p - t: a depthwise convolution with the kernel upside down
    largest, _ = store_taps(taps_map, weight, channel, True, CHS, CB)
    tl.debug_barrier()

    gram += image * (COMPACT * CHS)
    image_gram = tl.load(gram + matrix, mask=both, other=0.0)
    square = 1.0
    if ENERGY_EPS > 0:
        square = mean_diagonal(gram, CHS, COMPACT, RP) + ENERGY_EPS
        image_gram /= square
    factors, factor = narrow_affinity(image_gram, square, scratch.dtype.element_ty)  # (RP, CB)
    dg = tl.zeros((RP, CB), dtype=tl.float32)
    for start in range(begin, end, STEP):  # steps smaller than P leave more registers free
        spot = start + tl.arange(0, STEP)
        here = spot < end
        total = depthwise_tile(scratch, taps_map, spot, first, end, height, width, rows_below, STEP, CB)
        slope = (total.to(tl.float32) * (largest * steep)[None, :]).to(x.dtype.element_ty)  # dy: (STEP, CB)
        spots = offsets(spot, channel, positions, CHS, CHANNELS_LAST)
        tl.store(dy + spots, slope, mask=here[:, None] & real[None, :])
        x_c = compact_tile(x, spot, compact, here, positions, CHS, COMPACT, CHANNELS_LAST)  # (STEP, RP)
        dg = tl.dot(tl.trans(x_c), slope, dg, input_precision="ieee")  # (RP, STEP) (STEP, CB) -> (RP, CB)
        y = product(half_range(x_c, 65504.0, scratch.dtype.element_ty), factors)  # (STEP, RP) (RP, CB) -> (STEP, CB)
        tl.store(y_scratch + (spot - begin)[:, None] * CB + column[None, :], y, mask=here[:, None])
    tl.store(d_gram + entry * (COMPACT * CHS) + matrix, dg, mask=both)
    tl.debug_barrier()
    d_taps += entry * (9 * CHS) + channel
    taps_backward(
        scratch, y_scratch, d_taps, factor * steep, real, begin, end, first, height, width, rows_below, CHS, STEP, CB
    )  # fmt: skip


@triton.jit
def taps_backward(
    scratch, y_scratch, d_taps, scale, real, begin, end, first, height, width, rows_below,
    CHS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """dw of a band, a row of the kernel at a time, so that three sums and not nine are held at every position."""
    column = tl.arange(0, CB)
    for down in range(-1, rows_below):
        left_sum = tl.zeros((P, CB), dtype=tl.float32)
        middle_sum = tl.zeros((P, CB), dtype=tl.float32)
        right_sum = tl.zeros((P, CB), dtype=tl.float32)
        for start in range(begin, end, P):
            position = start + tl.arange(0, P)
            row = position // width
            here = position < end
            source = scratch + (position + down * width - first)[:, None] * CB + column[None, :]
            left, middle, right = neighbours(source, row + down, position - row * width, here, height, width, CB)
            y_pointer = y_scratch + (position - begin)[:, None] * CB + column[None, :]
            y = tl.load(y_pointer, mask=here[:, None], other=0.0).to(tl.float32)
            left_sum += left.to(tl.float32) * y
            middle_sum += middle.to(tl.float32) * y
            right_sum += right.to(tl.float32) * y
        out = d_taps + (1 - down) * (3 * CHS)  # a tap to the lower right took du from the upper left
        tl.store(out + 2 * CHS, tl.sum(left_sum, axis=0) * scale, mask=real)
        tl.store(out + CHS, tl.sum(middle_sum, axis=0) * scale, mask=real)
        tl.store(out, tl.sum(right_sum, axis=0) * scale, mask=real)


@triton.jit
def input_backward(
    dz, x,  # (N, C, H, W) in either memory format
    gram,  # (N, Cr, C) float32
    d_gram,  # (N, bands, Cr, C) float32
    d_taps,  # (N, bands, 9, C) float32
    dx,  # like x; holds dy, which dx replaces
    d_weight,  # (C, 1, 3, 3)
    height, width, bands,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """From dy and dG to dx, for a tile of positions and all channels; on the way, the bands' dw are summed."""
    chain(FOLLOWS, LEADS)
    positions = height * width
    image = tl.program_id(1).to(tl.int64)
    dz += image * positions * CHS
    x += image * positions * CHS
    dx += image * positions * CHS
    gram += image * (COMPACT * CHS)
    d_gram += image * bands * (COMPACT * CHS)
    position = tl.program_id(0) * P + tl.arange(0, P)
    row = position // width
    col = position - row * width
    here = (position < positions)[:, None]
    sampled = (position < positions) & (row % STRIDE == 0) & (col % STRIDE == 0)
    compact = tl.arange(0, RP)
    few = compact < COMPACT
    compact_place = offsets(position, compact, positions, CHS, CHANNELS_LAST)
    x_sc = compact_tile(x, position, compact, sampled, positions, CHS, COMPACT, CHANNELS_LAST)  # (P, RP)
    compact_dx = tl.zeros((P, RP), dtype=tl.float32)
    if ENERGY_EPS > 0:
        energy = mean_diagonal(gram, CHS, COMPACT, RP) + ENERGY_EPS
        through_energy = tl.zeros((RP,), dtype=tl.float32)  # - <dG, G / E>, a compact channel each
    for block in range(0, CHS, CB):
        channel = block + tl.arange(0, CB)
        real = channel < CHS
        both = few[:, None] & real[None, :]
        matrix = compact[:, None] * CHS + channel[None, :]
        image_gram = tl.load(gram + matrix, mask=both, other=0.0)  # (RP, CB)
        if ENERGY_EPS > 0:
            image_gram /= energy
        factors, factor = narrow(image_gram, x.dtype.element_ty)
        total = tl.zeros((RP, CB), dtype=tl.float32)
        for band in range(0, bands):
            total += tl.load(d_gram + band * (COMPACT * CHS) + matrix, mask=both, other=0.0)
        total /= positions
        if ENERGY_EPS > 0:
            total /= energy
            through_energy -= tl.sum(total * image_gram, axis=1)
        slopes, steepness = narrow(total, x.dtype.element_ty)
        place = offsets(position, channel, positions, CHS, CHANNELS_LAST)
        dy = tl.load(dx + place, mask=here & real[None, :], other=0.0)  # (P, CB)
        x_s = tl.load(x + place, mask=sampled[:, None] & real[None, :], other=0.0)  # (P, CB)
        skip = tl.load(dz + place, mask=here & real[None, :], other=0.0).to(tl.float32)
        through_x_s = tl.dot(x_sc, slopes, input_precision="ieee") * steepness  # (P, RP) (RP, CB) -> (P, CB)
        compact_dx += tl.dot(dy, tl.trans(factors), input_precision="ieee") * factor  # (P, CB) (CB, RP)
        compact_dx += tl.dot(x_s, tl.trans(slopes), input_precision="ieee") * steepness
        tl.debug_barrier()  # dy is read: dx takes its place
        tl.store(dx + place, (skip + through_x_s).to(dx.dtype.element_ty), mask=here & real[None, :])
    if ENERGY_EPS > 0:
        compact_dx += x_sc.to(tl.float32) * (2 * tl.sum(through_energy, axis=0) / COMPACT)
    tl.debug_barrier()
    inside = here & few[None, :]
    compact_dx += tl.load(dx + compact_place, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + compact_place, compact_dx.to(dx.dtype.element_ty), mask=inside)
    tiles, images = tl.num_programs(0), tl.num_programs(1)
    this = tl.program_id(1) * tiles + tl.program_id(0)
    sum_taps(d_taps, d_weight, images * bands, this, tiles * images, CHS)

# ruff: noqa: N803, N806, SIM102 - Triton writes what is known when a kernel is compiled in capitals
"""LightNL forward in Triton. In comments P, CB and RP are a tile's positions, channels and compact channels.

    G = x_sc^T x_s / (H W)        (Cr, C) an image       the channel association, summed over sampled positions
    y = x_c G                     (H W, C)               the non-local product (Eq. 9)
    u = DepthwiseConv3x3(y)       (H W, C)
    z = BN(u) + x                                        (Eq. 8)

By energy y = x_c G / E instead, where E, an image's |x_sc|^2 / (Cr H W), is the mean of G's diagonal, plus ENERGY_EPS.
Where that constant is zero all of this is left out.

A program of `lightnl_forward` makes one block of channels of one image, or of a band of it. Its y goes to a
scratch that stays in the cache, because the depthwise kernel reads each value nine times, shifted. For inputs of
16 bits the scratch is float16, y and the kernel's weights scaled to fit: it has 3 bits more than bfloat16.
`spatial_forward` does the same in the spatial association, for a small map in one tile.
"""

import triton
import triton.language as tl

from autonl.nn.kernels.pieces import (
    chain,
    compact_tile,
    depthwise_tile,
    folded_norm,
    gram_block,
    half_range,
    mean_diagonal,
    narrow_affinity,
    offsets,
    product,
    store_moments,
    store_taps,
    this_program,
)


@triton.jit
def gram_matrix(
    x, channel, compact, begin, end, height, width,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """G = x_sc^T x_s / (H W) of the image at x, summed over the samples from begin to end, for one block of channels:
    (RP, CB); rows from COMPACT on are zero. And the samples' |x_sc|^2 / (Cr H W), if there is an ENERGY_EPS."""
    LIMIT: tl.constexpr = min(CHS, (COMPACT + 7) // 8 * 8)
    positions = height * width
    sampled_width = (width + STRIDE - 1) // STRIDE
    gram = tl.zeros((RP, CB), dtype=tl.float32)
    squares = tl.zeros((RP,), dtype=tl.float32)
    for start in range(begin, end, P):
        sample = start + tl.arange(0, P)
        if STRIDE == 1:
            position = sample
        else:
            row = sample // sampled_width
            position = row * STRIDE * width + (sample - row * sampled_width) * STRIDE
        inside = sample < end
        # x_sc^T as it is multiplied: what goes through tl.trans, Triton does not load ahead
        if CHANNELS_LAST:
            place = position[None, :] * CHS + compact[:, None]
        else:
            place = position[None, :] + compact[:, None] * positions
        x_sc = tl.load(x + place, mask=inside[None, :] & (compact < LIMIT)[:, None], other=0.0)  # (RP, P)
        pointer = x + offsets(position, channel, positions, CHS, CHANNELS_LAST)
        x_s = tl.load(pointer, mask=inside[:, None] & (channel < CHS)[None, :], other=0.0)  # (P, CB)
        gram = tl.dot(x_sc, x_s, gram, input_precision="ieee")  # (RP, P) (P, CB) -> (RP, CB)
        if ENERGY_EPS > 0:
            squares += tl.sum(x_sc.to(tl.float32) * x_sc.to(tl.float32), axis=1)
    few = compact < COMPACT
    energy = tl.sum(tl.where(few, squares, 0.0), axis=0) / (positions * COMPACT)
    return tl.where(few[:, None], gram / positions, 0.0), energy


@triton.jit
def gram_kernel(
    x,  # (N, C, H, W) in either memory format
    gram_parts,  # (N, parts, Cr, C) float32: their sum is G
    height, width,
    samples,
    part,  # samples a program
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    chain(FOLLOWS, LEADS)
    image, begin, end, channel, entry = this_program(samples, part, CB)
    compact, matrix, both = gram_block(channel, CHS, COMPACT, RP)
    x += image * height * width * CHS
    gram, _ = gram_matrix(
        x, channel, compact, begin, end, height, width, CHS, COMPACT, STRIDE, CHANNELS_LAST, 0, P, CB, RP
    )  # fmt: skip
    tl.store(gram_parts + entry * (COMPACT * CHS) + matrix, gram, mask=both)


@triton.jit
def whole_gram(
    x, gram_parts, image, channel, samples, height, width,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, GRAM_PARTS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """An image's G (RP, CB) in float32: the sum of its parts in (N, GRAM_PARTS, Cr, C); made here where there are none.
    And |x_sc|^2 / (Cr H W), if there is an ENERGY_EPS.

    x is the image's own.
    """
    compact, matrix, both = gram_block(channel, CHS, COMPACT, RP)
    if GRAM_PARTS == 0:
        return gram_matrix(
            x, channel, compact, 0, samples, height, width, CHS, COMPACT, STRIDE, CHANNELS_LAST, ENERGY_EPS, P, CB, RP
        )  # fmt: skip
    else:
        gram = tl.zeros((RP, CB), dtype=tl.float32)
        energy = 0.0
        for part in tl.static_range(GRAM_PARTS):
            pointer = gram_parts + (image * GRAM_PARTS + part) * (COMPACT * CHS)
            gram += tl.load(pointer + matrix, mask=both, other=0.0)
            if ENERGY_EPS > 0:
                energy += mean_diagonal(pointer, CHS, COMPACT, RP)
        return gram, energy


@triton.jit
def lightnl_forward(
    x,  # (N, C, H, W) in either memory format
    out,  # like x: z for inference, u for training
    scratch,  # (programs, band + 2 halo + 9, CB): y / factor, then the depthwise kernels
    weight,  # (C, 1, 3, 3)
    gamma, beta, mean, variance,  # (C,) inference only
    gram_parts,  # (N, GRAM_PARTS, Cr, C) float32: their sum is G; where there are none, G is made here
    gram_out,  # (N, Cr, C) float32, training only: G
    moments,  # (N bands, 2, C) float32, training only: a band's mean of u, and sum of squared differences from it
    height, width,
    samples,
    band,  # positions a program makes
    halo,  # positions of y it needs before and after: width + 1, or none where one band is the image
    eps,
    rows_below,  # 2: a run-time bound keeps the loop over the kernel's rows rolled, and registers free
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, TRAINING: tl.constexpr, GRAM_PARTS: tl.constexpr,
    P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr, STEP: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    chain(FOLLOWS, LEADS)
    positions = height * width
    image, begin, end, channel, entry = this_program(positions, band, CB)
    first = begin - halo  # the position that the scratch starts with
    column = tl.arange(0, CB)
    real = channel < CHS
    compact, matrix, both = gram_block(channel, CHS, COMPACT, RP)
    x += image * positions * CHS
    out += image * positions * CHS
    scratch += (entry * tl.num_programs(0) + tl.program_id(0)) * (band + 2 * halo + 9) * CB
    taps_map = scratch + (band + 2 * halo) * CB

    gram, energy = whole_gram(
        x, gram_parts, image, channel, samples, height, width,
        CHS, COMPACT, STRIDE, CHANNELS_LAST, ENERGY_EPS, GRAM_PARTS, P, CB, RP,
    )  # fmt: skip
    if TRAINING:
        if tl.program_id(1) == 0:
            tl.store(gram_out + image * (COMPACT * CHS) + matrix, gram, mask=both)
    square = 1.0
    if ENERGY_EPS > 0:
        square = energy + ENERGY_EPS
        gram /= square

    factors, factor = narrow_affinity(gram, square, scratch.dtype.element_ty)
    for start in range(first, end + halo, P):
        position = start + tl.arange(0, P)
        inside = (position >= 0) & (position < positions) & (position < end + halo)
        x_c = compact_tile(x, position, compact, inside, positions, CHS, COMPACT, CHANNELS_LAST)  # (P, RP)
        y = product(half_range(x_c, 65504.0, scratch.dtype.element_ty), factors)  # (P, RP) (RP, CB) -> (P, CB)
        tl.store(scratch + (position - first)[:, None] * CB + column[None, :], y, mask=inside[:, None])

    largest, taps_sum = store_taps(taps_map, weight, channel, False, CHS, CB)  # (CB,)
    scale = largest * factor
    tl.debug_barrier()

    if TRAINING:
        # sums of (u - pivot) and its square, a position of the tile each: summed over the tile only once, below.
        # The pivot, about u in the middle of the band, keeps a mean far from zero from swamping the variance.
        plain_sum = tl.zeros((STEP, CB), dtype=tl.float32)
        square_sum = tl.zeros((STEP, CB), dtype=tl.float32)
        pivot = tl.load(scratch + ((begin + end) // 2 - first) * CB + column).to(tl.float32) * taps_sum * scale
    else:
        inverse, shift = folded_norm(gamma, beta, mean, variance, channel, eps, CHS)
        scale *= inverse
    for start in range(begin, end, STEP):  # steps smaller than P leave more registers free
        spot = start + tl.arange(0, STEP)
        total = depthwise_tile(scratch, taps_map, spot, first, end, height, width, rows_below, STEP, CB)
        u = total.to(tl.float32) * scale[None, :]
        here = (spot < end)[:, None] & real[None, :]
        place = offsets(spot, channel, positions, CHS, CHANNELS_LAST)
        if TRAINING:
            away = tl.where(here, u - pivot[None, :], 0.0)
            plain_sum += away
            square_sum += away * away
            tl.store(out + place, u.to(out.dtype.element_ty), mask=here)
        else:
            z = tl.load(x + place, mask=here, other=0.0).to(tl.float32) + u + shift[None, :]
            tl.store(out + place, z.to(out.dtype.element_ty), mask=here)
    if TRAINING:
        store_moments(moments + entry * (2 * CHS), channel, pivot, plain_sum, square_sum, end - begin, CHS)


@triton.jit
def spatial_forward(
    x,  # (N, C, H, W) in either memory format, of at most P positions
    z,  # like x
    scratch,  # (programs, H W + 9, CB): y / factor, then the depthwise kernels
    weight,  # (C, 1, 3, 3)
    gamma, beta, mean, variance,  # (C,)
    height, width,
    eps,
    rows_below,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Inference in the spatial association, y = (x_c x_sc^T) x_s / (H W): x is read once, and no product has to be
    padded from Cr = 80 compact channels to 128."""
    positions = height * width
    image, _, _, channel, entry = this_program(positions, positions, CB)
    x += image * positions * CHS
    z += image * positions * CHS
    scratch += (entry * tl.num_programs(0) + tl.program_id(0)) * (positions + 9) * CB
    taps_map = scratch + positions * CB
    largest, _ = store_taps(taps_map, weight, channel, False, CHS, CB)

    position = tl.arange(0, P)
    here = position < positions
    row = position // width
    sampled = here & (row % STRIDE == 0) & ((position - row * width) % STRIDE == 0)
    affinity = tl.zeros((P, P), dtype=tl.float32)
    for block in range(0, COMPACT, 16):
        compact = block + tl.arange(0, 16)
        source = x + offsets(position, compact, positions, CHS, CHANNELS_LAST)
        few = (compact < COMPACT)[None, :]
        x_c = tl.load(source, mask=here[:, None] & few, other=0.0)  # (P, 16)
        x_sc = tl.load(source, mask=sampled[:, None] & few, other=0.0)
        affinity = tl.dot(x_c, tl.trans(x_sc), affinity, input_precision="ieee")  # (P, 16) (16, P) -> (P, P)
    affinity /= positions
    square = positions / COMPACT
    if ENERGY_EPS > 0:  # the diagonal holds x_sc^2 where a position is sampled, zero elsewhere
        diagonal = tl.where(position[:, None] == position[None, :], affinity, 0.0)
        energy = tl.sum(tl.sum(diagonal, axis=1), axis=0) / COMPACT + ENERGY_EPS
        affinity /= energy
        square *= energy
    factors, factor = narrow_affinity(affinity, square, scratch.dtype.element_ty)

    pointer = x + offsets(position, channel, positions, CHS, CHANNELS_LAST)
    # (P, CB): where it is not sampled, the affinity is zero
    x_s = tl.load(pointer, mask=here[:, None] & (channel < CHS)[None, :], other=0.0)
    y = product(factors, half_range(x_s, 65504.0, scratch.dtype.element_ty))  # (P, P) (P, CB) -> (P, CB)
    tl.store(scratch + position[:, None] * CB + tl.arange(0, CB)[None, :], y, mask=here[:, None])
    tl.debug_barrier()
    inverse, shift = folded_norm(gamma, beta, mean, variance, channel, eps, CHS)
    scale = largest * factor * inverse
    for start in range(0, positions, STEP):  # x is read again, from the cache
        spot = start + tl.arange(0, STEP)
        total = depthwise_tile(scratch, taps_map, spot, 0, positions, height, width, rows_below, STEP, CB)
        inside = (spot < positions)[:, None] & (channel < CHS)[None, :]
        place = offsets(spot, channel, positions, CHS, CHANNELS_LAST)
        skip = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        tl.store(z + place, (skip + total.to(tl.float32) * scale[None, :]).to(z.dtype.element_ty), mask=inside)


@triton.jit
def batch_statistics(
    moments,  # (N bands, 2, C) float32
    statistics,  # (2, C) float32: mean and biased variance
    running_mean, running_variance,  # (C,), moved in place where UPDATE, as is the next
    batches_tracked,  # () int64
    entries,  # N bands
    bands, band, positions,
    momentum,
    CHS: tl.constexpr, UPDATE: tl.constexpr, ROWS: tl.constexpr, CB: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Merge the bands' moments as Chan et al. do, and move the running statistics as nn.BatchNorm2d does."""
    chain(FOLLOWS, LEADS)
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    real = channel < CHS
    count = positions * (entries // bands) * 1.0
    pivot = tl.load(moments + channel, mask=real, other=0.0)  # the first band's mean: near the others
    sums = tl.zeros((ROWS, CB), dtype=tl.float32)
    squares = tl.zeros((ROWS, CB), dtype=tl.float32)
    for start in range(0, entries, ROWS):
        entry = start + tl.arange(0, ROWS)
        inside = (entry < entries)[:, None] & real[None, :]
        pointer = moments + entry[:, None] * (2 * CHS) + channel[None, :]
        size = tl.minimum(band, positions - (entry % bands) * band)[:, None] * 1.0  # positions in this band
        away = tl.where(inside, tl.load(pointer, mask=inside, other=0.0) - pivot[None, :], 0.0)
        sums += size * away
        squares += size * away * away + tl.load(pointer + CHS, mask=inside, other=0.0)
    off = tl.sum(sums, axis=0) / count  # (CB,)
    mean = pivot + off
    total = tl.sum(squares, axis=0) - count * off * off
    total = tl.where(total < 0.0, 0.0, total)  # NaN stays
    tl.store(statistics + channel, mean, mask=real)
    tl.store(statistics + CHS + channel, total / count, mask=real)
    if UPDATE:
        old_mean = tl.load(running_mean + channel, mask=real, other=0.0).to(tl.float32)
        old_variance = tl.load(running_variance + channel, mask=real, other=0.0).to(tl.float32)
        new_mean = old_mean + momentum * (mean - old_mean)
        new_variance = old_variance + momentum * (total / (count - 1) - old_variance)  # unbiased
        tl.store(running_mean + channel, new_mean.to(running_mean.dtype.element_ty), mask=real)
        tl.store(running_variance + channel, new_variance.to(running_variance.dtype.element_ty), mask=real)
        if tl.program_id(0) == 0:
            tl.store(batches_tracked, tl.load(batches_tracked) + 1)


@triton.jit
def normalise_add(
    x, u, z,  # (images, C, positions) in either memory format
    gamma, beta,  # (C,)
    statistics,  # (2, C) float32: mean and biased variance
    positions,
    eps,
    CHS: tl.constexpr, CHANNELS_LAST: tl.constexpr, P: tl.constexpr, CB: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """z = gamma (u - mean) / sqrt(variance + eps) + beta + x. Channels-last maps come in as one long image."""
    chain(FOLLOWS, LEADS)
    channel = tl.program_id(1) * CB + tl.arange(0, CB)
    scale, shift = folded_norm(gamma, beta, statistics, statistics + CHS, channel, eps, CHS)
    position = tl.program_id(0) * P + tl.arange(0, P)
    inside = (position < positions)[:, None] & (channel < CHS)[None, :]
    place = offsets(position.to(tl.int64), channel, positions, CHS, CHANNELS_LAST)
    place += tl.program_id(2).to(tl.int64) * positions * CHS
    branch = tl.load(u + place, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    out = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + branch
    tl.store(z + place, out.to(z.dtype.element_ty), mask=inside)

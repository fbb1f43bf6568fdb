# ruff: noqa: N803, N806, SIM300 - Triton writes what is known when a kernel is compiled in capitals
"""LightNL forward in Triton. In comments P, CB and RP are a tile's positions, channels and compact channels.

    G = x_sc^T x_s / (H W)        (Cr, C) an image       the channel association, summed over sampled positions
    y = x_c G                     (H W, C)               the non-local product (Eq. 9)
    u = DepthwiseConv3x3(y)       (H W, C)
    z = BN(u) + x                                        (Eq. 8)

A program of `lightnl_forward` makes one block of channels of one image, or of a band of it. Its y goes to a
scratch that stays in the cache, because the depthwise kernel reads each value nine times, shifted. For inputs of
16 bits the scratch is float16, y and the kernel's weights scaled to fit: it has 3 bits more than bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def offsets(position, channel, positions, CHS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Element offsets in one image: (P,), (CB,) -> (P, CB)."""
    if CHANNELS_LAST:
        return position[:, None] * CHS + channel[None, :]
    else:
        return position[:, None] + channel[None, :] * positions


@triton.jit
def narrow(matrix, DTYPE: tl.constexpr):
    """A float32 matrix as (matrix / factor in DTYPE, factor): float16 has 5 bits of exponent, so there factor is
    the largest entry; elsewhere it is 1."""
    if DTYPE == tl.float16:
        peak = tl.max(tl.max(tl.abs(matrix), axis=1), axis=0)
        factor = tl.where(peak > 0, peak, 1.0)
        return (matrix / factor).to(DTYPE), factor
    else:
        return matrix.to(DTYPE), 1.0


@triton.jit
def half_range(tile, BOUND: tl.constexpr, DTYPE: tl.constexpr):
    """A tile in DTYPE, held inside a bound where that is float16, whose largest number is 65504."""
    if DTYPE == tl.float16:
        return tl.clamp(tile.to(tl.float32), -BOUND, BOUND).to(DTYPE)
    else:
        return tile.to(DTYPE)


@triton.jit
def compact_tile(
    x,
    position,
    compact,
    there,
    positions,
    CHS: tl.constexpr,
    COMPACT: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """(P, RP) compact channels where `there` (P,), zero elsewhere.

    The mask lets surplus channels in, up to a multiple of 8, for whole 16-byte loads: they meet zero rows of G.
    """
    LIMIT: tl.constexpr = min(CHS, (COMPACT + 7) // 8 * 8)
    pointer = x + offsets(position, compact, positions, CHS, CHANNELS_LAST)
    return tl.load(pointer, mask=there[:, None] & (compact < LIMIT)[None, :], other=0.0)


@triton.jit
def gram_matrix(
    x,
    channel,
    compact,
    height,
    width,
    CHS: tl.constexpr,
    COMPACT: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    RP: tl.constexpr,
):
    """G = x_sc^T x_s / (H W) of the image at x, for one block of channels: (RP, CB); rows from COMPACT on are zero."""
    positions = height * width
    sampled_width = (width + STRIDE - 1) // STRIDE
    samples = sampled_width * ((height + STRIDE - 1) // STRIDE)
    gram = tl.zeros((RP, CB), dtype=tl.float32)
    for start in range(0, samples, P):
        sample = start + tl.arange(0, P)
        if STRIDE == 1:
            position = sample
        else:
            row = sample // sampled_width
            position = row * STRIDE * width + (sample - row * sampled_width) * STRIDE
        inside = sample < samples
        x_sc = compact_tile(x, position, compact, inside, positions, CHS, COMPACT, CHANNELS_LAST)  # (P, RP)
        pointer = x + offsets(position, channel, positions, CHS, CHANNELS_LAST)
        x_s = tl.load(pointer, mask=inside[:, None] & (channel < CHS)[None, :], other=0.0)  # (P, CB)
        gram = tl.dot(tl.trans(x_sc), x_s, gram, input_precision="ieee")  # (RP, P) (P, CB) -> (RP, CB)
    return tl.where((compact < COMPACT)[:, None], gram / positions, 0.0)


@triton.jit
def gram_kernel(
    x,  # (N, C, H, W) in either memory format
    gram_out,  # (N, Cr, C) float32
    height,
    width,
    CHS: tl.constexpr,
    COMPACT: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    RP: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CB + tl.arange(0, CB)
    compact = tl.arange(0, RP)
    x += image * height * width * CHS
    gram = gram_matrix(x, channel, compact, height, width, CHS, COMPACT, STRIDE, CHANNELS_LAST, P, CB, RP)
    pointer = gram_out + image * (COMPACT * CHS) + compact[:, None] * CHS + channel[None, :]
    tl.store(pointer, gram, mask=(compact < COMPACT)[:, None] & (channel < CHS)[None, :])


@triton.jit
def store_taps(taps_map, weight, channel, CHS: tl.constexpr, CB: tl.constexpr):
    """Put the depthwise kernels (C, 1, 3, 3) of a block of channels, divided by their largest weight, into taps_map
    (9, CB); return the largest weights and the sums of what was put: 2 x (CB,)."""
    tap = tl.arange(0, 16)[:, None]
    there = (tap < 9) & (channel < CHS)[None, :]
    kernel = tl.load(weight + channel[None, :] * 9 + tap, mask=there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(kernel), axis=0)
    largest = tl.where(largest > 0, largest, 1.0)
    kernel /= largest[None, :]
    tl.store(taps_map + tap * CB + tl.arange(0, CB)[None, :], kernel.to(taps_map.dtype.element_ty), mask=tap < 9)
    return largest, tl.sum(kernel, axis=0)


@triton.jit
def lightnl_forward(
    x,  # (N, C, H, W) in either memory format
    out,  # like x: z for inference, u for training
    scratch,  # (programs, band + 2 halo, CB): y / factor; float16 for bfloat16 too, which has 3 bits less
    taps_scratch,  # (programs, 9, CB) in scratch's dtype: the depthwise kernels
    weight,  # (C, 1, 3, 3)
    gamma,  # (C,) inference only, as are the next three
    beta,
    mean,
    variance,
    gram_map,  # (N, Cr, C) float32: G, read where GRAM_READY, written elsewhere in training, not used in inference
    moments,  # (N bands, 2, C) float32, training only: a band's mean of u, and sum of squared differences from it
    height,
    width,
    band,  # positions a program makes
    halo,  # positions of y it needs before and after: width + 1, or none where one band is the image
    eps,
    rows_below,  # 2: a run-time bound keeps the loop over the kernel's rows rolled, and registers free
    CHS: tl.constexpr,
    COMPACT: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    TRAINING: tl.constexpr,
    GRAM_READY: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
    RP: tl.constexpr,
):
    positions = height * width
    image = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(1) * band
    end = tl.minimum(begin + band, positions)
    first = begin - halo  # the position that the scratch starts with
    column = tl.arange(0, CB)
    channel = tl.program_id(0) * CB + column
    real = channel < CHS
    compact = tl.arange(0, RP)
    both = (compact < COMPACT)[:, None] & real[None, :]
    x += image * positions * CHS
    out += image * positions * CHS
    gram_place = image * (COMPACT * CHS) + compact[:, None] * CHS + channel[None, :]  # (RP, CB)
    bands = tl.num_programs(1)
    program = (image * bands + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    scratch += program * (band + 2 * halo) * CB
    taps_scratch += program * (9 * CB)

    if GRAM_READY:
        gram = tl.load(gram_map + gram_place, mask=both, other=0.0)
    else:
        gram = gram_matrix(x, channel, compact, height, width, CHS, COMPACT, STRIDE, CHANNELS_LAST, P, CB, RP)
        if TRAINING:  # noqa: SIM102 - the outer one is settled when the kernel is compiled
            if tl.program_id(1) == 0:
                tl.store(gram_map + gram_place, gram, mask=both)

    factors, factor = narrow(gram, scratch.dtype.element_ty)
    for start in range(first, end + halo, P):
        position = start + tl.arange(0, P)
        inside = (position >= 0) & (position < positions) & (position < end + halo)
        x_c = compact_tile(x, position, compact, inside, positions, CHS, COMPACT, CHANNELS_LAST)  # (P, RP)
        x_c = half_range(x_c, 65504.0, scratch.dtype.element_ty)
        y = tl.dot(x_c, factors, input_precision="ieee")  # (P, RP) (RP, CB) -> (P, CB)
        pointer = scratch + (position - first)[:, None] * CB + column[None, :]
        tl.store(pointer, half_range(y, 7000.0, scratch.dtype.element_ty), mask=inside[:, None])

    largest, taps_sum = store_taps(taps_scratch, weight, channel, CHS, CB)  # (CB,)
    scale = largest * factor
    tl.debug_barrier()

    if TRAINING:
        # sums of (u - pivot) and its square, a position of the tile each: summed over the tile only once, below.
        # The pivot, about u in the middle of the band, keeps a mean far from zero from swamping the variance.
        plain_sum = tl.zeros((P, CB), dtype=tl.float32)
        square_sum = tl.zeros((P, CB), dtype=tl.float32)
        pivot = tl.load(scratch + ((begin + end) // 2 - first) * CB + column).to(tl.float32) * taps_sum * scale
    else:
        inverse = tl.rsqrt(tl.load(variance + channel, mask=real, other=1.0).to(tl.float32) + eps)
        inverse *= tl.load(gamma + channel, mask=real, other=0.0).to(tl.float32)
        shift = tl.load(beta + channel, mask=real, other=0.0).to(tl.float32)
        shift -= tl.load(mean + channel, mask=real, other=0.0).to(tl.float32) * inverse
        scale *= inverse
    for start in range(begin, end, P):
        position = start + tl.arange(0, P)
        row = position // width
        col = position - row * width
        total = tl.zeros((P, CB), dtype=scratch.dtype.element_ty)  # float16 holds nine terms to 4e-4, twice as fast
        for down in range(-1, rows_below):
            there = (row + down >= 0) & (row + down < height) & (position < end)
            source = scratch + (position + down * width - first)[:, None] * CB + column[None, :]
            taps = taps_scratch + (down + 1) * (3 * CB) + column
            left = tl.load(source - CB, mask=(there & (col > 0))[:, None], other=0.0)
            middle = tl.load(source, mask=there[:, None], other=0.0)
            right = tl.load(source + CB, mask=(there & (col < width - 1))[:, None], other=0.0)
            total += left * tl.load(taps)[None, :]
            total += middle * tl.load(taps + CB)[None, :]
            total += right * tl.load(taps + 2 * CB)[None, :]
        u = total.to(tl.float32) * scale[None, :]
        inside = (position < end)[:, None] & real[None, :]
        place = offsets(position, channel, positions, CHS, CHANNELS_LAST)
        if TRAINING:
            away = tl.where(inside, u - pivot[None, :], 0.0)
            plain_sum += away
            square_sum += away * away
            tl.store(out + place, u.to(out.dtype.element_ty), mask=inside)
        else:
            z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + u + shift[None, :]
            tl.store(out + place, z.to(out.dtype.element_ty), mask=inside)
    if TRAINING:
        total = tl.sum(plain_sum, axis=0)  # (CB,)
        centred = tl.sum(square_sum, axis=0) - total * total / (end - begin)
        moments += (image * bands + tl.program_id(1)) * (2 * CHS) + channel
        tl.store(moments, pivot + total / (end - begin), mask=real)
        tl.store(moments + CHS, tl.maximum(centred, 0.0), mask=real)


@triton.jit
def batch_statistics(
    moments,  # (N bands, 2, C) float32
    mean_out,  # (C,) float32
    variance_out,  # (C,) float32, biased
    running_mean,  # (C,), moved in place where UPDATE, as are the next two
    running_variance,
    batches_tracked,  # () int64
    entries,  # N bands
    bands,
    band,
    positions,
    momentum,
    CHS: tl.constexpr,
    UPDATE: tl.constexpr,
    ROWS: tl.constexpr,
    CB: tl.constexpr,
):
    """Merge the bands' moments as Chan et al. do, and move the running statistics as nn.BatchNorm2d does."""
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
    total = tl.maximum(tl.sum(squares, axis=0) - count * off * off, 0.0)
    tl.store(mean_out + channel, mean, mask=real)
    tl.store(variance_out + channel, total / count, mask=real)
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
    x,  # (images, C, positions) in either memory format
    u,
    z,
    gamma,  # (C,)
    beta,
    mean,
    variance,
    positions,
    eps,
    CHS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    P: tl.constexpr,
    CB: tl.constexpr,
):
    """z = gamma (u - mean) / sqrt(variance + eps) + beta + x. Channels-last maps come in as one long image."""
    channel = tl.program_id(1) * CB + tl.arange(0, CB)
    real = channel < CHS
    scale = tl.rsqrt(tl.load(variance + channel, mask=real, other=1.0) + eps)
    scale *= tl.load(gamma + channel, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(beta + channel, mask=real, other=0.0).to(tl.float32)
    shift -= tl.load(mean + channel, mask=real, other=0.0) * scale
    position = tl.program_id(0) * P + tl.arange(0, P)
    inside = (position < positions)[:, None] & real[None, :]
    place = offsets(position.to(tl.int64), channel, positions, CHS, CHANNELS_LAST)
    place += tl.program_id(2).to(tl.int64) * positions * CHS
    branch = tl.load(u + place, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    out = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + branch
    tl.store(z + place, out.to(z.dtype.element_ty), mask=inside)

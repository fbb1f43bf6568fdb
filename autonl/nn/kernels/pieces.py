# ruff: noqa: N803, N806, SIM300 - Triton writes what is known when a kernel is compiled in capitals
"""What LightNL's kernels share. In comments P, CB and RP are a tile's positions, channels and compact channels."""

import triton
import triton.language as tl


@triton.jit
def chain(FOLLOWS: tl.constexpr, LEADS: tl.constexpr):
    """First thing in a kernel: LEADS, let the programs of the pass's next kernel come; FOLLOWS, wait until all of the
    kernel before has ended. That one ended after the one before it: waiting for one is waiting for all."""
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def this_program(positions, band, CB: tl.constexpr):
    """What a program of a grid (blocks of channels, bands, images) makes: its image, the first and last position of
    its band, its channels (CB,), and the band's number among all bands of all images."""
    image = tl.program_id(2).to(tl.int64)
    begin = tl.program_id(1) * band
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    entry = image * tl.num_programs(1) + tl.program_id(1)
    return image, begin, tl.minimum(begin + band, positions), channel, entry


@triton.jit
def offsets(position, channel, positions, CHS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Element offsets in one image: (P,), (CB,) -> (P, CB)."""
    if CHANNELS_LAST:
        return position[:, None] * CHS + channel[None, :]
    else:
        return position[:, None] + channel[None, :] * positions


@triton.jit
def gram_block(channel, CHS: tl.constexpr, COMPACT: tl.constexpr, RP: tl.constexpr):
    """The compact channels (RP,), and a block of an image's G (Cr, C): element offsets and which are real, (RP, CB)."""
    compact = tl.arange(0, RP)
    return compact, compact[:, None] * CHS + channel[None, :], (compact < COMPACT)[:, None] & (channel < CHS)[None, :]


@triton.jit
def mean_diagonal(gram, CHS: tl.constexpr, COMPACT: tl.constexpr, RP: tl.constexpr):
    """Of an image's G (Cr, C) at this address, over its Cr compact channels: |x_sc|^2 / (Cr H W)."""
    compact = tl.arange(0, RP)
    return tl.sum(tl.load(gram + compact * (CHS + 1), mask=compact < COMPACT, other=0.0), axis=0) / COMPACT


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
def narrow_affinity(matrix, energy, DTYPE: tl.constexpr):
    """`narrow` for an affinity of features, which is multiplied with features: where these are large, it is divided by
    their size too, or products of many channels that agree would not fit into float16. Times `energy`, an affinity is
    about the square of its features."""
    if DTYPE == tl.float16:
        peak = tl.max(tl.max(tl.abs(matrix), axis=1), axis=0)
        factor = peak * tl.maximum(tl.sqrt(peak * energy), 1.0)
        factor = tl.where(peak > 0, factor, 1.0)
        return (matrix / factor).to(DTYPE), factor
    else:
        return matrix.to(DTYPE), 1.0


@triton.jit
def half_range(tile, BOUND: tl.constexpr, DTYPE: tl.constexpr):
    """A tile in DTYPE, held inside a bound where that is float16, whose largest number is 65504. NaN stays."""
    if DTYPE == tl.float16:
        return tl.clamp(tile.to(tl.float32), -BOUND, BOUND, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)
    else:
        return tile.to(DTYPE)


@triton.jit
def product(a, b):
    """a b summed in float32, in a's dtype: as nine of its values with weights up to 1 can be summed in float16."""
    return half_range(tl.dot(a, b, input_precision="ieee"), 7000.0, a.dtype)


@triton.jit
def compact_tile(
    x, position, compact, there, positions, CHS: tl.constexpr, COMPACT: tl.constexpr, CHANNELS_LAST: tl.constexpr
):  # fmt: skip
    """(P, RP) compact channels where `there` (P,), zero elsewhere.

    The mask lets surplus channels in, up to a multiple of 8, for whole 16-byte loads: they meet zero rows of G.
    """
    LIMIT: tl.constexpr = min(CHS, (COMPACT + 7) // 8 * 8)
    pointer = x + offsets(position, compact, positions, CHS, CHANNELS_LAST)
    return tl.load(pointer, mask=there[:, None] & (compact < LIMIT)[None, :], other=0.0)


@triton.jit
def folded_norm(gamma, beta, mean, variance, channel, eps, CHS: tl.constexpr):
    """BN as scale u + shift: 2 x (CB,) float32."""
    real = channel < CHS
    scale = tl.rsqrt(tl.load(variance + channel, mask=real, other=1.0).to(tl.float32) + eps)
    scale *= tl.load(gamma + channel, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(beta + channel, mask=real, other=0.0).to(tl.float32)
    return scale, shift - tl.load(mean + channel, mask=real, other=0.0).to(tl.float32) * scale


@triton.jit
def store_taps(taps_map, weight, channel, FLIPPED: tl.constexpr, CHS: tl.constexpr, CB: tl.constexpr):
    """Put the depthwise kernels (C, 1, 3, 3) of a block of channels, divided by their largest weight, into taps_map
    (9, CB), the last tap first if FLIPPED; return the largest weights and the sums of what was put: 2 x (CB,)."""
    tap = tl.arange(0, 16)[:, None]
    there = (tap < 9) & (channel < CHS)[None, :]
    kernel = tl.load(weight + channel[None, :] * 9 + tap, mask=there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(kernel), axis=0)
    largest = tl.where(largest > 0, largest, 1.0)
    kernel /= largest[None, :]
    line = 8 - tap if FLIPPED else tap
    tl.store(taps_map + line * CB + tl.arange(0, CB)[None, :], kernel.to(taps_map.dtype.element_ty), mask=tap < 9)
    return largest, tl.sum(kernel, axis=0)


@triton.jit
def neighbours(source, row, col, inside, height, width, CB: tl.constexpr):
    """What a scratch holds left of, at and right of the places (P, CB) that `source` points to: zero outside the map
    and where not `inside` (P,)."""
    there = inside & (row >= 0) & (row < height)
    left = tl.load(source - CB, mask=(there & (col > 0))[:, None], other=0.0)
    middle = tl.load(source, mask=there[:, None], other=0.0)
    right = tl.load(source + CB, mask=(there & (col < width - 1))[:, None], other=0.0)
    return left, middle, right


@triton.jit
def depthwise_tile(
    scratch, taps_map, position, first, end, height, width, rows_below, P: tl.constexpr, CB: tl.constexpr
):  # fmt: skip
    """DepthwiseConv3x3 of the scratch, which starts with position `first`, at a tile of positions before `end`:
    (P, CB) in the scratch's dtype, whose float16 holds nine terms to 4e-4 and is twice as fast."""
    row = position // width
    col = position - row * width
    column = tl.arange(0, CB)
    total = tl.zeros((P, CB), dtype=scratch.dtype.element_ty)
    for down in range(-1, rows_below):
        source = scratch + (position + down * width - first)[:, None] * CB + column[None, :]
        left, middle, right = neighbours(source, row + down, col, position < end, height, width, CB)
        taps = taps_map + (down + 1) * (3 * CB) + column
        total += left * tl.load(taps)[None, :]
        total += middle * tl.load(taps + CB)[None, :]
        total += right * tl.load(taps + 2 * CB)[None, :]
    return total


@triton.jit
def store_moments(moments, channel, pivot, plain_sum, square_sum, count, CHS: tl.constexpr):
    """From sums (P, CB) of count values' differences from a pivot (CB,), and of their squares, to the values' mean and
    the sum of their squared differences from it: (2, C)."""
    real = channel < CHS
    total = tl.sum(plain_sum, axis=0)  # (CB,)
    centred = tl.sum(square_sum, axis=0) - total * total / count
    tl.store(moments + channel, pivot + total / count, mask=real)
    tl.store(moments + CHS + channel, tl.where(centred < 0.0, 0.0, centred), mask=real)  # NaN stays


@triton.jit
def slope_terms(statistics, sums, gamma, channel, count, eps, CHS: tl.constexpr):
    """unit, drift, level and steep (CB,), by which du / steep = unit dz - drift u - level: in units of dz's own size,
    its root mean square, it suits float16."""
    real = channel < CHS
    inverse = tl.rsqrt(tl.load(statistics + CHS + channel, mask=real, other=1.0) + eps)
    size = tl.sqrt(tl.load(sums + 2 * CHS + channel, mask=real, other=0.0) / count)
    size = tl.where(size > 0, size, 1.0)
    drift = inverse * tl.load(sums + CHS + channel, mask=real, other=0.0) / count / size
    level = tl.load(sums + channel, mask=real, other=0.0) / count / size
    level -= drift * tl.load(statistics + channel, mask=real, other=0.0)
    steep = tl.load(gamma + channel, mask=real, other=0.0).to(tl.float32) * inverse * size
    return 1 / size, drift, level, steep


@triton.jit
def slope_tile(dz, u, place, inside, unit, drift, level):
    """du / steep of a tile, by `slope_terms`: (P, CB) float32."""
    slope = tl.load(dz + place, mask=inside, other=0.0).to(tl.float32) * unit[None, :]
    return slope - (tl.load(u + place, mask=inside, other=0.0).to(tl.float32) * drift[None, :] + level[None, :])

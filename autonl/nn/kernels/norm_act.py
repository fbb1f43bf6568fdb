# ruff: noqa: N803 - Triton writes what is known when a kernel is compiled in capitals
"""BN with its activation in Triton, for training: y = act(gamma (x - mean) / sqrt(variance + eps) + beta).

PyTorch passes over memory thirteen times for this and its gradient, in eager mode, and fifteen where a swish overwrites
what it is given, of which autograd keeps a copy; here it is eight. What is between BN and activation is not kept: the
backward pass makes it again from x.

Maps are channels-last, so x is rows of channels, one after the other in memory. A line is as many rows as fill a tile's
power of two of columns: column j of a line is channel j % C. Kernels are compiled for tiles, not for numbers of
channels: C8 = C / 8 and what is made of it are not known to the compiler, but that eight channels are one load of 16
bytes is.
"""

import triton
import triton.language as tl

from autonl.nn.kernels.pieces import chain

SIZES = ("T8", "C8", "line", "blocks", "chunk", "entries", "count")  # one compiled kernel for all of them


@triton.jit
def columns(block, C8, line, W: tl.constexpr):
    """(columns of a line, a block's columns (W,), the channels they are (W,), which are real (W,))."""
    chs = C8 * 8
    width = chs * line
    column = block * W + tl.arange(0, W)
    row = ((column + 0.5) / chs).to(tl.int32)  # exact up to a million columns, in a third of an integer division's time
    return width, column, column - row * chs, column < width


@triton.jit
def place_of(row, T8, width, rows):
    """(where a line begins, how many values the `rows` lines from it have): past 2^31 values, offsets have 64 bits."""
    begin = row.to(tl.int64) * width
    return begin, tl.minimum(T8.to(tl.int64) * 8 - begin, rows * width).to(tl.int32)


@triton.jit
def scale_and_shift(gamma, beta, statistics, channel, real, chs, eps):
    """BN as scale x + shift, and its parts: 4 x (W,) float32."""
    mean = tl.load(statistics + channel, mask=real, other=0.0)
    inverse = tl.rsqrt(tl.load(statistics + chs + channel, mask=real, other=1.0) + eps)
    scale = tl.load(gamma + channel, mask=real, other=0.0).to(tl.float32) * inverse
    return scale, tl.load(beta + channel, mask=real, other=0.0).to(tl.float32) - mean * scale, mean, inverse


@triton.jit
def activated(value, ACT: tl.constexpr):
    if ACT == "silu":
        return value * tl.sigmoid(value)
    elif ACT == "relu":
        return tl.where(value < 0.0, 0.0, value)  # tl.maximum would make 0 of NaN
    elif ACT == "relu6":
        return tl.where(value > 6.0, 6.0, tl.where(value < 0.0, 0.0, value))
    else:
        return value


@triton.jit
def through(slope, value, ACT: tl.constexpr):
    """slope times the activation's own at a value."""
    if ACT == "silu":
        gate = tl.sigmoid(value)
        return slope * gate * (1.0 + value * (1.0 - gate))
    elif ACT == "relu":
        return tl.where(value > 0.0, slope, 0.0)
    elif ACT == "relu6":
        return tl.where((value > 0.0) & (value < 6.0), slope, 0.0)
    else:
        return slope


@triton.jit
def store_pair(parts, column, real, width, first, second):
    """What a program has found, 2 x (W,), into its place of (chunks, 2, line C)."""
    out = parts + tl.program_id(1) * (2 * width) + column
    tl.store(out, first, mask=real)
    tl.store(out + width, second, mask=real)


@triton.jit
def entry_place(part, row, line, channel, chs):
    """Where a chunk and a row of a line (ROWS,) lie there, of channels (CB,): (ROWS, CB)."""
    return (part * 2 * line + row)[:, None] * chs + channel[None, :]


@triton.jit
def merged(mean, squares, count):
    """Values in groups under each other (R, W), of which are known how many they are, their mean and the sum of their
    squared differences from it: mean and sum of all (W,), as Chan et al. merge them."""
    total = tl.sum(mean * count, axis=0) / tl.maximum(tl.sum(count, axis=0), 1.0)
    away = mean - total[None, :]
    return total, tl.sum(squares + count * away * away, axis=0)


@triton.jit(do_not_specialize=SIZES)
def moments(
    x,  # rows of C channels
    partial_moments,  # (chunks, 2, line C) float32: means, and sums of squared differences from them
    T8,  # values of x / 8
    C8, line,
    chunk,  # lines a program
    R: tl.constexpr, W: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Each of R x W places keeps the moments of its own values as they come, as Welford does: no pivot that may be far
    from the mean, and nothing large to cancel."""
    chain(FOLLOWS, LEADS)
    width, column, _, real = columns(tl.program_id(0), C8, line, W)
    mean = tl.zeros((R, W), dtype=tl.float32)
    squares = tl.zeros((R, W), dtype=tl.float32)
    begin, values = place_of(tl.program_id(1) * chunk, T8, width, chunk)
    place = tl.arange(0, R)[:, None] * width + column[None, :]
    for start in range(0, chunk, R):
        share = R / (start + R * 1.0)  # of a value among those that its place has seen
        inside = real[None, :] & (start * width + place < values)
        away = tl.load(x + begin + start * width + place, mask=inside, other=0.0).to(tl.float32) - mean
        away = tl.where(inside, away, 0.0)
        mean += away * share
        squares += away * away * (1.0 - share)
    full = values // (R * width)  # steps in which every place has a value
    count = full + (place < values - full * (R * width)).to(tl.int32)
    mean, squares = merged(mean, squares, count.to(tl.float32))
    store_pair(partial_moments, column, real, width, mean, squares)


@triton.jit(do_not_specialize=SIZES)
def norm_statistics(
    partial_moments,
    statistics,  # (2, C) float32: mean and biased variance
    running_mean, running_variance,  # (C,), moved in place, as is the next
    batches_tracked,  # () int64
    entries, line, chunk, C8,
    count,  # values a channel
    momentum,
    ROWS: tl.constexpr, CB: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Merge the moments of all chunks and rows of a line, and move the running statistics as nn.BatchNorm2d does."""
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    real = channel < chs
    mean = tl.zeros((ROWS, CB), dtype=tl.float32)
    squares = tl.zeros((ROWS, CB), dtype=tl.float32)
    seen = tl.zeros((ROWS, 1), dtype=tl.float32)
    for start in range(0, entries, ROWS):
        entry = start + tl.arange(0, ROWS)
        part, row = entry // line, entry % line
        left = tl.maximum(count - part * chunk * line - row, 0)  # values from this entry's first to the last of all
        size = tl.minimum((left + line - 1) // line, chunk)  # of which every line-th is this entry's
        size = tl.where(entry < entries, size, 0).to(tl.float32)[:, None]
        inside = (size > 0) & real[None, :]
        place = entry_place(part, row, line, channel, chs)
        seen += size
        share = size / tl.maximum(seen, 1.0)
        away = tl.load(partial_moments + place, mask=inside, other=0.0) - mean
        away = tl.where(inside, away, 0.0)
        mean += away * share
        squares += away * away * (1.0 - share) * size
        squares += tl.load(partial_moments + place + line * chs, mask=inside, other=0.0)
    mean, squares = merged(mean, squares, seen)
    tl.store(statistics + channel, mean, mask=real)
    tl.store(statistics + chs + channel, squares / count, mask=real)
    old_mean = tl.load(running_mean + channel, mask=real, other=0.0).to(tl.float32)
    old_variance = tl.load(running_variance + channel, mask=real, other=0.0).to(tl.float32)
    new_mean = old_mean + momentum * (mean - old_mean)
    new_variance = old_variance + momentum * (squares / (count - 1) - old_variance)  # unbiased
    tl.store(running_mean + channel, new_mean.to(running_mean.dtype.element_ty), mask=real)
    tl.store(running_variance + channel, new_variance.to(running_variance.dtype.element_ty), mask=real)
    if tl.program_id(0) == 0:
        tl.store(batches_tracked, tl.load(batches_tracked) + 1)


@triton.jit(do_not_specialize=SIZES)
def normalise_act(
    x, y,  # rows of C channels
    gamma, beta,  # (C,)
    statistics,
    T8, C8, line,
    blocks,  # tiles that are a line
    eps,
    ACT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    chain(FOLLOWS, LEADS)
    width, column, channel, real = columns(tl.program_id(0) % blocks, C8, line, W)
    scale, shift, _, _ = scale_and_shift(gamma, beta, statistics, channel, real, C8 * 8, eps)
    begin, values = place_of(tl.program_id(0) // blocks * R, T8, width, R)
    place = tl.arange(0, R)[:, None] * width + column[None, :]
    inside = real[None, :] & (place < values)
    value = tl.load(x + begin + place, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(y + begin + place, activated(value, ACT).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def slope_sums(
    dy, x,  # rows of C channels
    gamma, beta, statistics,
    partial_sums,  # (chunks, 2, line C) float32: sums of dv and of dv (x - mean) / sqrt(variance + eps)
    T8, C8, line, chunk, eps,
    ACT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """dv is the gradient of what the activation takes."""
    chain(FOLLOWS, LEADS)
    width, column, channel, real = columns(tl.program_id(0), C8, line, W)
    scale, shift, mean, inverse = scale_and_shift(gamma, beta, statistics, channel, real, C8 * 8, eps)
    first = tl.zeros((R, W), dtype=tl.float32)
    second = tl.zeros((R, W), dtype=tl.float32)
    begin, values = place_of(tl.program_id(1) * chunk, T8, width, chunk)
    for start in range(0, chunk, R):
        place = (start + tl.arange(0, R))[:, None] * width + column[None, :]
        inside = real[None, :] & (place < values)
        slope = tl.load(dy + begin + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + begin + place, mask=inside, other=0.0).to(tl.float32)
        slope = through(slope, value * scale[None, :] + shift[None, :], ACT)
        first += slope
        second += slope * (value - mean[None, :])
    store_pair(partial_sums, column, real, width, tl.sum(first, axis=0), tl.sum(second, axis=0) * inverse)


@triton.jit(do_not_specialize=SIZES)
def norm_gradients(
    partial_sums,
    sums,  # (2, C) float32
    d_beta, d_gamma,  # (C,) the same in the parameters' dtype
    entries, line, C8,
    ROWS: tl.constexpr, CB: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    real = channel < chs
    first = tl.zeros((ROWS, CB), dtype=tl.float32)
    second = tl.zeros((ROWS, CB), dtype=tl.float32)
    for start in range(0, entries, ROWS):
        entry = start + tl.arange(0, ROWS)
        inside = (entry < entries)[:, None] & real[None, :]
        place = entry_place(entry // line, entry % line, line, channel, chs)
        first += tl.load(partial_sums + place, mask=inside, other=0.0)
        second += tl.load(partial_sums + place + line * chs, mask=inside, other=0.0)
    first, second = tl.sum(first, axis=0), tl.sum(second, axis=0)
    tl.store(sums + channel, first, mask=real)
    tl.store(sums + chs + channel, second, mask=real)
    tl.store(d_beta + channel, first.to(d_beta.dtype.element_ty), mask=real)
    tl.store(d_gamma + channel, second.to(d_gamma.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=SIZES)
def norm_act_input(
    dy, x, dx,  # rows of C channels
    gamma, beta, statistics, sums,
    T8, C8, line, blocks,
    count,  # values a channel
    eps,
    ACT: tl.constexpr, R: tl.constexpr, W: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """dx = scale (dv - mean of dv - (x - mean) / sqrt(variance + eps) times the mean of dv times that)."""
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    width, column, channel, real = columns(tl.program_id(0) % blocks, C8, line, W)
    scale, shift, mean, inverse = scale_and_shift(gamma, beta, statistics, channel, real, chs, eps)
    level = tl.load(sums + channel, mask=real, other=0.0) / count
    drift = tl.load(sums + chs + channel, mask=real, other=0.0) / count * inverse
    level -= drift * mean
    begin, values = place_of(tl.program_id(0) // blocks * R, T8, width, R)
    place = tl.arange(0, R)[:, None] * width + column[None, :]
    inside = real[None, :] & (place < values)
    slope = tl.load(dy + begin + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + begin + place, mask=inside, other=0.0).to(tl.float32)
    slope = through(slope, value * scale[None, :] + shift[None, :], ACT)
    out = scale[None, :] * (slope - (drift[None, :] * value + level[None, :]))
    tl.store(dx + begin + place, out.to(dx.dtype.element_ty), mask=inside)

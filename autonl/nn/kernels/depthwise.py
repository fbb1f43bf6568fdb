# ruff: noqa: N803, N806, RUF005 - Triton writes what is known when a kernel is compiled in capitals
# mypy: disable-error-code="assignment"
"""A depthwise convolution in Triton: KS x KS with a stride of 1 or 2, padded by KS // 2, channels-last.

A row of a map is one run of width C values in memory, and a step to the side is C values. So a program takes a piece of
V8 vectors of eight channels from R rows under each other: every load is 16 bytes, what columns and channels there are.
A row that is loaded serves up to KS rows of the result; the KS columns come from the first cache.

Kernels are compiled for kernel size, stride and tile, not for maps or channels.
"""

import triton
import triton.language as tl

from autonl.nn.kernels.pieces import chain

# one compiled kernel for all of them; C8 is C / 8
SIZES = ("C8", "height", "width", "out_height", "out_width", "images", "share", "band", "column_tiles", "entries")


@triton.jit(do_not_specialize=SIZES)
def transposed_taps(
    weight,  # (C, 1, KS, KS)
    taps,  # (KS KS, C) float32
    C8,
    TAPS: tl.constexpr, FLIPPED: tl.constexpr, CB: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """The weights of a block of channels, with neighbours beside each other; FLIPPED: the last tap first."""
    chain(FOLLOWS, LEADS)
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    tap = tl.arange(0, 32)  # of 9 or 25
    there = (channel < C8 * 8)[:, None] & (tap < TAPS)[None, :]
    kernel = tl.load(weight + channel[:, None] * TAPS + tap[None, :], mask=there, other=0.0).to(tl.float32)
    line = TAPS - 1 - tap if FLIPPED else tap
    tl.store(taps + line[None, :] * (C8 * 8) + channel[:, None], kernel, mask=there)


@triton.jit
def piece(C8, V8: tl.constexpr):
    """This program's vectors of a row: their columns (V8,) and channels (V8, 8)."""
    vector = tl.program_id(0) * V8 + tl.arange(0, V8)
    col = vector // C8
    return col, ((vector - col * C8) * 8)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def load_row(image, row, height, width, col, channel, chs):
    """Vectors at columns (V8,) of a row: (V8, 8) float32, zero outside the map."""
    place = (row * width + col)[:, None] * chs + channel
    row += tl.zeros_like(col)  # Triton's interpreter knows no mask that is partly a scalar
    there = (col >= 0) & (col < width) & (row >= 0) & (row < height)
    return tl.load(image + place, mask=there[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_row(image, row, height, width, col, channel, chs, value):
    place = (row * width + col)[:, None] * chs + channel
    row += tl.zeros_like(col)
    there = (col < width) & (row < height)
    tl.store(image + place, value.to(image.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=SIZES)
def depthwise_forward(
    x,  # (N, H, W, C)
    taps,  # (KS KS, C) float32
    y,  # (N, ceil(H / S), ceil(W / S), C)
    C8, height, width, out_height, out_width,
    KS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, V8: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """y of x; with flipped taps dx of dy, where the stride is 1."""
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    PAD: tl.constexpr = KS // 2
    col, channel = piece(C8, V8)
    first = tl.program_id(1) * R
    x += tl.program_id(2).to(tl.int64) * height * width * chs
    y += tl.program_id(2).to(tl.int64) * out_height * out_width * chs
    real = (col < out_width)[:, None]
    total = ()
    for _ in tl.static_range(R):
        total = total + (tl.zeros((V8, 8), dtype=tl.float32),)
    for right in tl.static_range(KS):
        column = ()
        for down in tl.static_range(KS):
            column = column + (tl.load(taps + (down * KS + right) * chs + channel, mask=real, other=0.0),)
        for step in tl.static_range((R - 1) * S + KS):
            source = load_row(x, first * S + step - PAD, height, width, col * S + right - PAD, channel, chs)
            total = add_row(total, source, column, step, KS, S, R)
    for row in tl.static_range(R):
        store_row(y, first + row, out_height, out_width, col, channel, chs, total[row])


@triton.jit
def add_row(total, source, column, step: tl.constexpr, KS: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    """A loaded row, times its tap, to every row of the result that it belongs to: row S + down = step."""
    new = ()
    for row in tl.static_range(R):
        if step - row * S >= 0 and step - row * S < KS:
            new = new + (total[row] + source * column[step - row * S],)
        else:
            new = new + (total[row],)
    return new


@triton.jit(do_not_specialize=SIZES)
def depthwise_input(
    dy,  # (N, ceil(H / 2), ceil(W / 2), C)
    taps,  # (KS KS, C) float32
    dx,  # (N, H, W, C)
    C8, height, width, out_height, out_width,
    KS: tl.constexpr, R: tl.constexpr, V8: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """dx where the stride is 2, R pairs of rows: an input at 2 a + p takes the dy at a + b by tap p + KS // 2 - 2 b."""
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    PAD: tl.constexpr = KS // 2
    LOW: tl.constexpr = -(PAD // 2)  # the least and the largest b
    HIGH: tl.constexpr = (PAD + 1) // 2
    pair, channel = piece(C8, V8)
    first = tl.program_id(1) * R
    dy += tl.program_id(2).to(tl.int64) * out_height * out_width * chs
    dx += tl.program_id(2).to(tl.int64) * height * width * chs
    real = (pair < out_width)[:, None]
    for odd in tl.static_range(2):  # columns
        total = ()
        for _ in tl.static_range(2 * R):
            total = total + (tl.zeros((V8, 8), dtype=tl.float32),)
        for side in tl.static_range(HIGH - LOW + 1):
            if odd + PAD - 2 * (side + LOW) >= 0 and odd + PAD - 2 * (side + LOW) < KS:
                column = ()
                for down in tl.static_range(KS):
                    tap = down * KS + odd + PAD - 2 * (side + LOW)
                    column = column + (tl.load(taps + tap * chs + channel, mask=real, other=0.0),)
                for step in tl.static_range(R + HIGH - LOW):
                    source = load_row(dy, first + step + LOW, out_height, out_width, pair + side + LOW, channel, chs)
                    new = ()
                    for row in tl.static_range(2 * R):
                        if row + PAD - 2 * (step + LOW) >= 0 and row + PAD - 2 * (step + LOW) < KS:
                            new = new + (total[row] + source * column[row + PAD - 2 * (step + LOW)],)
                        else:
                            new = new + (total[row],)
                    total = new
        for row in tl.static_range(2 * R):
            store_row(dx, 2 * first + row, height, width, 2 * pair + odd, channel, chs, total[row])


@triton.jit(do_not_specialize=SIZES)
def depthwise_weight(
    x,  # (N, H, W, C)
    dy,  # (N, ceil(H / S), ceil(W / S), C)
    parts,  # (entries, KS KS, C) float32: dw of a program's images and rows
    C8, height, width, out_height, out_width,
    images,
    share,  # images a program
    band,  # rows a program
    column_tiles,
    KS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, TW: tl.constexpr, CB: tl.constexpr, WIDE: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """WIDE columns of taps a program: more of them, and their sums do not fit into the registers."""
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    PAD: tl.constexpr = KS // 2
    GROUPS: tl.constexpr = (KS + WIDE - 1) // WIDE  # programs beside each other take the same maps, and other taps
    left = tl.program_id(0) % GROUPS * WIDE
    channel = tl.program_id(0) // GROUPS * CB + tl.arange(0, CB)
    real = channel < chs
    begin = tl.program_id(1) * band
    end = tl.minimum(begin + band, out_height)
    image = (tl.program_id(2) * share).to(tl.int64)
    total = ()
    for _ in tl.static_range(KS * WIDE):
        total = total + (tl.zeros((TW, CB), dtype=tl.float32),)
    for number in range(0, tl.minimum(share, images - tl.program_id(2) * share)):
        source = x + (image + number) * height * width * chs
        slope = dy + (image + number) * out_height * out_width * chs
        for tile in range(column_tiles):
            col = tile * TW + tl.arange(0, TW)
            for first in range(begin, end, R):
                d = ()
                for row in tl.static_range(R):
                    line = first + row + tl.zeros_like(col)
                    there = (col < out_width) & (line < end)
                    place = (line * out_width + col)[:, None] * chs + channel[None, :]
                    value = tl.load(slope + place, mask=there[:, None] & real[None, :], other=0.0)
                    d = d + (value.to(tl.float32),)
                for side in tl.static_range(WIDE):
                    right = left + side + tl.zeros_like(col)
                    at = col * S + right - PAD
                    for step in tl.static_range((R - 1) * S + KS):
                        line = first * S + step - PAD + tl.zeros_like(col)
                        there = (at >= 0) & (at < width) & (line >= 0) & (line < height) & (right < KS)
                        place = (line * width + at)[:, None] * chs + channel[None, :]
                        value = tl.load(source + place, mask=there[:, None] & real[None, :], other=0.0)
                        total = add_products(total, value.to(tl.float32), d, step, side, KS, S, R, WIDE)
    entry = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    parts += entry.to(tl.int64) * (KS * KS) * chs
    for side in tl.static_range(WIDE):
        right = left + side + tl.zeros_like(channel)
        for down in tl.static_range(KS):
            out = parts + (down * KS + right) * chs + channel
            tl.store(out, tl.sum(total[down * WIDE + side], axis=0), mask=real & (right < KS))


@triton.jit
def add_products(
    total, value, d, step: tl.constexpr, side: tl.constexpr,
    KS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row of x times every row of dy that it meets, to the sum of the tap by which: row S + down = step."""
    new = ()
    for down in tl.static_range(KS):
        for other in tl.static_range(WIDE):
            if other == side and step >= down and (step - down) % S == 0 and (step - down) // S < R:
                new = new + (total[down * WIDE + other] + value * d[(step - down) // S],)
            else:
                new = new + (total[down * WIDE + other],)
    return new


@triton.jit(do_not_specialize=SIZES)
def depthwise_sums(
    parts,  # (entries, KS KS, C) float32
    d_weight,  # (C, 1, KS, KS)
    C8, entries,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CB: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """dw: a program sums one tap of a block of channels."""
    chain(FOLLOWS, LEADS)
    chs = C8 * 8
    tap = tl.program_id(1)
    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    real = channel < chs
    total = tl.zeros((ROWS, CB), dtype=tl.float32)
    for start in range(0, entries, ROWS):
        entry = start + tl.arange(0, ROWS)
        place = (entry.to(tl.int64) * TAPS + tap)[:, None] * chs + channel[None, :]
        total += tl.load(parts + place, mask=(entry < entries)[:, None] & real[None, :], other=0.0)
    out = tl.sum(total, axis=0).to(d_weight.dtype.element_ty)
    tl.store(d_weight + channel * TAPS + tap, out, mask=real)

# ruff: noqa: N803, N806, SIM102 - Triton writes what is known when a kernel is compiled in capitals
"""LightNL with the depthwise kernel inside the product, in Triton: for few compact channels on large maps.

u[p] = sum_t w[t] y[p + t] and y = x_c G, so u = X W with the compact channels of all nine positions around p side by
side, X (H W, 9 Cr), and W[(t, r), c] = w[t, c] G[r, c]. `gathered_forward` takes two products a tile, of the eight
neighbours and of the position itself, and neither y nor du has to be kept where neighbours can see it. It makes W
where a program has a whole image; of larger ones `gathered_weights` does. `gathered_backward` has the way back.

In comments P, CB and RP are a tile's positions, channels and compact channels (8 or more). Loads of neighbours are not
pipelined: that would take them past the first cache, which holds what neighbours share. Products with rows of zeros and
ones spread what is not finite over all channels of a position.
"""

import triton
import triton.language as tl

from autonl.nn.kernels.pieces import (
    chain,
    folded_norm,
    gram_block,
    offsets,
    store_moments,
    this_program,
)


@triton.jit
def around(
    x, start, end, height, width,
    CHS: tl.constexpr, COMPACT: tl.constexpr, CHANNELS_LAST: tl.constexpr, P: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """The compact channels of the eight positions around each of P positions from `start` on, row by row: (P, 8 RP),
    zero outside the map and from `end` on. Whole 16-byte loads, as in compact_tile.

    They are loaded one side after the other, (8 P, RP): threads beside each other then read positions beside each
    other, and a load touches fewer lines of the first cache, whose rate is what these kernels wait for.
    """
    LIMIT: tl.constexpr = min(CHS, (COMPACT + 7) // 8 * 8)
    line = tl.arange(0, 8 * P)
    side = line // P
    tap = side + (side >= 4).to(tl.int32)
    down = tap // 3 - 1
    right = tap % 3 - 1
    position = start + line % P
    row, col = place_of(position, width)
    inside = (position < end) & within(row + down, height) & within(col + right, width)
    near = (position + (down * width + right))[:, None]
    compact = tl.arange(0, RP)[None, :]
    place = near * CHS + compact if CHANNELS_LAST else near + compact * (height * width)
    sides = tl.load(x + place, mask=inside[:, None] & (compact < LIMIT), other=0.0)
    return tl.reshape(tl.permute(tl.reshape(sides, (8, P, RP)), (1, 0, 2)), (P, 8 * RP))


@triton.jit
def place_of(position, width):
    """Row and column of positions below 2**20: there a float quotient, with an error of a few units in its last place,
    never reaches the next row. A division of integers takes three times as many instructions."""
    row = ((position.to(tl.float32) + 0.5) * (1.0 / width)).to(tl.int32)
    return row, position - row * width


@triton.jit
def within(index, size):
    """0 <= index < size, in one comparison."""
    return index.to(tl.uint32, bitcast=True) < size


@triton.jit
def side_taps():
    """The numbers of a 3x3 kernel's taps but the centre, which is 4: (8,)."""
    tap = tl.arange(0, 8)
    return tap + (tap >= 4).to(tl.int32)


@triton.jit
def load_taps(weight, channel, CHS: tl.constexpr):
    """Depthwise kernels (C, 1, 3, 3) of a block of channels, float32: the sides (8, CB) and the centre (CB,)."""
    real = channel < CHS
    sides = tl.load(weight + channel[None, :] * 9 + side_taps()[:, None], mask=real[None, :], other=0.0)
    return sides.to(tl.float32), tl.load(weight + channel * 9 + 4, mask=real, other=0.0).to(tl.float32)


@triton.jit
def without_padding(matrix, RP: tl.constexpr, ROWS: tl.constexpr, CB: tl.constexpr):
    """(ROWS, CB) -> (RP, CB): rows from RP on are zero."""
    if RP == ROWS:
        return matrix
    else:
        return tl.sum(tl.reshape(matrix, (ROWS // RP, RP, CB)), axis=0)


@triton.jit
def sampled_tile(
    x, start, end, channel, height, width,
    CHS: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """x at P samples from `start` on, zero from `end` on: (P, CB)."""
    sample = start + tl.arange(0, P)
    if STRIDE == 1:
        position = sample
    else:
        row, col = place_of(sample, (width + STRIDE - 1) // STRIDE)
        position = row * STRIDE * width + col * STRIDE
    place = offsets(position, channel, height * width, CHS, CHANNELS_LAST)
    return tl.load(x + place, mask=(sample < end)[:, None] & (channel < CHS)[None, :], other=0.0)


@triton.jit
def weights_of_image(
    x,  # (H W, C) or (C, H W): the image's own
    weight,  # (C, 1, 3, 3)
    gamma, beta, mean, variance,  # (C,) inference only
    gram_out,  # (N, Cr, C) float32, training only: G
    image, channel, height, width, samples, eps,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, TRAINING: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """W / factor in float32, of which a BN for inference is a part: the eight sides (8 RP, CB) and the position itself
    (CB, CB), whose rows from COMPACT on are zero; factor is 1 but for float16. An image's first program keeps G.

    G is part of x_s^T x_s: what a load brings is both sides of the product. The next step's is under way meanwhile.
    """
    positions = height * width
    sides, centre = load_taps(weight, channel, CHS)  # (8, CB), (CB,): on their way while x is read
    if not TRAINING:
        inverse, _ = folded_norm(gamma, beta, mean, variance, channel, eps, CHS)
        sides *= inverse[None, :]
        centre *= inverse
    gram = tl.zeros((CB, CB), dtype=tl.float32)
    x_s = sampled_tile(x, 0, samples, channel, height, width, CHS, STRIDE, CHANNELS_LAST, P)  # (P, CB)
    for start in range(0, samples, P):
        ahead = sampled_tile(x, start + P, samples, channel, height, width, CHS, STRIDE, CHANNELS_LAST, P)
        gram = tl.dot(tl.trans(x_s), x_s, gram, input_precision="ieee")  # (CB, P) (P, CB) -> (CB, CB)
        x_s = ahead
    _, matrix, both = gram_block(channel, CHS, COMPACT, CB)  # (CB, CB)
    gram = tl.where(both, gram / positions, 0.0)
    if TRAINING:
        if tl.program_id(1) == 0:
            tl.store(gram_out + image * (COMPACT * CHS) + matrix, gram, mask=both)
    if ENERGY_EPS > 0:
        own = channel[:, None] == channel[None, :]
        gram /= tl.sum(tl.sum(tl.where(own, gram, 0.0), axis=1), axis=0) / COMPACT + ENERGY_EPS
    few = without_padding(gram, RP, CB, CB)  # (RP, CB)
    outer = tl.reshape(sides[:, None, :] * few[None, :, :], (8 * RP, CB))
    inner = gram * centre[None, :]
    factor = 1.0
    if x.dtype.element_ty == tl.float16:
        peak = tl.maximum(tl.max(tl.max(tl.abs(outer), axis=1), axis=0), tl.max(tl.max(tl.abs(inner), axis=1), axis=0))
        factor = tl.where(peak > 0, peak, 1.0)
        outer /= factor
        inner /= factor
    return outer, inner, factor


@triton.jit
def gathered_weights(
    x,  # (N, C, H, W) in either memory format
    weight, gamma, beta, mean, variance, gram_out,  # as weights_of_image takes them
    products,  # (N, 9 RP, C) like x: W / factor, the eight sides' rows first
    factors,  # (N,) float32
    height, width, samples, eps,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, TRAINING: tl.constexpr, P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """G and W of an image, for all its bands. All channels are one block."""
    chain(FOLLOWS, LEADS)
    image, _, _, channel, _ = this_program(samples, samples, CB)
    x += image * height * width * CHS
    outer, inner, factor = weights_of_image(
        x, weight, gamma, beta, mean, variance, gram_out, image, channel, height, width, samples, eps,
        CHS, COMPACT, STRIDE, CHANNELS_LAST, ENERGY_EPS, TRAINING, P, CB, RP,
    )  # fmt: skip
    if x.dtype.element_ty == tl.float16:
        tl.store(factors + image, factor)
    products += image * (9 * RP * CHS)
    real = (channel < CHS)[None, :]
    _, place, _ = gram_block(channel, CHS, 8 * RP, 8 * RP)
    tl.store(products + place, outer.to(products.dtype.element_ty), mask=real)
    _, place, both = gram_block(channel, CHS, COMPACT, CB)
    tl.store(products + 8 * RP * CHS + place, inner.to(products.dtype.element_ty), mask=both)


@triton.jit
def convolved(
    x, start, end, channel, outer, inner, factor, height, width,
    CHS: tl.constexpr, COMPACT: tl.constexpr, CHANNELS_LAST: tl.constexpr, P: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """u and x at P positions from `start` on, zero from `end` on: 2 x (P, CB), the first in float32."""
    position = start + tl.arange(0, P)
    place = offsets(position, channel, height * width, CHS, CHANNELS_LAST)
    tile = tl.load(x + place, mask=(position < end)[:, None] & (channel < CHS)[None, :], other=0.0)
    beside = around(x, start, end, height, width, CHS, COMPACT, CHANNELS_LAST, P, RP)  # (P, 8 RP)
    u = tl.dot(beside, outer, input_precision="ieee")  # (P, 8 RP) (8 RP, CB) -> (P, CB)
    u = tl.dot(tile, inner, u, input_precision="ieee")  # (P, CB) (CB, CB) -> (P, CB)
    if x.dtype.element_ty == tl.float16:
        u *= factor
    return u, tile


@triton.jit
def gathered_forward(
    x,  # (N, C, H, W) in either memory format
    out,  # like x: z for inference, u for training
    products, factors,  # as gathered_weights leaves them; where there are none, every band makes W for itself
    weight, gamma, beta, mean, variance, gram_out,  # as weights_of_image takes them
    moments,  # (N bands, 2, C) float32, training only: a band's mean of u, and sum of squared differences from it
    height, width, samples,
    band,  # positions a program makes
    eps,
    CHS: tl.constexpr, COMPACT: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ENERGY_EPS: tl.constexpr, TRAINING: tl.constexpr, GRAM_PARTS: tl.constexpr, GRAM_P: tl.constexpr,
    P: tl.constexpr, CB: tl.constexpr, RP: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """All channels are one block: a position's own compact channels, which a product needs, are among what is added."""
    chain(FOLLOWS, LEADS)
    positions = height * width
    image, begin, end, channel, entry = this_program(positions, band, CB)
    real = channel < CHS
    x += image * positions * CHS
    out += image * positions * CHS
    factor = 1.0
    if GRAM_PARTS == 0:
        outer, inner, factor = weights_of_image(
            x, weight, gamma, beta, mean, variance, gram_out, image, channel, height, width, samples, eps,
            CHS, COMPACT, STRIDE, CHANNELS_LAST, ENERGY_EPS, TRAINING, GRAM_P, CB, RP,
        )  # fmt: skip
        outer = outer.to(x.dtype.element_ty)
    else:
        products += image * (9 * RP * CHS)
        _, place, _ = gram_block(channel, CHS, 8 * RP, 8 * RP)
        outer = tl.load(products + place, mask=real[None, :], other=0.0)  # (8 RP, CB)
        _, place, both = gram_block(channel, CHS, COMPACT, CB)
        inner = tl.load(products + 8 * RP * CHS + place, mask=both, other=0.0)  # (CB, CB)
        if x.dtype.element_ty == tl.float16:
            factor = tl.load(factors + image)
    column = tl.arange(0, CB)
    same = (column[:, None] == column[None, :]).to(x.dtype.element_ty)  # (CB, CB): a product that adds x
    if not TRAINING and x.dtype.element_ty != tl.float16:  # no product of its own: W is not divided by a factor
        inner = inner.to(tl.float32) + same.to(tl.float32)
    inner = inner.to(x.dtype.element_ty)
    if TRAINING:
        # sums of (u - pivot) and its square, a position of the tile each: summed over the tile only once, below.
        # The pivot, the mean of u in the first tile, keeps a mean far from zero from swamping the variance.
        plain_sum = tl.zeros((P, CB), dtype=tl.float32)
        square_sum = tl.zeros((P, CB), dtype=tl.float32)
        first, _ = convolved(
            x, begin, end, channel, outer, inner, factor, height, width, CHS, COMPACT, CHANNELS_LAST, P, RP
        )  # fmt: skip
        pivot = tl.sum(first, axis=0) / tl.minimum(end - begin, P)
    else:
        _, shift = folded_norm(gamma, beta, mean, variance, channel, eps, CHS)
    for start in range(begin, end, P):
        u, tile = convolved(
            x, start, end, channel, outer, inner, factor, height, width, CHS, COMPACT, CHANNELS_LAST, P, RP
        )  # fmt: skip
        position = start + tl.arange(0, P)
        here = (position < end)[:, None] & real[None, :]
        spots = offsets(position, channel, positions, CHS, CHANNELS_LAST)
        if TRAINING:
            away = tl.where(here, u - pivot[None, :], 0.0)
            plain_sum += away
            square_sum += away * away
            tl.store(out + spots, u.to(out.dtype.element_ty), mask=here)
        else:
            if x.dtype.element_ty == tl.float16:
                u = tl.dot(tile, same, u, input_precision="ieee")
            tl.store(out + spots, (u + shift[None, :]).to(out.dtype.element_ty), mask=here)
    if TRAINING:
        store_moments(moments + entry * (2 * CHS), channel, pivot, plain_sum, square_sum, end - begin, CHS)

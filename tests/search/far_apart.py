"""A task that only long range solves: are the digits at the two ends of a strip the same?

Canvas 12 x 96, zeros and ones of 10 x 10 px at the left and right end. No receptive field of the small space below
reaches from one to the other, and what is pooled at the end is a sum over positions, which cannot tell 0 + 1 from
half of 0 + 0 and half of 1 + 1. SE would solve it alone, so the space has none.
"""

import torch
import torch.nn.functional as F

from autonl.data.digits import digits
from autonl.data.memory import StoredImages
from autonl.data.sources import Source
from autonl.search.space import Space

SPACE = Space(
    name="far-apart",
    resolution="12x96",
    classes=2,
    stem=16,
    head=64,
    activation="relu6",
    bn_eps=1e-5,
    bn_momentum=0.1,
    first="k3_s1_e1_c16",
    stages=((24, 2, 4),),
    kernels=(3,),
    expands=(2, 3, 4, 5, 6),
    se=(),
    operator="lightnl",
)


def far_apart(pairs: int = 20_000, validation_pairs: int = 2_000) -> Source:
    train, validation = digits()
    return Source(("different", "same"), draw_pairs(train, pairs, 0), draw_pairs(validation, validation_pairs, 1))


def draw_pairs(stored: StoredImages, count: int, seed: int) -> StoredImages:
    generator = torch.Generator().manual_seed(seed)
    small = F.interpolate(stored.images[:, :1].float(), size=(10, 10), mode="area")  # (N, 1, 10, 10)
    members = [small[stored.labels == digit] for digit in (0, 1)]
    canvas = torch.zeros(count, 1, 12, 96)
    drawn = torch.randint(2, (count, 2), generator=generator)  # left, right
    for column, left in ((0, 1), (1, 85)):
        for digit in (0, 1):
            places = (drawn[:, column] == digit).nonzero().squeeze(1)
            chosen = torch.randint(len(members[digit]), (len(places),), generator=generator)
            canvas[places, :, 1:11, left : left + 10] = members[digit][chosen]
    labels = (drawn[:, 0] == drawn[:, 1]).long()
    return StoredImages(canvas.to(torch.uint8).expand(-1, 3, -1, -1).contiguous(), labels)

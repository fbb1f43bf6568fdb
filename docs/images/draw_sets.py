"""The drawn images behind docs/pictures.md, out of the embedded digits, and the two networks that are not in the zoo.

python docs/images/draw_sets.py        writes sets/cluttered, sets/pairs, plain.yaml and pairs.yaml
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from autonl import write_arch
from autonl.arch.zoo import zoo_arch
from autonl.data.digits import digits

PAIRS = """\
name: pairs
resolution: 64
classes: 2
stem: 16
head: 64
activation: relu6
blocks:
  - k3_s1_e1_c16
  - k3_s2_e3_c24
  - k3_s1_e3_c24_nl0.5/1
  - k3_s1_e3_c24_nl0.5/1
"""

Pick = Callable[[int], Image.Image]  # a label -> one of its digits, 32 x 32


def cluttered(pick: Pick, chance: random.Random) -> tuple[str, Image.Image]:
    """A digit anywhere on 64 x 64 pixels, among eight scraps of other digits."""
    canvas = Image.new("RGB", (64, 64))
    for _ in range(8):
        left, top = chance.randrange(6, 20), chance.randrange(6, 20)
        scrap = pick(chance.randrange(10)).crop((left, top, left + 8, top + 8))
        canvas.paste(scrap, (chance.randrange(56), chance.randrange(56)))
    label = chance.randrange(10)
    canvas.paste(pick(label).crop((4, 4, 28, 28)), (chance.randrange(40), chance.randrange(40)))
    return str(label), canvas


def pairs(pick: Pick, chance: random.Random) -> tuple[str, Image.Image]:
    """A 0 or a 1 near the upper left corner, and another near the lower right one: are they the same?"""
    canvas = Image.new("RGB", (64, 64))
    left, right = chance.randrange(2), chance.randrange(2)
    for label, corner in ((left, 0), (right, 40)):
        place = corner + chance.randrange(5), corner + chance.randrange(5)
        canvas.paste(pick(label).resize((20, 20), Image.Resampling.BICUBIC), place)
    return ("same" if left == right else "different"), canvas


def main() -> None:
    for draw, counts in ((cluttered, (8000, 500)), (pairs, (4000, 500))):
        for part, stored, count in zip(("train", "val"), digits(), counts, strict=True):
            chance = random.Random(f"{draw.__name__} {part}")
            members = [stored.images[stored.labels == label] for label in range(10)]

            def pick(label: int, members: list = members, chance: random.Random = chance) -> Image.Image:
                return Image.fromarray(chance.choice(members[label]).permute(1, 2, 0).numpy())

            for number in range(count):
                label, image = draw(pick, chance)
                folder = Path("sets", draw.__name__, part, label)
                folder.mkdir(parents=True, exist_ok=True)
                image.save(folder / f"{number:05d}.png")
    Path("pairs.yaml").write_text(PAIRS)
    spec = zoo_arch("digits")
    blocks = tuple(dataclasses.replace(block, lightnl=None) for block in spec.blocks)
    write_arch(dataclasses.replace(spec, name="plain", blocks=blocks), "plain.yaml")


if __name__ == "__main__":
    main()

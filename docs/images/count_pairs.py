"""Does what two pictures of docs/pictures.md show hold on many images? From the middle of the upper left digit, is the
mean affinity to the other digit's corner above 0?

    python docs/images/count_pairs.py      needs runs/pairs and sets/pairs of that page
"""

from __future__ import annotations

from collections import Counter

from autonl.cam import affinities
from autonl.cam.run import choose_images, open_trained
from autonl.train.config import Config, load_config

RUN = "runs/pairs"
HALF = 9  # of 16 x 16 positions: the lower right digit begins at pixel 40 = position 10


def main() -> None:
    config: Config = load_config(f"{RUN}/config.yaml")
    chosen = choose_images(RUN, config, indices=range(0, 500, 5))
    network = open_trained(RUN, config, chosen)
    images: Counter[str] = Counter()
    above: Counter[tuple[str, int]] = Counter()
    for place, truth in zip(chosen.places, chosen.truths, strict=True):
        seen = network.see(chosen.images, place)
        rows, columns = (network.pixels(seen)[0, :26, :26] > 0.5).nonzero(as_tuple=True)
        middle = int(columns.float().mean()), int(rows.float().mean())
        name = chosen.class_name(truth or 0)
        images[name] += 1
        for block in affinities(network.module, seen, [middle], [2, 3]):
            above[name, block.block] += int(block.rows[0, HALF:, HALF:].mean() > 0)
    for (name, block), count in sorted(above.items()):
        print(f"{name}, block {block}: above 0 in {count} of {images[name]} images")


if __name__ == "__main__":
    main()

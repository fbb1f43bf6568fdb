"""The few lines that run an exported file: they need its runtime, numpy and pillow, and nothing of autonl."""

from __future__ import annotations

import string
from dataclasses import asdict, dataclass

OPENED = '''"""$what, whose name comes behind that of this script. Needs $packages, and nothing else."""

import json
import pathlib
import sys

import numpy as np
$imports
from PIL import Image

if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_file():
    sys.exit(f"usage: python {pathlib.Path(__file__).name} IMAGE, a file")
here = pathlib.Path(__file__).absolute().parent
FILE, about = str(here / $file), json.loads((here / $about).read_text(encoding="utf-8"))
try:
    (height, width), image = about["size"], Image.open(sys.argv[1])
    if image.mode.startswith("I"):  # 16 bits, which PIL would cut at 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    image = image.convert("RGB")
except OSError:
    sys.exit(f"{sys.argv[1]}: not an image, or in a format that PIL does not read")
'''

RUN = """image = ((image - about["mean"]) / about["std"]).astype(np.float32)
image = image.transpose(2, 0, 1)[None].copy()  # (1, 3, H, W)
$load
$run
sys.stdout.reconfigure(errors="backslashreplace")  # a label may be more than a terminal can show
"""

# as timm's evaluation does it, which rounds one way where both sides are equal and another way where they are not
CLASSIFICATION = f"""{OPENED}tall, wide = int(height / about["crop_pct"]), int(width / about["crop_pct"])
shrink = min(image.height / tall, image.width / wide)
size = [length * tall // min(image.size) if tall == wide else round(length / shrink) for length in image.size]
image = image.resize(size, Image.Resampling[about["interpolation"]])
left, top = round((image.width - width) / 2), round((image.height - height) / 2)
image = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255  # (H, W, 3)
{RUN}for place in logits.argsort()[::-1][:5]:
    print(f"{{logits[place]:8.3f}}  {{about['labels'][place]}}")
"""

# the whole image in the upper left corner, reduced where it is too large, around it the mean: autonl.data.masks.FitInto
SEGMENTATION = f"""{OPENED}whole, factor = image.size, min(1, height / image.height, width / image.width)
image = image.resize([max(1, round(side * factor)) for side in whole], Image.Resampling[about["interpolation"]])
seen = Image.new("RGB", (width, height), tuple(round(255 * mean) for mean in about["mean"]))
seen.paste(image)
shown, image = image.size, np.asarray(seen, np.float32) / 255  # (H, W, 3)
{RUN}classes = logits.argmax(0).astype(np.uint8)[: shown[1], : shown[0]]  # (H, W)
for number, count in zip(*np.unique(classes, return_counts=True)):
    print(f"{{count / classes.size:6.1%}}  {{about['labels'][number]}}")
mask = Image.fromarray(classes).resize(whole, Image.Resampling.NEAREST)
mask.putpalette(about["palette"])
picture = pathlib.Path(sys.argv[1])
mask.save(out := picture.with_name(f"{{picture.stem}}_classes.png"))
print(out)
"""


@dataclass(frozen=True)
class Runner:
    """What a format puts into the script: how its runtime is imported, loads FILE, and makes `logits` of `image`."""

    packages: str
    imports: str
    load: str
    run: str

    def script(self, segmentation: bool, names: dict[str, str], load: str | None = None) -> str:
        """For files of these names: file and about; `load` in place of the usual."""
        what = "What is where on a picture" if segmentation else "What is on a picture"
        template = string.Template(SEGMENTATION if segmentation else CLASSIFICATION)
        quoted = {name: repr(value) for name, value in names.items()}
        return template.substitute(asdict(self) | quoted | {"what": what, "load": load or self.load})

"""The few lines that run an exported file: they need its runtime, numpy and pillow, and nothing of autonl."""

from __future__ import annotations

import string

TEMPLATE = string.Template('''"""What is on a picture: python $script IMAGE. Needs $packages, and nothing else."""

import json
import pathlib
import sys

import numpy as np
$imports
from PIL import Image

if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_file():
    sys.exit("usage: python $script IMAGE, a file")
here = pathlib.Path(__file__).parent
FILE, about = str(here / "$file"), json.loads((here / "$about").read_text(encoding="utf-8"))
try:
    (height, width), image = about["size"], Image.open(sys.argv[1])
    if image.mode.startswith("I"):  # 16 bits, which PIL would cut at 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    image = image.convert("RGB")
except OSError:
    sys.exit(f"{sys.argv[1]}: not an image, or in a format that PIL does not read")
side, short = int(min(height, width) / about["crop_pct"]), min(image.size)
image = image.resize([length * side // short for length in image.size], Image.Resampling[about["interpolation"]])
left, top = round((image.width - width) / 2), round((image.height - height) / 2)
image = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255  # (H, W, 3)
image = ((image - about["mean"]) / about["std"]).astype(np.float32).transpose(2, 0, 1)[None].copy()  # (1, 3, H, W)
$load
$run
sys.stdout.reconfigure(errors="backslashreplace")  # a label may be more than a terminal can show
for place in logits.argsort()[::-1][:5]:
    print(f"{logits[place]:8.3f}  {about['labels'][place]}")
''')


def runner_script(packages: str, imports: str, load: str, run: str) -> str:
    """The script of a format; $script, $file and $about are left open until the file has a name."""
    return TEMPLATE.safe_substitute(packages=packages, imports=imports, load=load, run=run)

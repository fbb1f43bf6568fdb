"""What lies beside an exported file: what to feed it with, the labels, and a script that runs it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo

from autonl.data.memory import View
from autonl.export.formats import Format
from autonl.segment.network import Segmenter
from autonl.version import __version__


def description(model: Any, names: Sequence[str], view: View, *, dynamic_batch: bool, quantize: bool) -> dict[str, Any]:
    """What the one who runs the file must know; `names` of its classes, where they are known."""
    about = {
        "autonl": __version__,
        "size": list(view.size),
        "mean": list(view.mean),
        "std": list(view.std),
        "interpolation": (view.interpolation if isinstance(model, Segmenter) else interpolation_of(view)).upper(),
        "crop_pct": view.crop_pct,
        "batch": "any" if dynamic_batch else 1,
        "precision": "int8" if quantize else "float32",
        "labels": list(names) or numbered_classes(model.num_classes),
    }
    if isinstance(model, Segmenter):
        from autonl.segment.pictures import palette

        about["palette"] = palette().flatten().tolist()
    return about


def interpolation_of(view: View) -> str:
    """Of a classifier: timm's ResizeKeepRatio, which it takes for sides that are not equal, is given none."""
    height, width = (math.floor(side / view.crop_pct) for side in view.size)
    return view.interpolation if height == width else "bilinear"


def numbered_classes(count: int) -> list[str]:
    """ImageNet's names where there are as many classes as it has; numbers otherwise."""
    if count == 1000:
        info = ImageNetInfo()
        return [info.index_to_description(index) for index in range(count)]
    return [str(index) for index in range(count)]


def write_companions(path: Path, form: Format, about: dict[str, Any], segmentation: bool) -> None:
    """What to feed it with and what comes out (.json), the labels (.labels.txt), and the script that runs it."""
    # with the format in their names: a folder may hold a network in several
    script, names = f"{path.stem}_{form.name}.py", {"file": path.name, "about": f"{path.name}.json"}
    (path.parent / names["about"]).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    labels = "".join(f"{label}\n" for label in about["labels"])
    (path.parent / f"{path.name}.labels.txt").write_text(labels, encoding="utf-8")
    load = form.custom_op.load if form.custom_op and about["custom_op"] else None
    (path.parent / script).write_text(form.runner.script(segmentation, names, load), encoding="utf-8")

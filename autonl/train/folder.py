"""What a run folder says of its run, and the settings that a resumed run must share with it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
import torchvision

from autonl.arch.codec import spec_to_dict, to_yaml
from autonl.arch.spec import ArchSpec
from autonl.data.memory import View
from autonl.data.pairs import MaskedSource
from autonl.data.sources import Source
from autonl.errors import AutoNLError
from autonl.models import ARCH_FILE, RUN_FILE, TIMM_PREFIX, Ref, resolve, run_folder
from autonl.train.config import Config, changed_config, from_dict, read_yaml, to_dict
from autonl.train.state import write_atomically
from autonl.version import __version__
from autonl.weights import refuse_segmentation

CONFIG_FILE, CLASSES_FILE = "config.yaml", "classes.txt"
SEARCH_FILE = "search.json"  # of a search: how the gates moved and what was compared
IOU_FILE, OVERLAYS_FILE = "iou.csv", "overlays.png"  # of a segmentation: class by class, and images with what was found
MAX_DEPTH = 4  # of settings inside settings: a damaged YAML file may contain itself

# settings that say where and how fast, not what: they may change when a run is resumed
MAY_CHANGE = {"data.path", "data.workers", "data.max_corrupt", "data.evaluation_batch_size"} | {
    f"loop.{name}" for name in ("graph", "kernels", "log_steps", "checkpoint_epochs", "checkpoint_steps")
}


def describe(ref: Ref, config: Config, classes: int, size: tuple[int, int], command: str) -> dict[str, Any]:
    """What a run and its checkpoints know of themselves."""
    architecture = resolve(ref)
    arguments = config.model
    if isinstance(architecture, ArchSpec):
        architecture = dataclasses.replace(architecture, classes=classes, resolution=size)
        arguments = {name: value for name, value in arguments.items() if name != "num_classes"}
    return {
        "ref": architecture.name if isinstance(architecture, ArchSpec) else TIMM_PREFIX + architecture,
        "architecture": spec_to_dict(architecture) if isinstance(architecture, ArchSpec) else None,
        "model": arguments,
        "config": to_dict(config),
        "seed": config.seed,
        "command": command,
        "versions": {
            "autonl": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "torchvision": str(torchvision.__version__),
            "timm": timm.__version__,
            "lightning": lightning.__version__,
        },
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }


def describe_data(source: Source | MaskedSource) -> dict[str, Any]:
    """What must be the same when a run is resumed, wherever the images lie by then."""
    return {"training_images": len(source.train) if source.train else 0, "classes": list(source.classes)}


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoNLError(f"{folder}: cannot be made: {error.strerror}") from None


def write_description(folder: Path, about: dict[str, Any], classes: Sequence[str]) -> None:
    """arch.yaml, config.yaml, run.yaml and classes.txt of a new run folder."""

    def write(name: str, content: Any) -> None:
        text = content if isinstance(content, str) else to_yaml(content)
        write_atomically(folder / name, text.encode())

    about = {name: value for name, value in about.items() if name != "classes"}
    architecture, config = about.pop("architecture"), about.pop("config")
    if architecture:
        write(ARCH_FILE, architecture)
    if classes:
        write(CLASSES_FILE, "".join(f"{name}\n" for name in classes))
    write(RUN_FILE, about)
    write(CONFIG_FILE, config)


def run_config(ref: Ref, settings: Iterable[str] = ()) -> Config:
    """The settings of a run folder as those of a training, with `section.name=value` on top; for any other REF the
    defaults. The sections of a search say nothing of the network that it found; a segmentation is refused."""
    refuse_segmentation(ref)
    sections = {name: section for name, section in kept_settings(ref).items() if name not in ("search", "segment")}
    return changed_config(sections, settings, Config)


def run_colours(ref: Ref, config: Config, names: Sequence[str] = ("mean", "std")) -> dict[str, Any]:
    """How the network of a run folder saw its images, where the settings do not say it."""
    try:
        kept = from_dict(Config, {"data": kept_settings(ref).get("data")}).data
    except AutoNLError as error:
        raise AutoNLError(f"{ref}, {CONFIG_FILE}: {error}") from None
    found = {name: getattr(kept, name) for name in names if getattr(config.data, name) is None}
    return {name: value for name, value in found.items() if value is not None}


def kept_settings(ref: Ref) -> dict[str, Any]:
    folder = run_folder(ref)
    return read_yaml(folder / CONFIG_FILE) if folder and (folder / CONFIG_FILE).is_file() else {}


def view_settings(view: View) -> dict[str, Any]:
    """What the network sees, as settings of the section data; a rectangle stays the architecture's own."""
    height, width = view.size
    kept = {"crop_pct": view.crop_pct, "interpolation": view.interpolation, "mean": view.mean, "std": view.std}
    return kept | {"image_size": height if height == width else None}


def refuse_other_run(folder: Path, kept: dict[str, Any], now: dict[str, Any]) -> None:
    """A run is resumed with the settings it was started with."""
    if kept["architecture"] != now["architecture"] or kept["ref"] != now["ref"]:
        raise AutoNLError(f"{folder}: holds a run of another network, {kept['ref']}; this command trains {now['ref']}")
    if kept["classes"] != now["classes"] or kept["training_images"] != now["training_images"]:
        raise AutoNLError(
            f"{folder}: the run was started on {kept['training_images']} training images of {len(kept['classes'])} "
            f"classes, this command has {now['training_images']} of {len(now['classes'])}, or of others; "
            "resume with the same images, or choose another --out"
        )
    # what a search reads from files besides: its space, and the fingerprint of its table
    old, new = (
        flat(about["config"] | {name: about[name] for name in ("space", "table") if name in about})
        for about in (kept, now)
    )
    for name in sorted((old.keys() | new.keys()) - MAY_CHANGE):
        if old.get(name) != new.get(name):
            raise AutoNLError(
                f"{folder}: the run was started with {name} = {old.get(name)}, this command has {new.get(name)}; "
                "resume with the same settings, or choose another --out"
            )


def flat(settings: dict[str, Any], prefix: str = "", depth: int = 1) -> dict[str, Any]:
    """Settings by their dotted names."""
    items: dict[str, Any] = {}
    for name, value in settings.items():
        inside = isinstance(value, dict) and depth < MAX_DEPTH
        items |= flat(value, f"{prefix}{name}.", depth + 1) if inside else {f"{prefix}{name}": value}
    return items

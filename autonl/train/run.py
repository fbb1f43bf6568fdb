"""A classifier trained in a run folder, and evaluated: what `autonl train` and `autonl evaluate` do."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
import torchvision
import yaml

from autonl.arch.codec import spec_to_dict
from autonl.arch.spec import ArchSpec
from autonl.data.loaders import Loaders, view_of
from autonl.data.memory import View
from autonl.data.order import derive_seed
from autonl.data.sources import Source, open_evaluation, open_source
from autonl.errors import AutoNLError
from autonl.models import ARCH_FILE, RUN_FILE, TIMM_PREFIX, Ref, create_model, resolve, run_arguments
from autonl.train.config import Config, replace, to_dict
from autonl.train.loop import Loop, Result, evaluate, launch, share
from autonl.train.progress import Progress
from autonl.train.state import LAST, PREVIOUS, read_checkpoint, write_atomically
from autonl.train.tasks import Classification
from autonl.version import __version__
from autonl.weights import load_weights, run_weights

CONFIG_FILE, CLASSES_FILE = "config.yaml", "classes.txt"

# settings that say where and how fast, not what: they may change when a run is resumed
MAY_CHANGE = {"data.path", "data.workers", "data.max_corrupt", "data.evaluation_batch_size"} | {
    f"loop.{name}" for name in ("log_steps", "checkpoint_epochs", "checkpoint_steps")
}


@dataclass(frozen=True)
class Where:
    """The hardware to run on."""

    devices: int | None = None  # a host; None: one, or as many as torchrun started
    num_nodes: int | None = None
    accelerator: str = "auto"  # "cpu" leaves a GPU alone


def train_classifier(
    ref: Ref,
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    weights: str | os.PathLike[str] | None = None,
    inherit: bool = False,
    where: Where = Where(),
    progress: Callable[[], Progress] = Progress,
    command: str = "",
) -> Result:
    """Train the network of a REF on the images of `config.data.path` into a run folder.

    progress is called once, on the first process, when the processes are there.
    """
    fabric = launch(where.devices, where.num_nodes, config.loop.precision, where.accelerator)
    shown = progress() if fabric.is_global_zero else Progress()
    checkpoint = find_checkpoint(folder, resume, shown)
    fabric.barrier()  # all have looked before the first one writes

    source = open_source(config.data, config.seed)
    config = replace(config, model=run_arguments(ref) | num_classes(source) | config.model)
    torch.manual_seed(derive_seed("init", config.seed))
    module = build_network(ref, config.model, source)
    if inherit or weights:
        path = weights or run_weights(ref)
        if load_weights(module, path, other_classes=True):
            shown.say(f"{path}: was trained on other classes: all but the classifier starts from it")
    view = view_of(module, config.data)
    config = replace(config, data=view_settings(view))

    refuse_what_does_not_run(module, view)
    about = describe(ref, config, module.num_classes, view.size, command) | describe_data(source)
    if checkpoint:
        refuse_other_run(folder, checkpoint["about"], about)

    loaders = Loaders(config.data, config.augment, view, module.num_classes, fabric.device, share(fabric), config.seed)
    assert source.train is not None  # only an evaluation has none
    loop = Loop(
        fabric,
        module,
        Classification(module.num_classes, config.optim, config.schedule),
        loaders.training(source.train, config.loop.accumulate),
        loaders.evaluation(source.validation),
        config.loop,
        epochs=config.schedule.epochs,
        batch_size=config.data.batch_size,
        seed=config.seed,
        folder=folder,
        about=about,
        resume=checkpoint,
        progress=shown,
    )
    if fabric.is_global_zero:  # nothing is left behind by settings that do not fit; a resumed run may have moved
        write_description(folder, about, source.classes)
    return loop.run()


def evaluate_classifier(
    ref: Ref,
    config: Config,
    validation_only: bool = False,
    *,
    weights: str | os.PathLike[str] | None = None,
    where: Where = Where(),
) -> dict[str, float] | None:
    """{"top1", "top5" in percent, "images", "seconds"} of a network on the images of `config.data.path`.

    validation_only leaves out what a training on that path would train on. None on all processes but the first.
    """
    fabric = launch(where.devices, where.num_nodes, config.loop.precision, where.accelerator)
    opened = open_source if validation_only else open_evaluation
    source = opened(config.data, classes=known_classes(ref))
    module = build_network(ref, config.model, source)
    load_weights(module, weights or run_weights(ref))
    view = view_of(module, config.data)
    refuse_what_does_not_run(module, view)
    module = fabric.to_device(module.to(memory_format=torch.channels_last))
    loaders = Loaders(config.data, config.augment, view, module.num_classes, fabric.device, share(fabric))
    batches = loaders.evaluation(source.validation)
    started = time.perf_counter()
    task = Classification(module.num_classes, config.optim, config.schedule)
    metrics = evaluate(fabric, module, task, batches)
    seconds = time.perf_counter() - started
    if not metrics["val_images"]:
        raise AutoNLError(f"{config.data.path}: no image could be read")
    if not fabric.is_global_zero:
        return None
    return {
        "top1": metrics["top1"],
        "top5": metrics["top5"],
        "images": int(metrics["val_images"]),
        "seconds": round(seconds, 3),
    }


def num_classes(source: Source) -> dict[str, int]:
    """timm's argument for an output a class of the data."""
    return {"num_classes": len(source.classes)} if source.classes else {}


def build_network(ref: Ref, arguments: dict[str, Any], source: Source) -> Any:
    """The network of a REF with fresh weights, which must tell the classes of the data apart."""
    try:
        module: Any = create_model(ref, **arguments)
    except AutoNLError:
        raise
    except Exception as error:  # timm's networks refuse an argument in many ways
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise AutoNLError(f"model: the network cannot be made with {arguments}: {reason}") from None
    if not hasattr(module, "num_classes"):
        raise AutoNLError(f"model: {arguments} does not make a classifier")
    if source.classes and module.num_classes != len(source.classes):
        raise AutoNLError(
            f"the network tells {module.num_classes} classes apart, the data has {len(source.classes)}; "
            "a folder is a class, in the order of the names"
        )
    return module


def refuse_what_does_not_run(module: Any, view: View) -> None:
    """One image through the network: before anything is written, rather than in the first step."""
    module.eval()
    try:
        with torch.no_grad():
            module(torch.zeros(1, 3, *view.size))
    except Exception as error:  # a network may have any reason to refuse an image
        height, width = view.size
        reason = " ".join(str(error).split())[:200]
        raise AutoNLError(f"the network does not take colour images of {height}x{width}: {reason}") from None
    module.train()


def known_classes(ref: Ref) -> list[str]:
    """The classes that the network of a run folder was trained on; none for any other REF."""
    path = Path(os.fspath(ref)) / CLASSES_FILE if not isinstance(ref, ArchSpec) else None
    return path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else []


def find_checkpoint(folder: Path, resume: bool, progress: Progress) -> dict[str, Any] | None:
    """The checkpoint to go on from; a folder that holds a run is never written over."""
    if not resume:
        for name in (LAST, PREVIOUS, CONFIG_FILE):
            if (folder / name).exists():
                raise AutoNLError(f"{folder}: holds a run already; go on with it by --resume, or choose another --out")
        return None
    checkpoint, problems = read_checkpoint(folder)
    for problem in problems:
        progress.say(f"{problem}; going on from the checkpoint before it")
    if checkpoint is None:
        progress.say(f"{folder}: nothing to resume, starting from the beginning")
    else:
        progress.say(f"{folder}: going on behind step {checkpoint['step']}")
    return checkpoint


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


def describe_data(source: Source) -> dict[str, Any]:
    """What must be the same when a run is resumed, wherever the images lie by then."""
    return {"training_images": len(source.train) if source.train else 0, "classes": list(source.classes)}


def write_description(folder: Path, about: dict[str, Any], classes: Sequence[str]) -> None:
    """arch.yaml, config.yaml, run.yaml and classes.txt of a new run folder."""

    def write(name: str, content: Any) -> None:
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(folder / name, text.encode())

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoNLError(f"{folder}: cannot be made: {error.strerror}") from None
    about = {name: value for name, value in about.items() if name != "classes"}
    architecture, config = about.pop("architecture"), about.pop("config")
    if architecture:
        write(ARCH_FILE, architecture)
    if classes:
        write(CLASSES_FILE, "".join(f"{name}\n" for name in classes))
    write(RUN_FILE, about)
    write(CONFIG_FILE, config)


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
    old, new = flat(kept["config"]), flat(now["config"])
    for name in sorted((old.keys() | new.keys()) - MAY_CHANGE):
        if old.get(name) != new.get(name):
            raise AutoNLError(
                f"{folder}: the run was started with {name} = {old.get(name)}, this command has {new.get(name)}; "
                "resume with the same settings, or choose another --out"
            )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    items: dict[str, Any] = {}
    for name, value in settings.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return items

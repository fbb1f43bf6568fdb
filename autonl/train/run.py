"""A classifier trained in a run folder, and evaluated: what `autonl train` and `autonl evaluate` do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autonl.data.loaders import EvaluationBatches, Loaders, TrainingBatches, view_of
from autonl.data.memory import View
from autonl.data.order import derive_seed
from autonl.data.sources import Source, open_evaluation, open_source
from autonl.errors import AutoNLError
from autonl.models import Ref, create_model, resolve, run_arguments, run_folder
from autonl.train.config import Config, replace
from autonl.train.folder import (
    CLASSES_FILE,
    CONFIG_FILE,
    describe,
    describe_data,
    refuse_other_run,
    view_settings,
    write_description,
)
from autonl.train.loop import Fabric, Loop, Result, evaluate, launch, share
from autonl.train.progress import Progress
from autonl.train.state import LAST, PREVIOUS, read_checkpoint
from autonl.train.tasks import NOT_FINITE, Classification, Task
from autonl.weights import load_weights, run_weights


@dataclass(frozen=True)
class Where:
    """The hardware to run on."""

    devices: int | None = None  # a host; None: one, or as many as torchrun started
    num_nodes: int | None = None
    accelerator: str = "auto"  # "cpu" leaves a GPU alone


@dataclass(frozen=True)
class Started:
    """The processes of a run in a folder, and the checkpoint that it goes on from."""

    fabric: Fabric
    folder: Path
    shown: Progress
    checkpoint: dict[str, Any] | None

    def refuse_other_run(self, about: dict[str, Any]) -> None:
        """Say that the run goes on, if it is the one that the settings describe."""
        if self.checkpoint:
            refuse_other_run(self.folder, self.checkpoint["about"], about)
            self.shown.say(f"{self.folder}: going on behind step {self.checkpoint['step']}")

    def loop(
        self,
        config: Config,
        module: nn.Module,
        task: Task,
        train: TrainingBatches,
        validation: EvaluationBatches,
        about: dict[str, Any],
    ) -> Loop:
        return Loop(
            self.fabric,
            module,
            task,
            train,
            validation,
            config.loop,
            epochs=config.schedule.epochs,
            batch_size=config.data.batch_size,
            seed=config.seed,
            folder=self.folder,
            about=about,
            resume=self.checkpoint,
            progress=self.shown,
        )


def start(config: Config, folder: Path, resume: bool, where: Where, progress: Callable[[], Progress]) -> Started:
    """progress is called once, on the first process, when the processes are there."""
    fabric = launch(where.devices, where.num_nodes, config.loop.precision, where.accelerator)
    shown = progress() if fabric.is_global_zero else Progress()
    checkpoint = find_checkpoint(folder, resume, shown)
    fabric.barrier()  # all have looked before the first one writes
    return Started(fabric, folder, shown, checkpoint)


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
    """Train the network of a REF on the images of `config.data.path` into a run folder."""
    started = start(config, folder, resume, where, progress)
    fabric = started.fabric
    source = open_source(config.data, config.seed)
    config = replace(config, model=run_arguments(ref) | num_classes(source) | config.model)
    torch.manual_seed(derive_seed("init", config.seed))
    module = build_network(ref, config.model, source)
    if inherit or weights:
        path = weights or run_weights(ref)
        if load_weights(module, path, other_classes=True):
            started.shown.say(f"{path}: was trained on other classes: all but the classifier starts from it")
    view = view_of(module, config.data)
    config = replace(config, data=view_settings(view))

    refuse_what_does_not_run(module, view)
    about = describe(ref, config, module.num_classes, view.size, command) | describe_data(source)
    started.refuse_other_run(about)
    loaders = Loaders(config.data, config.augment, view, module.num_classes, fabric.device, share(fabric), config.seed)
    assert source.train is not None  # only an evaluation has none
    judged = source.validation if source.selection is None else source.selection  # who chooses looks at no other image
    loop = started.loop(
        config,
        module,
        Classification(module.num_classes, config.optim, config.schedule),
        loaders.training(source.train, config.loop.accumulate),
        loaders.evaluation(judged),
        about,
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
    """{"top1", "top5" in percent, "images", "not_finite", "seconds"} of a network on the images of `config.data.path`.

    not_finite is the number of images for which an output is infinite or NaN.
    validation_only leaves out what a training on that path would train on. None on all processes but the first.
    """
    fabric = launch(where.devices, where.num_nodes, config.loop.precision, where.accelerator)
    resolve(ref)  # a REF that does not exist is told before images that nobody has given
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
        "not_finite": int(metrics.get(NOT_FINITE, 0)),
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
    folder = run_folder(ref)
    if not folder or not (folder / CLASSES_FILE).is_file():
        return []
    try:
        return (folder / CLASSES_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise AutoNLError(f"{folder / CLASSES_FILE}: cannot be read: {error}") from None


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
    return checkpoint

"""A classifier trained in a run folder, and evaluated: what `autonl train` and `autonl evaluate` do."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autonl.data.loaders import EvaluationBatches, Loaders, TrainingBatches, view_of
from autonl.data.memory import View
from autonl.data.order import derive_seed, rank_batch_size
from autonl.data.sources import Source, open_evaluation, open_source
from autonl.errors import AutoNLError
from autonl.models import Ref, create_model, resolve, run_arguments, run_folder
from autonl.train.config import Config, replace
from autonl.train.folder import (
    CLASSES_FILE,
    CONFIG_FILE,
    describe,
    describe_data,
    make_folder,
    refuse_other_run,
    run_colours,
    view_settings,
    write_description,
)
from autonl.train.lock import Lock
from autonl.train.loop import Fabric, Loop, Result, evaluate, launch, share
from autonl.train.progress import Progress
from autonl.train.state import LAST, PREVIOUS, read_checkpoint
from autonl.train.tasks import NOT_FINITE, Classification, Task
from autonl.weights import load_weights, run_weights

INHERITED = ("mean", "std", "interpolation")  # of the images that weights were trained on


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
    lock: Lock | None = None  # None: the folder is inside one that is locked
    seen: frozenset[str] = frozenset()  # of the run's files, when the checkpoint was looked for

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
        loop = Loop(
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
        if self.lock:  # not before the loop: nothing is left behind by settings that do not fit
            if self.fabric.is_global_zero:
                make_folder(self.folder)
            refuse_locked(self.fabric, self.folder, self.lock)
            if self.fabric.broadcast(run_files(self.folder) != self.seen):
                raise AutoNLError(f"{self.folder}: another process has written a run there meanwhile; go on with it by "
                                  "--resume, or choose another --out")  # fmt: skip
        return loop


@contextmanager
def start(
    config: Config, folder: Path, resume: bool, where: Where, progress: Callable[[], Progress]
) -> Iterator[Started]:
    """The run is this process's own until the context is left.

    progress is called once, on the first process, when the processes are there.
    """
    fabric = launch(where.devices, where.num_nodes, config.loop.precision, where.accelerator)
    shown, lock = progress() if fabric.is_global_zero else Progress(), Lock(folder)
    try:
        if resume:  # nobody may write a newer checkpoint than the one that is read
            refuse_locked(fabric, folder, lock)
        seen = run_files(folder)
        checkpoint = find_checkpoint(folder, resume, shown)
        fabric.barrier()  # all have looked before the first one writes
        yield Started(fabric, folder, shown, checkpoint, lock, seen)
    finally:
        lock.release()


def refuse_locked(fabric: Fabric, folder: Path, lock: Lock) -> None:
    """The first process takes the lock for all of them."""
    if fabric.broadcast(fabric.is_global_zero and not lock.take()):
        who = "another run of this process" if lock.held_here() else "another process"
        stale = "" if lock.held_here() else f" (where its machine died and the lock stayed, remove {lock.path})"
        raise AutoNLError(f"{folder}: {who} is writing this run; wait for its end, or choose another --out{stale}")


def run_files(folder: Path) -> frozenset[str]:
    """What tells that a folder holds a run."""
    return frozenset(name for name in (LAST, PREVIOUS, CONFIG_FILE) if (folder / name).exists())


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
    with start(config, folder, resume, where, progress) as started:
        return classifier_loop(started, ref, config, weights, inherit, command).run()


def classifier_loop(
    started: Started, ref: Ref, config: Config, weights: str | os.PathLike[str] | None, inherit: bool, command: str
) -> Loop:
    fabric = started.fabric
    source = open_source(config.data, config.seed)
    config = replace(config, model=run_arguments(ref) | num_classes(source) | config.model)
    if inherit and not weights:
        config = replace(config, data=run_colours(ref, config, INHERITED))
    torch.manual_seed(derive_seed("init", config.seed))
    module = build_network(ref, config.model, source)
    if inherit or weights:
        path = weights or run_weights(ref)
        if load_weights(module, path, other_classes=True):
            started.shown.say(f"{path}: was trained on other classes: all but the classifier starts from it")
    view = view_of(module, config.data)
    config = replace(config, data=view_settings(view))

    refuse_what_does_not_run(module, view)
    refuse_what_does_not_train(module, view, images_at_once(config, fabric))
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
        write_description(started.folder, about, source.classes)
    return loop


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


def images_at_once(config: Config, fabric: Fabric) -> int:
    """Those of which BN takes its statistics in one pass."""
    images = rank_batch_size(config.data.batch_size, fabric.world_size, config.loop.accumulate)
    return images * fabric.world_size if fabric.device.type == "cuda" else images  # SyncBatchNorm joins them on GPUs


def refuse_what_does_not_train(module: Any, view: View, images: int) -> None:
    """Two images, or one where there is one at once, through a copy in training mode: BN refuses a single value."""
    height, width = view.size
    images = min(images, 2)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(module)(torch.zeros(images, 3, height, width))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        batch = f"{images} image{'s' if images > 1 else ''} of {height}x{width} at a time"
        setting = "data.batch_size: " if images == 1 else ""  # BN over a single value; else it is the network's matter
        raise AutoNLError(f"{setting}the network cannot be trained on {batch}: {reason}") from None


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
        if run_files(folder):
            raise AutoNLError(f"{folder}: holds a run already; go on with it by --resume, or choose another --out")
        return None
    checkpoint, problems = read_checkpoint(folder)
    for problem in problems:
        progress.say(f"{problem}; going on from the checkpoint before it")
    if checkpoint is None:
        progress.say(f"{folder}: nothing to resume, starting from the beginning")
    return checkpoint

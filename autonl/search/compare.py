"""Networks of a space compared on the selection images: with the super-network's weights, or trained for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autonl.arch.macs import count_macs
from autonl.arch.spec import ArchSpec
from autonl.data.loaders import EvaluationBatches, TrainingBatches
from autonl.data.memory import Batch
from autonl.data.order import derive_seed
from autonl.models import build
from autonl.search.config import SearchConfig
from autonl.search.derive import derive
from autonl.search.space import Choice
from autonl.search.supernet import SuperNet
from autonl.train.bn import calibrate_bn
from autonl.train.config import replace
from autonl.train.folder import describe
from autonl.train.loop import Fabric, Result, evaluate
from autonl.train.progress import Progress
from autonl.train.run import Started, find_checkpoint
from autonl.train.tasks import Classification


@dataclass(frozen=True)
class Candidate:
    choices: tuple[Choice, ...]
    macs: int
    top1: float  # on the selection images, with the super-network's weights
    loss: float
    trained: float | None = None  # top-1 on the selection images after a trial


@dataclass(frozen=True)
class Comparison:
    config: SearchConfig
    fabric: Fabric
    supernet: SuperNet
    selection: EvaluationBatches  # the images that choose
    trial_batches: tuple[TrainingBatches, EvaluationBatches]  # for training and the same to choose, as trials see them
    calibration: Callable[[], Iterable[Batch]]  # training batches for BN statistics

    def network(self, choices: Sequence[Choice]) -> Any:
        """The chosen network on its own, with the super-network's weights behind BN statistics of its own."""
        network = self.fabric.to_device(derive(self.supernet, choices, f"{self.supernet.space.name}-found"))
        with self.fabric.autocast():
            calibrate_bn(network, self.calibration(), self.fabric.world_size)
        return network

    def judge(self, choices: tuple[Choice, ...]) -> Candidate:
        network = self.network(choices)
        task = Classification(self.supernet.space.classes, self.config.optim, self.config.schedule)
        metrics = evaluate(self.fabric, network, task, self.selection)
        return Candidate(choices, count_macs(network.spec), metrics["top1"], metrics["val_loss"])

    def trial(self, choices: Sequence[Choice], folder: Path) -> Result:
        spec, epochs = self.supernet.space.spec(choices), self.config.search.trial_epochs
        assert epochs is not None  # with_defaults has settled it
        return short_training(spec, self.config, epochs, self.fabric, *self.trial_batches, folder)


def shortened(config: SearchConfig, epochs: int) -> SearchConfig:
    """The settings of a training of so many epochs, with the whole schedule in them."""
    whole = config.schedule
    return replace(
        config,
        schedule={
            "epochs": epochs,
            "warmup_epochs": min(whole.warmup_epochs, epochs / 4),
            "decay_epochs": whole.decay_epochs * epochs / whole.epochs,
        },
        loop={
            "evaluate_epochs": epochs,
            "checkpoint_epochs": epochs,
            "calibrate_batches": config.search.calibrate_batches,
        },
    )


def short_training(
    spec: ArchSpec,
    config: SearchConfig,
    epochs: int,
    fabric: Fabric,
    train: TrainingBatches,
    selection: EvaluationBatches,
    folder: Path,
) -> Result:
    """The network trained from scratch for so many epochs."""
    config = shortened(config, epochs)
    torch.manual_seed(derive_seed("trial", config.seed))
    task = Classification(spec.classes, config.optim, config.schedule)
    about = describe(spec, config, spec.classes, spec.resolution, "")
    if fabric.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
    started = Started(fabric, folder, Progress(), find_checkpoint(folder, True, Progress()))
    fabric.barrier()
    return started.loop(config, build(spec), task, train, selection, about).run()

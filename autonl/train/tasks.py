"""What the loop does not know: a Task gives loss, optimisers and metrics, and keeps what state it has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from autonl.data.memory import Batch
from autonl.errors import AutoNLError, refuse, shown
from autonl.train.config import OptimConfig, ScheduleConfig

NOT_FINITE = "val_not_finite"  # the metric that tells how many images' (or pixels') outputs are not finite, if any
Tuning = tuple[Optimizer, Scheduler | None]  # an optimiser, and what sets its learning rate after every step


class Task:
    """The loop calls, for every optimiser step, `step` (once a round of accumulation) and `after_step`; for every
    evaluation `metrics` and, batch by batch, `evaluate`; for every epoch `columns`.

    `model` is the network as the strategy wraps it, which is what makes gradients agree between processes;
    `module` is the network itself.
    """

    monitor = "top1"  # the metric that says which epoch was the best; more is better
    keeps_layers = False  # the module has to stay as it is, whatever loop.kernels says
    recorded = False  # `step` calls the model once, and nothing but its arguments changes it: see train/graphs.py

    def tunings(self, module: nn.Module, steps_per_epoch: int) -> list[Tuning]:
        """The optimisers over the module's parameters, each parameter in one of them."""
        raise NotImplementedError

    def step(self, model: nn.Module, batch: Any, step: int) -> dict[str, Tensor]:
        """{"loss": ..., and scalars whose means over the epoch become columns of metrics.csv}."""
        raise NotImplementedError

    def after_step(self, module: nn.Module, step: int) -> None:
        """Something to do when `step` optimiser steps have been taken."""

    def metrics(self) -> MetricCollection:
        """Fresh metrics for an evaluation; torchmetrics joins them over the processes."""
        raise NotImplementedError

    def evaluate(self, module: nn.Module, batch: Any, metrics: MetricCollection) -> None:
        """Update the metrics with a batch."""
        raise NotImplementedError

    def columns(self) -> dict[str, float]:
        """Further columns of the epoch's row in metrics.csv."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the task: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Classification(Task):
    """Cross-entropy, top-1 and top-5 in percent."""

    recorded = True

    def __init__(self, classes: int, optim: OptimConfig, schedule: ScheduleConfig) -> None:
        self.classes, self.optim, self.schedule = classes, optim, schedule

    def tunings(self, module: nn.Module, steps_per_epoch: int) -> list[Tuning]:
        optimizer = create_optimizer(module, self.optim)
        return [(optimizer, create_schedule(optimizer, self.schedule, steps_per_epoch))]

    def step(self, model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        images, labels = batch
        return {"loss": F.cross_entropy(model(images), labels, label_smoothing=self.optim.label_smoothing)}

    def metrics(self) -> MetricCollection:
        return classification_metrics(self.classes)

    def evaluate(self, module: nn.Module, batch: Batch, metrics: MetricCollection) -> None:
        images, labels = batch
        metrics.update(module(images).float(), labels)


def create_optimizer(parameters: nn.Module | list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """For a module, or for groups of parameters that bring their own settings."""
    if config.name.lower().endswith("adahessian"):
        refuse("optim.name", config.name, "an optimiser that needs no second derivatives")
    try:
        return create_optimizer_v2(
            parameters, config.name, config.lr, config.weight_decay, config.momentum, **config.arguments
        )
    except Exception as error:  # an unknown optimiser or argument, refused in many ways
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise AutoNLError(f"optim: {config.name} cannot be made with {shown(config.arguments)}: {reason}") from None


def create_schedule(optimizer: Optimizer, config: ScheduleConfig, steps_per_epoch: int) -> Scheduler:
    """timm's schedule in optimiser steps: the rate of step t is a function of t alone."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        config.name,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        decay_epochs=config.decay_epochs,
        decay_rate=config.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return scheduler


def classification_metrics(classes: int) -> MetricCollection:
    """Images with label -1 are not counted."""

    def accuracy(top_k: int) -> Metric:
        return Percent(classes, top_k=min(top_k, classes), average="micro", ignore_index=-1, validate_args=False)

    # they keep different states: there is nothing to share between them
    return MetricCollection(
        {"top1": accuracy(1), "top5": accuracy(5), "cross_entropy": CrossEntropy()}, compute_groups=False
    )


class Percent(MulticlassAccuracy):
    """An image whose outputs are not all finite is wrong, whatever class an infinity or NaN stands for."""

    tp: Tensor
    fn: Tensor

    def update(self, logits: Tensor, labels: Tensor) -> None:
        wrong = -F.one_hot(labels.clamp(min=0), logits.shape[1]).to(logits.dtype)  # the label behind all others
        super().update(torch.where(logits.isfinite().all(1, keepdim=True), logits, wrong), labels)

    def compute(self) -> Tensor:
        # of all images together, exact where the class divides in single precision
        return 100 * self.tp.sum().double() / (self.tp + self.fn).sum()


class CrossEntropy(Metric):
    """The mean without label smoothing, and the number of images (or pixels) that were counted; where the outputs for
    some are not finite, the mean of the others and the number of those: they would hide what the rest comes to."""

    total: Tensor
    number: Tensor
    not_finite: Tensor

    def __init__(self, not_counted: int = -1, counted: str = "val_images") -> None:
        super().__init__()
        self.not_counted, self.counted = not_counted, counted
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("number", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("not_finite", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        finite, counted = logits.isfinite().all(1), labels != self.not_counted
        losses = F.cross_entropy(logits, labels, ignore_index=self.not_counted, reduction="none")
        self.total += losses.where(finite, 0).sum()
        self.number += counted.sum()
        self.not_finite += (counted & ~finite).sum()

    def compute(self) -> dict[str, Tensor]:
        lost = {NOT_FINITE: self.not_finite} if self.not_finite else {}
        return {"val_loss": self.total / (self.number - self.not_finite), self.counted: self.number, **lost}

"""The search as a Task of the loop: weights and thresholds learn from the same images with one objective (Eq. 15)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection

from autonl.data.memory import Batch
from autonl.data.order import derive_seed
from autonl.search.budget import DualAscent
from autonl.search.config import SearchConfig
from autonl.search.gates import mean_of_processes, world_size
from autonl.search.supernet import SuperNet
from autonl.train.bn import calibrate_bn
from autonl.train.tasks import Task, Tuning, classification_metrics, create_optimizer, create_schedule


class Search(Task):
    """Warm-up with all gates open and no cost, until the task is really being learned; then the gates are drawn by
    their margins, cooler and cooler, and the thresholds follow CE + lambda log(cost).

    budget       cost to stay within by dual ascent on lambda; None: lambda is config.search.cost_weight
    calibration  gives the training batches that BN statistics are taken from before an evaluation
    """

    keeps_layers = True  # what kernels were made for are the networks it finds
    recorded = True

    def __init__(
        self,
        supernet: SuperNet,
        config: SearchConfig,
        budget: float | None,
        calibration: Callable[[], Iterable[Batch]],
    ) -> None:
        self.supernet, self.config, self.settings = supernet, config, config.search
        self.calibration = calibration
        self.dual: DualAscent | None = None
        self.budget = budget
        self.unit = "milliseconds" if config.search.table else "macs"
        everything = supernet.cost(supernet.reached(torch.ones_like(supernet.gates.threshold)))
        self.log_largest = math.log(everything.item())
        self.total_steps = 0
        self.warmup_end: int | None = None  # the step at which the gates began to act
        self.task_was_learned = False  # by then
        self.warmup_epochs = 0
        self.smoothed = torch.tensor(math.log(supernet.space.classes))  # the warm-up's loss, averaged over steps
        self.log_cost = torch.tensor(0.0)  # of the last step
        self.margins: list[Tensor] = []  # at the end of every epoch
        self.last_decisions: Tensor | None = None
        self.calibrated = False

    # -- what the loop asks for --

    def tunings(self, module: nn.Module, steps_per_epoch: int) -> list[Tuning]:
        self.total_steps = steps_per_epoch * self.config.schedule.epochs
        self.dual = DualAscent(self.budget, rate=2 / self.total_steps) if self.budget else None
        weights = create_optimizer(self.supernet.network, self.config.optim)
        # Adam's step is its learning rate: `travel` is how far a threshold with a steady gradient gets
        rate = self.settings.travel / self.total_steps
        thresholds = torch.optim.Adam([self.supernet.gates.threshold], lr=rate, betas=(0.9, 0.99))
        return [(weights, create_schedule(weights, self.config.schedule, steps_per_epoch)), (thresholds, None)]

    def step(self, model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        images, labels = batch
        self.prepare(step)
        gates = self.supernet.gates
        observing = (True,) if step % self.settings.observe_steps == 0 else ()
        logits = model(images, gates(), *observing)
        task_loss = F.cross_entropy(logits, labels, label_smoothing=self.config.optim.label_smoothing)
        log_cost = self.supernet.cost(self.supernet.reached(gates.probabilities())).log()
        weight = self.weight().to(log_cost)
        self.log_cost = log_cost.detach()
        if gates.mode == "open":
            loss = mean_of_processes(task_loss.detach().float())
            self.smoothed = self.smoothed.to(loss.device).lerp(loss, 0.02)
        # as a share of the largest network: a constant, which no gradient sees
        cost_loss = (weight if gates.mode != "open" else 0 * weight) * (log_cost - self.log_largest)
        return {
            "loss": task_loss + cost_loss.float(),
            "task_loss": task_loss,
            self.unit: log_cost.detach().exp(),
            "cost_weight": weight,
        }

    def after_step(self, module: nn.Module, step: int) -> None:
        if self.supernet.gates.mode != "open":
            self.supernet.gates.clamp()
            if self.dual:
                self.dual.update(self.log_cost)

    def metrics(self) -> MetricCollection:
        self.calibrated = False
        return classification_metrics(self.supernet.space.classes)

    def evaluate(self, module: nn.Module, batch: Batch, metrics: MetricCollection) -> None:
        """What the gates decide at present, behind BN statistics of its own."""
        gates = self.supernet.gates
        images, labels = batch
        before, gates.choices = gates.choices, gates.decisions() if gates.mode != "open" else None
        if not self.calibrated:
            calibrate_bn(module, self.calibration(), world_size())
            module.eval()
            self.calibrated = True
        metrics.update(module(images).float(), labels)
        gates.choices = before

    def columns(self) -> dict[str, float]:
        gates = self.supernet.gates
        decisions = gates.decisions().cpu() if gates.mode != "open" else torch.ones_like(gates.always_open).cpu()
        changed = 0 if self.last_decisions is None else int((decisions != self.last_decisions).sum())
        self.last_decisions = decisions
        self.warmup_epochs += gates.mode == "open"
        self.margins.append(gates.margins().detach().cpu().clone())
        reached = self.supernet.reached(decisions.to(gates.threshold))
        decided = {"decided_macs": self.supernet.count(reached).item()}
        decided[f"decided_{self.unit}"] = self.supernet.cost(reached).item()
        return {**decided, "gates_changed": changed, "gates_open": int(decisions.sum())}

    def state_dict(self) -> dict[str, Any]:
        return {
            "dual": self.dual.state_dict() if self.dual else None,
            "warmup_end": self.warmup_end,
            "task_was_learned": self.task_was_learned,
            "warmup_epochs": self.warmup_epochs,
            "smoothed": self.smoothed.cpu(),
            "margins": self.margins,
            "last_decisions": self.last_decisions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.dual:
            self.dual.load_state_dict(state["dual"])
        self.warmup_end, self.smoothed = state["warmup_end"], state["smoothed"]
        self.task_was_learned, self.warmup_epochs = state["task_was_learned"], state["warmup_epochs"]
        self.margins, self.last_decisions = state["margins"], state["last_decisions"]
        self.set_mode()  # a search that goes on behind its last epoch takes no step that would

    # -- the phases --

    def weight(self) -> Tensor:
        """lambda."""
        fixed = self.settings.cost_weight or 0.0
        return self.dual.weight if self.dual else torch.tensor(fixed, dtype=torch.float64)

    def prepare(self, step: int) -> None:
        """Gates and temperature of a step: a function of the step and of when the warm-up ended."""
        gates = self.supernet.gates
        if self.warmup_end is None and self.warmup_is_over(step):
            self.warmup_end = step
            gates.start()
        gates.choices = None
        self.set_mode()
        if self.warmup_end is not None:
            hot, cold = self.settings.temperature
            done = (step - self.warmup_end) / max(1, self.total_steps - self.warmup_end)
            gates.temperature = hot * (cold / hot) ** done
            gates.generator.manual_seed(derive_seed("gates", self.config.seed, step))

    def set_mode(self) -> None:
        self.supernet.gates.mode = "open" if self.warmup_end is None else "sample"

    def warmup_is_over(self, step: int) -> bool:
        """When the task is being learned, or its time is up. Looked at now and then: it waits for the device."""
        least, most = (share * self.total_steps for share in self.settings.warmup)
        if step < least or (step % 10 and step < most):
            return False
        chance = math.log(self.supernet.space.classes)
        self.task_was_learned = self.smoothed.item() < self.settings.learned * chance
        return self.task_was_learned or step >= most

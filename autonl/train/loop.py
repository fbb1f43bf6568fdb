"""The loop: device, precision, processes, checkpoints. It knows neither what is learned (a Task) nor from what."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from autonl.data.loaders import EvaluationBatches, TrainingBatches, cpus
from autonl.data.memory import Batch
from autonl.data.order import Share, derive_seed
from autonl.errors import AutoNLError
from autonl.nn.kernels import missing_on
from autonl.nn.kernels.layers import by_kernels, use_layer_kernels, use_lightnl_kernels
from autonl.train.bn import calibrate_bn, share_bn
from autonl.train.config import LoopConfig
from autonl.train.graphs import Graphed, can_be_recorded
from autonl.train.progress import Progress
from autonl.train.records import EpochMeans, NonFiniteError, Records
from autonl.train.restarts import join_attempt
from autonl.train.signals import StopRequest
from autonl.train.state import LAST, Training, weights_are_finite, write_atomically, write_checkpoint, write_weights
from autonl.train.tasks import Task
from autonl.weights import BEST_WEIGHTS, FINAL_WEIGHTS

RESULT_FILE = "result.json"  # the final evaluation, behind calibration


def launch(
    devices: int | None = None, num_nodes: int | None = None, precision: str = "auto", accelerator: str = "auto"
) -> Fabric:
    """Processes, one a device. torchrun and SLURM start them; elsewhere Fabric runs this command once a device."""
    if TorchElasticEnvironment.detect():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        devices, num_nodes = devices or here, num_nodes or int(os.environ["WORLD_SIZE"]) // here
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    if precision == "auto":
        precision = "bf16-mixed" if on_gpu else "32-true"
    several = (devices or 1) * (num_nodes or 1) > 1
    if several and TorchElasticEnvironment.detect() and not torch.distributed.is_initialized():
        join_attempt("nccl" if on_gpu else "gloo")
    try:
        fabric = Fabric(
            accelerator="gpu" if on_gpu else "cpu",
            strategy="ddp" if several else "auto",
            devices=devices or 1,
            num_nodes=num_nodes or 1,
            precision="32-true" if precision == "32" else precision,  # type: ignore[arg-type]
        )
        fabric.launch()
    # more devices than there are, or a cluster set up differently
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        raise AutoNLError(f"--devices {devices}, --num-nodes {num_nodes}: {' '.join(str(error).split())}") from None
    if on_gpu:  # TF32; oneDNN would take it as leave for less than float32 on a CPU
        torch.set_float32_matmul_precision("high")
    return fabric


def share(fabric: Fabric) -> Share:
    return Share(fabric.global_rank, fabric.world_size)


@dataclass
class Result:
    module: nn.Module  # averaged and calibrated where the settings say so
    metrics: dict[str, float]  # of the final evaluation
    history: list[dict[str, Any]]  # the rows of metrics.csv
    step: int
    stopped_by: int | None = None  # the signal that ended the run before its end
    first_process: bool = True  # the one that speaks
    saved: int | None = None  # step of the newest checkpoint


class Loop:
    """One training run in a folder: `Loop(...).run()`."""

    def __init__(
        self,
        fabric: Fabric,
        module: nn.Module,
        task: Task,
        train: TrainingBatches,
        validation: EvaluationBatches,
        config: LoopConfig,
        *,
        epochs: int,
        batch_size: int,
        seed: int,
        folder: Path,
        about: dict[str, Any],
        resume: dict[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.fabric, self.task, self.train, self.validation, self.config = fabric, task, train, validation, config
        self.epochs, self.batch_size, self.seed, self.folder = epochs, batch_size, seed, folder
        self.progress = progress or Progress()
        self.steps_per_epoch = len(train) // config.accumulate
        self.inside_epoch = train.resumes_inside
        if fabric.world_size > 1 and fabric.device.type == "cuda":  # torch has no SyncBatchNorm for the CPU
            module = convert_sync_batchnorm(module)
        if config.channels_last:
            module = module.to(memory_format=torch.channels_last)
        self.use_kernels(module)
        tunings = task.tunings(module, self.steps_per_epoch)
        wrapped: Any = torch.compile(module) if config.compile else module
        self.graphed = Graphed(module) if can_be_recorded(fabric, task, train, config) else None
        wrapped = self.graphed or wrapped
        self.model, *optimizers = fabric.setup(wrapped, *(optimizer for optimizer, _ in tunings))
        self.schedulers = [scheduler for _, scheduler in tunings if scheduler]
        average = ModelEmaV3(module, decay=config.ema, use_warmup=config.ema_warmup) if config.ema else None
        means = EpochMeans(lambda values: fabric.all_reduce(values, reduce_op="mean"))  # type: ignore[arg-type, return-value]
        self.training = Training(module, average, optimizers, task, means, about)
        self.saved: int | None = None
        if resume:
            self.training.load_state_dict(resume)
            self.saved = self.training.step
            fabric.barrier()  # nobody may write a checkpoint while another process still reads

    def use_kernels(self, module: nn.Module) -> None:
        """If they are asked for; what takes the plain path all the same is said."""
        self.to_be_compiled = False
        if not self.config.kernels:
            return
        if missing := missing_on(self.fabric.device):
            self.progress.say(f"loop.kernels: the plain path is taken here: {missing}")
            return
        shared, layers = self.fabric.world_size > 1, self.config.channels_last
        if shared:
            self.progress.say("loop.kernels: the plain path is taken here by LightNL and BN, which processes share")
        else:
            use_lightnl_kernels(module)
        if not layers:
            others = "depthwise convolutions" if shared else "depthwise convolutions and BN"
            self.progress.say(f"loop.kernels: those of {others} need loop.channels_last=true")
        elif not self.task.keeps_layers:
            use_layer_kernels(module)
        self.to_be_compiled = not self.config.compile and any(map(by_kernels, module.modules()))

    def compile_kernels(self, images: Tensor) -> None:
        """Those that the network has, by all CPUs, before the first step needs one after the other."""
        self.to_be_compiled = False
        self.progress.say("loop.kernels: compiling those that are not kept from before")
        here = max(self.fabric.world_size // getattr(self.fabric.strategy, "num_nodes", 1), 1)
        try:
            from autonl.nn.kernels.ahead import compile_kernels

            with self.fabric.autocast():
                compile_kernels(self.training.module, images, max(cpus() // here, 1))
        except Exception as problem:  # a network that cannot be copied, or not run without memory, trains all the same
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            self.progress.say(f"loop.kernels: they are compiled one by one as they are needed: {reason}")

    def run(self) -> Result:
        training, stop = self.training, StopRequest()
        self.records = Records(self.folder, active=self.fabric.is_global_zero, step=training.step)
        self.records.write(training.history)
        self.progress.begin(self.epochs * self.steps_per_epoch, training.step, self.batch_size)
        try:
            with stop:
                while training.epoch < self.epochs and not self.out_of_patience():
                    if not self.run_epoch(stop):
                        return self.result(training.evaluated(), {}, stop.signal)
                return self.finish()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {self.last_good_checkpoint()}") from None
        finally:
            self.progress.end()
            self.records.close()
            if self.graphed:
                self.graphed.release()

    def run_epoch(self, stop: StopRequest) -> bool:
        """Train to the end of the epoch and evaluate; False when the run was asked to stop on the way."""
        training, config = self.training, self.config
        done = training.step - training.epoch * self.steps_per_epoch
        batches = self.train.epoch(training.epoch, done * config.accumulate)
        started = time.perf_counter()
        self.model.train()
        for step_in_epoch in range(done + 1, self.steps_per_epoch + 1):
            self.run_step(batches)
            last = step_in_epoch == self.steps_per_epoch
            if last or training.step % config.log_steps == 0:
                self.progress.advance(training.step, training.means.read(training.step))
            if self.agreed_to_stop(stop):
                self.save_inside_epoch()
                return False
            if not last and config.checkpoint_steps and training.step % config.checkpoint_steps == 0:
                self.save_inside_epoch()
        seconds = time.perf_counter() - started
        row: dict[str, Any] = {"epoch": training.epoch + 1, "step": training.step, "lr": self.learning_rate()}
        row |= {f"train_{name}": value for name, value in training.means.take().items()} | self.task.columns()
        images = (self.steps_per_epoch - done) * self.batch_size
        training.epoch += 1
        if training.epoch % config.evaluate_epochs == 0 or training.epoch == self.epochs:
            row |= self.evaluate_epoch()
        row |= {"seconds": round(seconds, 3), "images_per_second": round(images / seconds, 1)}
        training.history.append(row)
        self.records.write(training.history)
        self.progress.row(row)
        if training.epoch % config.checkpoint_epochs == 0 or training.epoch == self.epochs:
            self.save()
        return True

    def run_step(self, batches: Any) -> None:
        """One optimiser step. Nothing in it waits for the device."""
        training, config = self.training, self.config
        rounds = []
        for turn in range(config.accumulate):
            batch = next(batches)
            if self.to_be_compiled:
                self.compile_kernels(batch[0])
            # dropout and the like: a function of the place in the run, so no generator state is kept
            torch.manual_seed(derive_seed("step", self.seed, training.step, turn, self.fabric.global_rank))
            with self.fabric.no_backward_sync(self.model, enabled=turn < config.accumulate - 1):
                scalars = self.task.step(self.model, batch, training.step)
                self.fabric.backward(scalars["loss"] / config.accumulate)
            rounds.append(scalars)
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(training.module.parameters(), config.clip_norm)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        training.step += 1
        for scheduler in self.schedulers:
            scheduler.step_update(training.step)
        if training.average:
            training.average.update(training.module, training.step)
        self.task.after_step(training.module, training.step)
        training.means.add({name: torch.stack([turn[name] for turn in rounds]).mean() for name in rounds[0]})

    def evaluate_epoch(self) -> dict[str, float]:
        best, _ = self.training.best()
        module = self.training.evaluated()
        share_bn(module, self.fabric.world_size)
        metrics = evaluate(self.fabric, module, self.task, self.validation)
        better = metrics[self.task.monitor] > best and weights_are_finite(module)
        if better and self.fabric.is_global_zero:
            write_weights(self.folder / BEST_WEIGHTS, module)
        return metrics

    def finish(self) -> Result:
        """BN calibrated, evaluated once more, final weights written."""
        module = self.training.evaluated()
        if self.config.calibrate_batches:
            with self.fabric.autocast():
                calibrate_bn(module, self.calibration(), self.fabric.world_size)
        metrics = evaluate(self.fabric, module, self.task, self.validation)
        if self.fabric.is_global_zero:
            write_weights(self.folder / FINAL_WEIGHTS, module)
            write_atomically(self.folder / RESULT_FILE, json.dumps({"step": self.training.step} | metrics).encode())
        self.fabric.barrier()
        return self.result(module, metrics)

    def calibration(self) -> Iterator[Batch]:
        batches = itertools.islice(self.train.epoch(self.epochs), self.config.calibrate_batches)
        for turn, batch in enumerate(batches):
            # behind the fetching, which draws from the same generator where there are no workers
            torch.manual_seed(derive_seed("calibrate", self.seed, turn, self.fabric.global_rank))
            yield batch

    def result(self, module: nn.Module, metrics: dict[str, float], stopped_by: int | None = None) -> Result:
        training = self.training
        first = self.fabric.is_global_zero
        return Result(module, metrics, training.history, training.step, stopped_by, first, self.saved)

    def save_inside_epoch(self) -> None:
        if self.inside_epoch:  # a stream has to begin its epoch again: the checkpoint at its start stays
            self.save()

    def save(self) -> None:
        """Never a checkpoint from which training could not go on."""
        training = self.training
        training.means.read(training.step)
        if not weights_are_finite(training.module):
            raise NonFiniteError(f"the weights turned infinite or NaN by step {training.step}")
        if self.fabric.is_global_zero:
            write_checkpoint(self.folder, training.state_dict())
        self.saved = training.step
        self.fabric.barrier()

    def out_of_patience(self) -> bool:
        _, since = self.training.best()
        return bool(self.config.patience) and since >= self.config.patience

    def agreed_to_stop(self, stop: StopRequest) -> bool:
        """Whether all processes leave now: a signal reaches them at different steps."""
        if self.fabric.world_size == 1:
            return stop.signal is not None
        if self.training.step % self.config.log_steps:
            return False
        asked = torch.tensor(stop.signal or 0, device=self.fabric.device)
        if not (agreed := int(self.fabric.all_reduce(asked, reduce_op="max"))):  # type: ignore[arg-type]
            return False  # a signal that came meanwhile stays noted
        stop.signal = agreed
        return True

    def learning_rate(self) -> float:
        return float(self.training.optimizers[0].param_groups[0]["lr"])

    def last_good_checkpoint(self) -> str:
        path = self.folder / LAST
        return f"the last good checkpoint is {path}" if path.exists() else "there is no checkpoint yet"


def evaluate(fabric: Fabric, module: nn.Module, task: Task, batches: Iterable[Batch]) -> dict[str, float]:
    """The task's metrics over the batches of all processes together.

    On the module itself: processes may have different numbers of batches, and a wrapper would wait for the others.
    """
    training = module.training
    module.eval()
    metrics = task.metrics().to(fabric.device)
    with torch.no_grad(), fabric.autocast():
        for batch in batches:
            task.evaluate(module, batch, metrics)
    module.train(training)
    return {name: float(value) for name, value in metrics.compute().items()}

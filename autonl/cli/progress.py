"""The progress bar of a training, on standard error."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from autonl.train.progress import Progress

# of a row, in this order, where it has them
SHOWN = ("train_loss", "top1", "top5", "miou", "val_loss", "images_per_second")


class TrainingBar(Progress):
    """Images/s and time left in a bar, a line an epoch."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def begin(self, steps: int, done: int, batch_size: int) -> None:
        self.batch_size, self.started, self.first, self.steps = batch_size, time.perf_counter(), done, steps
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("steps", total=steps, completed=done, rate="")
        self.bar.start()

    def advance(self, step: int, scalars: dict[str, float]) -> None:
        rate = (step - self.first) * self.batch_size / (time.perf_counter() - self.started)
        told = "  ".join(f"{name} {value:.4g}" for name, value in scalars.items())
        self.bar.update(self.task, completed=step, rate=f"{rate:,.0f} images/s  {told}")

    def row(self, row: dict[str, Any]) -> None:
        told = "  ".join(f"{name} {row[name]:.4g}" for name in SHOWN if name in row)
        epochs = round(row["epoch"] * self.steps / row["step"])
        self.bar.console.print(f"epoch {row['epoch']} of {epochs}  {told}", markup=False, soft_wrap=True)

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)

    def end(self) -> None:
        self.bar.stop()

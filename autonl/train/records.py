"""What a run tells: means over an epoch, metrics.csv, TensorBoard."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autonl.errors import AutoNLError
from autonl.train.state import write_atomically

logger = logging.getLogger("autonl")

METRICS_FILE = "metrics.csv"
TIME_COLUMNS = ("seconds", "images_per_second")  # all other columns are exact under resume


class EpochMeans:
    """Means of scalars over an epoch, without waiting for the device at every step.

    `add` keeps device tensors, `read` fetches them all at once. The sums do not depend on when it is called.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self.reduce = reduce  # the mean of a tensor over all processes
        self.pending: list[dict[str, Tensor]] = []
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        self.pending.append({name: value.detach().float() for name, value in scalars.items()})

    def read(self, step: int) -> dict[str, float]:
        """Fetch what was added since and return the last of it; stop the run at a loss that is not finite.

        step is the number of optimiser steps done, which names the one with the bad loss.
        """
        if not self.pending:
            return {}
        names = list(self.pending[0])
        values = self.reduce(torch.stack([torch.stack([p[name] for name in names]) for p in self.pending])).tolist()
        first_step = step - len(values)
        self.pending.clear()
        for offset, row in enumerate(values):
            for name, value in zip(names, row, strict=True):
                if name == "loss" and not math.isfinite(value):
                    raise NonFiniteError(f"the loss turned {value} at step {first_step + offset + 1}")
                self.sums[name] = self.sums.get(name, 0.0) + value
            self.count += 1
        return dict(zip(names, values[-1], strict=True))

    def take(self) -> dict[str, float]:
        """The means of the epoch; the next one begins."""
        means = {name: total / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


class NonFiniteError(AutoNLError):
    """Training cannot go on from here; it can from the last checkpoint."""


class Records:
    """metrics.csv and TensorBoard in a run folder; on another process than the first, nothing."""

    def __init__(self, folder: Path, *, active: bool, step: int) -> None:
        self.path = folder / METRICS_FILE
        self.active = active
        self.writer = tensorboard_writer(folder / "tensorboard", step) if active else None

    def write(self, history: list[dict[str, Any]]) -> None:
        """The whole history, so that a resumed run leaves the file that an unbroken one would."""
        if not self.active:
            return
        write_atomically(self.path, rows_to_csv(history).encode())
        if not self.writer or not history:
            return
        for name, value in history[-1].items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                self.writer.add_scalar(name, value, history[-1]["step"])

    def close(self) -> None:
        if self.writer:
            self.writer.close()


def tensorboard_writer(folder: Path, step: int) -> Any:
    """Whatever a killed run wrote behind its last checkpoint is dropped from the plots."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed: metrics.csv only")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10)


def rows_to_csv(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

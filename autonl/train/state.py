"""Checkpoints and the files of a run folder, written so that a kill or a full disk never costs more than the newest."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from timm.utils import ModelEmaV3
from torch import nn

from autonl.errors import AutoNLError

if TYPE_CHECKING:
    from autonl.train.records import EpochMeans
    from autonl.train.tasks import Task

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
FORMAT = 1


@dataclass
class Training:
    """Everything that a checkpoint has to bring back."""

    module: nn.Module
    average: ModelEmaV3 | None
    optimizers: list[Any]
    task: Task
    means: EpochMeans
    about: dict[str, Any]  # architecture, settings, versions: kept in every checkpoint
    step: int = 0  # optimiser steps done
    epoch: int = 0  # epochs done
    history: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "module": self.module.state_dict(),
            "average": self.average.module.state_dict() if self.average else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "task": self.task.state_dict(),
            "means": {"sums": self.means.sums, "count": self.means.count},
            "step": self.step,
            "epoch": self.epoch,
            "history": self.history,
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.module.load_state_dict(content["module"])
        if self.average:
            self.average.module.load_state_dict(content["average"])
        for optimizer, kept in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.task.load_state_dict(content["task"])
        self.means.sums, self.means.count = content["means"]["sums"], content["means"]["count"]
        self.step, self.epoch, self.history = content["step"], content["epoch"], content["history"]

    def evaluated(self) -> nn.Module:
        return self.average.module if self.average else self.module

    def best(self) -> tuple[float, int]:
        """(the best value of the monitored metric, evaluations since)."""
        values = [row[self.task.monitor] for row in self.history if self.task.monitor in row]
        if not values:
            return float("-inf"), 0
        return max(values), len(values) - 1 - values.index(max(values))


def write_atomically(path: Path, content: bytes) -> None:
    """Under a temporary name, flushed to the disk, renamed: the file is the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise AutoNLError(f"{path}: cannot be written: {error.strerror}; the file before it is whole") from None
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(folder: Path, content: dict[str, Any]) -> None:
    """The content as last.ckpt; the one before it becomes previous.ckpt."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT} | content, buffer)
    fresh = folder / ".fresh.ckpt"
    write_atomically(fresh, buffer.getvalue())
    if (folder / LAST).exists():
        os.replace(folder / LAST, folder / PREVIOUS)
    os.replace(fresh, folder / LAST)
    flush_folder(folder)


def read_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """(the newest checkpoint that is whole, what was wrong with newer ones); None where there is none at all."""
    problems: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            return load_file(path), problems
        except AutoNLError as error:
            problems.append(str(error))
    if problems:
        raise AutoNLError(
            "; ".join(problems) + "; no whole checkpoint is left: choose another --out, or delete the folder"
        )
    return None, problems


def load_file(path: Path) -> dict[str, Any]:
    """A checkpoint, with nothing in it that could run code; every byte is checked against the file's own sums."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = {} if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise AutoNLError(f"{path}: cannot be read: {error.strerror}") from None
    except zipfile.BadZipFile:
        raise AutoNLError(f"{path}: damaged, or not a checkpoint") from None
    except pickle.UnpicklingError:
        raise AutoNLError(f"{path}: refused: it holds more than tensors and plain values") from None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise AutoNLError(f"{path}: damaged: {' '.join(str(error).split())[:120]}") from None
    if damaged:
        raise AutoNLError(f"{path}: damaged: {damaged} does not match its checksum")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise AutoNLError(f"{path}: not a checkpoint of this program, or of another version of it")
    return content


def write_weights(path: Path, module: nn.Module) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    write_atomically(path, save(tensors))


def weights_are_finite(module: nn.Module) -> bool:
    sums = torch.stack([tensor.detach().float().sum() for tensor in module.parameters()])
    return bool(sums.isfinite().all())

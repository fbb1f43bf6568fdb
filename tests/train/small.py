"""A network and a recipe so small that a training takes a second or two."""

import csv
import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from autonl.arch.codec import block_from_string
from autonl.arch.spec import ArchSpec
from autonl.data.digits import digits
from autonl.train.config import Config, from_dict
from autonl.train.lock import Lock
from autonl.train.records import TIME_COLUMNS
from autonl.train.run import Where, train_classifier

NETWORK = ArchSpec(
    name="small",
    blocks=tuple(map(block_from_string, ("k3_s1_e1_c8", "k3_s2_e2_c8_nl0.5/1", "k3_s1_e2_c8_se0.5"))),
    resolution=(32, 32),
    classes=10,
    stem_chs=8,
    head_chs=16,
    dropout=0.2,
)
ON_CPU = Where(accelerator="cpu")


def write_digits(root, images_per_class, classes=10):
    """A folder of class folders with real digits, JPEG."""
    stored, _ = digits()
    for label in range(classes):
        folder = Path(root) / f"class{label}"
        folder.mkdir(parents=True)
        for number, image in enumerate(stored.images[stored.labels == label][:images_per_class]):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number:03d}.jpg")
    return Path(root)


def small_config(path, **sections):
    """Everything that carries state is on: EMA, momentum, dropout, accumulation, augmentation, workers."""
    content = {
        "data": {"path": str(path), "batch_size": 16, "workers": 2, "held_out": 0.2, "crop_pct": 1.0},
        "augment": {"scale": [0.5, 1.0], "colour": [0.4, 0.4, 0.4]},
        "optim": {"lr": 0.05, "momentum": 0.9},
        "schedule": {"epochs": 3, "warmup_epochs": 1},
        "loop": {
            "ema": 0.9,
            "accumulate": 2,
            "clip_norm": 1.0,
            "calibrate_batches": 4,
            "checkpoint_steps": 3,
            "log_steps": 2,
        },
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section if isinstance(section, dict) else section
    return from_dict(Config, content)


def train_small(path, folder, *, resume=False, network=NETWORK, **sections):
    return train_classifier(network, small_config(path, **sections), Path(folder), resume=resume, where=ON_CPU)


def rows(folder):
    """metrics.csv without the columns that time the run."""
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in csv.DictReader(file)]


def in_child(function, *arguments):
    """Start the function in a forked process, which has everything imported already."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


@contextmanager
def held_by_another(folder):
    """While another process holds the run in the folder."""
    ours, theirs = multiprocessing.Pipe()
    folder.mkdir(parents=True, exist_ok=True)

    def hold():
        theirs.send(Lock(folder).take())
        theirs.recv()

    process = in_child(hold)
    assert ours.recv()
    try:
        yield
    finally:
        kill(process)


def another_could_take(folder):
    """Whether a lock of the run in the folder is to be had."""
    process = in_child(lambda: sys.exit(0 if Lock(folder).take() else 1))
    process.join()
    return process.exitcode == 0


def die_at(call, count):
    """SIGKILL this process in the middle of the count-th call of os.fsync or os.replace from now on."""
    calls, original = 0, getattr(os, call)

    def counted(*arguments):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(os, call, counted)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()

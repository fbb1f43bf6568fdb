"""How much of the bare training speed is left behind `autonl train`, on one GPU.

    python ../shared/data/unpack.py tiny_imagenet100 DIR
    python -m benchmarks.training --data DIR

MobileNetV2 1.0 at 128 px, the recipe tiny_imagenet: (a) forward, backward and step on a batch that is already
there, (b) through `autonl train` with the images in memory, (c) with JPEG files in a folder and 16 workers, (d) what
the loader gives when nobody trains.
Prints a table, writes benchmarks/results/training_<GPU>.csv. The first epoch, in which CUDA
loads its kernels, is left out. `--epochs 30` is the recipe's own length.
"""

import argparse
import itertools
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

from autonl.data.loaders import Loaders, view_of
from autonl.data.sources import open_source
from autonl.models import create_model
from autonl.train.config import Config, load_config
from autonl.train.progress import Progress
from autonl.train.run import train_classifier
from autonl.train.tasks import create_optimizer
from benchmarks import RESULTS, put_rows, require_cuda

NETWORK = "mobilenetv2_100"
CLASSES = 100


class Rows(Progress):
    """Prints the epochs as they come."""

    def row(self, row):
        print({name: row[name] for name in ("epoch", "train_loss", "seconds", "images_per_second")}, flush=True)


def bare_images_per_second(config: Config, steps: int = 60, warmup: int = 20) -> float:
    """Forward, backward and step on one resident batch, in the recipe's precision, layout and optimiser."""
    size, batch_size = config.data.image_size, config.data.batch_size
    model = create_model(NETWORK, num_classes=CLASSES).cuda().to(memory_format=torch.channels_last)
    optimizer = create_optimizer(model, config.optim)
    images = torch.randn(batch_size, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch_size,), device="cuda")
    for step in range(warmup + steps):
        if step == warmup:
            torch.cuda.synchronize()
            started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(images)
        F.cross_entropy(logits.float(), labels, label_smoothing=config.optim.label_smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return steps * batch_size / (time.perf_counter() - started)


def loader_images_per_second(data: str, workers: int, settings: list[str], epochs: int = 3) -> float:
    """JPEG files to augmented batches on the device, with nobody training; workers 0: one core."""
    files = [f"data.path={data}", f"data.workers={workers}", "data.in_memory=false"]
    config = load_config("tiny_imagenet", [*files, *settings])
    view = view_of(create_model(NETWORK), config.data)
    device = torch.device("cuda")
    batches = Loaders(config.data, config.augment, view, CLASSES, device).training(open_source(config.data).train)
    count = 0
    for epoch in range(epochs + 1):
        if epoch == 1:  # the workers are there
            torch.cuda.synchronize()
            started, count = time.perf_counter(), 0
        for _, labels in itertools.islice(batches.epoch(epoch), 8 if workers == 0 else None):
            count += len(labels)
    torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def trained_images_per_second(data: str, epochs: int, *settings: str) -> dict[str, float]:
    """Images/s of the training part of the epochs behind the first, and of the whole command; final top-1."""
    config = load_config("tiny_imagenet", [f"data.path={data}", f"schedule.epochs={epochs}", *settings])
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = train_classifier(NETWORK, config, Path(folder) / "run", progress=Rows)
        seconds = time.perf_counter() - started
    later = result.history[1:]
    images = [row["images_per_second"] * row["seconds"] for row in later]
    return {
        "images_per_second": sum(images) / sum(row["seconds"] for row in later),
        "seconds_in_all": seconds,  # with reading the folder, evaluations and checkpoints
        "top1": result.metrics["top1"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a root with train/ and val/")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting for every part")
    arguments = parser.parse_args()
    require_cuda()
    config = load_config("tiny_imagenet", ["schedule.warmup_epochs=0", *arguments.settings])
    common = (f"data.workers={arguments.workers}", "schedule.warmup_epochs=1", *arguments.settings)
    rows = {"bare": {"images_per_second": bare_images_per_second(config)}}
    rows["in memory"] = trained_images_per_second(arguments.data, arguments.epochs, *common)
    rows["JPEG folder"] = trained_images_per_second(arguments.data, arguments.epochs, *common, "data.in_memory=false")
    for workers in (0, 4, 8, arguments.workers):
        speed = loader_images_per_second(arguments.data, workers, arguments.settings)
        rows[f"loader alone, {workers} workers"] = {"images_per_second": speed}
    bare = rows["bare"]["images_per_second"]
    about = {
        "network": NETWORK,
        "size": config.data.image_size,
        "batch": config.data.batch_size,
        "precision": "bf16",
        "epochs": arguments.epochs,
        "workers": arguments.workers,
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    table = [
        {
            "images": name,
            "images_per_second": round(row["images_per_second"]),
            "share_of_bare": round(row["images_per_second"] / bare, 3),
            "seconds_in_all": round(row.get("seconds_in_all", 0), 1),
            "top1": round(row.get("top1", 0), 2),
            **about,
        }
        for name, row in rows.items()
    ]
    for row in table:
        print("{images:26} {images_per_second:8,} images/s {share_of_bare:6.1%} of bare  top-1 {top1}".format(**row))
    path = RESULTS / f"training_{about['hardware'].replace(' ', '_')}.csv"
    put_rows(path, list(table[0]), table)
    print(path)


if __name__ == "__main__":
    main()

"""Image sets -> batches on the device. Workers decode and crop; pixels travel as bytes, the device normalises them."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.loader import PrefetchLoader
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from autonl.data.config import AugmentConfig, DataConfig
from autonl.data.memory import Batch, MemoryEvaluation, MemoryTraining, StoredImages, View
from autonl.data.order import EvaluationOrder, Key, Share, TrainingOrder, rank_batch_size, seed_sample
from autonl.data.sources import Images, ImageSet, Stream
from autonl.errors import AutoNLError, refuse

logger = logging.getLogger("autonl")


class TrainingBatches(Protocol):
    resumes_inside: bool  # whether an epoch can begin at any batch

    def __len__(self) -> int: ...  # batches an epoch, on this rank

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]: ...


class EvaluationBatches(Protocol):
    def __iter__(self) -> Iterator[Batch]: ...


class CorruptImages:
    """Names the images that could not be read, and stops the run when there are too many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.names: dict[str, None] = {}

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if name and name not in self.names:
                self.names[name] = None
                logger.warning("skipped an image that cannot be read: %s", name)
        if len(self.names) > self.limit:
            listed = ", ".join(self.names)
            raise AutoNLError(
                f"{len(self.names)} images cannot be read, more than data.max_corrupt {self.limit}: {listed}"
            )


class DecodedImages(Dataset[tuple[Tensor, int, str]]):
    """(image uint8 (3, H, W), label, names of unreadable files) by key, random only in (seed, epoch, image).

    In training the next readable image stands in for an unreadable one; in evaluation, where no image may
    count twice, black stands in, with label -1.
    """

    def __init__(self, images: Images, transform: Any, seed: int, training: bool, limit: int) -> None:
        self.images, self.transform, self.seed, self.training, self.limit = images, transform, seed, training, limit

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, str]:
        epoch, place = key
        seed_sample(self.seed, epoch, place)
        unreadable: list[str] = []
        for candidate in range(place, place + min(self.limit + 1, len(self)) if self.training else place + 1):
            candidate %= len(self)
            try:
                image = self.images.open(candidate)
            except Exception:  # broken files raise nearly everything in PIL
                unreadable.append(self.images.name(candidate))
                continue
            return self.transform(image), int(self.images.labels[candidate]), "\n".join(unreadable)
        return self.transform(Image.new("RGB", (256, 256))), -1, "\n".join(unreadable)


class CheckedBatches:
    """The batches of a DataLoader, (images, labels), once their labels and unreadable files have been looked at."""

    def __init__(self, loader: Any, classes: int, corrupt: CorruptImages, training: bool = False) -> None:
        self.loader, self.classes, self.corrupt, self.training = loader, classes, corrupt, training

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels, *unreadable in self.loader:
            for names in unreadable:
                self.corrupt.note(name for joined in names for name in joined.split("\n"))
            low, high = labels.aminmax()
            if self.training and low == -1:
                raise AutoNLError(f"no training image can be read: {', '.join(self.corrupt.names)}")
            if low < -1 or high >= self.classes:
                wrong = int(high if high >= self.classes else low)
                raise AutoNLError(f"an image has the label {wrong}; the network has classes 0 to {self.classes - 1}")
            yield images, labels


class LoaderTraining:
    """Batches of a map-style set, in our order."""

    resumes_inside = True

    def __init__(self, order: TrainingOrder, batches: PrefetchLoader) -> None:
        self.order, self.batches = order, batches

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        self.order.begin(epoch, first_batch)
        return iter(self.batches)


class StreamTraining:
    """Batches of a stream, in its own order; an epoch begins at its beginning.

    Where shards are uneven a stream may end before it has given its number of batches: it then begins again.
    """

    resumes_inside = False

    def __init__(self, dataset: Any, batches: PrefetchLoader) -> None:
        self.dataset, self.batches = dataset, batches

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        self.dataset.set_epoch(epoch)
        return itertools.islice(self.again_and_again(), len(self))

    def again_and_again(self) -> Iterator[Batch]:
        while True:
            batch = None
            try:
                for batch in self.batches:
                    yield batch
            except UnboundLocalError:  # what the loader of timm 1.0.29 ends with where there is no batch
                if batch is not None:
                    raise
            if batch is None:
                raise AutoNLError(
                    "the stream came to its end without a batch: each worker needs data.batch_size images of its own; "
                    "allowed: a lower data.batch_size, or fewer data.workers"
                )


def view_of(module: Any, config: DataConfig) -> View:
    """What the network was made to see, with the settings on top."""
    settings = {name: getattr(config, name) for name in ("crop_pct", "interpolation", "mean", "std")}
    if config.image_size:
        settings["input_size"] = (3, config.image_size, config.image_size)
    for name in ("mean", "std"):
        if settings[name] is not None and len(settings[name]) != 3:
            refuse(f"data.{name}", settings[name], "three numbers")
    found = resolve_data_config(settings, model=module)
    return View(tuple(found["input_size"][-2:]), found["mean"], found["std"], found["interpolation"], found["crop_pct"])


class Loaders:
    """Makes batches for one device out of image sets, all with the same settings."""

    def __init__(
        self,
        config: DataConfig,
        augment: AugmentConfig,
        view: View,
        classes: int,
        device: torch.device,
        share: Share = Share(),
        seed: int = 0,
    ) -> None:
        self.config, self.augment, self.view, self.classes = config, augment, view, classes
        self.device, self.share, self.seed = device, share, seed
        self.corrupt = CorruptImages(config.max_corrupt)
        # more workers than CPUs only get in each other's way; what they load does not depend on their number
        self.workers = min(config.workers, cpus())

    def training(self, images: ImageSet, accumulate: int = 1) -> TrainingBatches:
        config = self.config
        if isinstance(images, Stream):
            images.dataset.transform = self.training_transform()
            size = rank_batch_size(config.batch_size, self.share.world, accumulate)
            batches = self.on_device(self.stream_loader(images, size, drop_last=True), training=True)
            if not len(batches):
                raise AutoNLError(f"the stream does not fill one batch: data.batch_size is {config.batch_size}")
            return StreamTraining(images.dataset, batches)
        images = self.kept(images)
        order = TrainingOrder(len(images), config.batch_size, self.seed, self.share, accumulate)
        if isinstance(images, StoredImages):
            if self.augment.auto_augment:
                refuse("augment.auto_augment", self.augment.auto_augment, "none for images in memory")
            return MemoryTraining(images, order, self.view, self.augment, self.device)
        decoded = DecodedImages(images, self.training_transform(), self.seed, True, config.max_corrupt)
        return LoaderTraining(order, self.on_device(self.map_loader(decoded, order), training=True))

    def evaluation(self, images: ImageSet) -> EvaluationBatches:
        config = self.config
        if isinstance(images, Stream):
            images.dataset.transform = self.evaluation_transform()
            return self.on_device(self.stream_loader(images, config.evaluation_batch_size, drop_last=False))
        images = self.kept(images)
        order = EvaluationOrder(len(images), config.evaluation_batch_size, self.share)
        if isinstance(images, StoredImages):
            return MemoryEvaluation(images, order, self.view, self.device)
        decoded = DecodedImages(images, self.evaluation_transform(), self.seed, False, config.max_corrupt)
        return self.on_device(self.map_loader(decoded, order))

    def sized(self, size: tuple[int, int]) -> Loaders:
        """The same for a view of another size."""
        other = copy.copy(self)
        other.view = replace(self.view, size=size)
        return other

    def reduced(self, images: Images | StoredImages) -> Images | StoredImages:
        """Stored images no larger than the view needs, which is cut out of them without a low-pass filter."""
        side = self.view.whole_side
        if not isinstance(images, StoredImages) or images.images.shape[-1] <= side:
            return images
        parts = images.images.split(256)
        smaller = [F.interpolate(part.float(), (side, side), mode="bilinear", antialias=True) for part in parts]
        return StoredImages(torch.cat([part.round().byte() for part in smaller]), images.labels)

    def kept(self, images: Images | StoredImages) -> Images | StoredImages:
        """Decoded and on the device, where they are to stay in memory."""
        if isinstance(images, StoredImages):
            return images.to(self.device)
        return self.stored(images).to(self.device) if self.config.in_memory else images

    def stored(self, images: Images) -> StoredImages:
        """Decode every image once, the centre square at data.stored_size; those that cannot be read are left out."""
        side = self.config.stored_size or self.view.whole_side  # an evaluation sees what it would of the files
        shrink = transforms.Resize(side, InterpolationMode(self.view.interpolation))
        square = partial(centre_square, side=side, size=self.view.size)
        transform = transforms.Compose([shrink, square, transforms.PILToTensor()])
        decoded = DecodedImages(images, transform, self.seed, False, self.config.max_corrupt)
        loader = self.map_loader(decoded, EvaluationOrder(len(images), 256, Share()), persistent=False)
        batches = list(CheckedBatches(loader, self.classes, self.corrupt))
        pixels, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return StoredImages(pixels[labels >= 0], labels[labels >= 0])

    def training_transform(self) -> Any:
        augment, view = self.augment, self.view
        try:
            return transforms_imagenet_train(
                view.size,
                scale=augment.scale,
                ratio=augment.ratio,
                hflip=augment.flip,
                color_jitter=augment.colour if any(augment.colour) else None,
                force_color_jitter=True,  # timm would leave it out beside auto_augment
                auto_augment=augment.auto_augment,
                interpolation=view.interpolation,
                mean=view.mean,
                std=view.std,
                normalize=False,
            )
        except (AssertionError, KeyError, ValueError, IndexError):  # timm's for a policy that it does not have
            refuse("augment.auto_augment", augment.auto_augment, "a policy of timm's, such as rand-m9-mstd0.5")

    def evaluation_transform(self) -> Any:
        view = self.view
        return create_transform(
            view.size, interpolation=view.interpolation, crop_pct=view.crop_pct, mean=view.mean, normalize=False
        )

    def map_loader(self, dataset: Dataset[Any], order: Any, *, persistent: bool = True) -> DataLoader[Any]:
        return DataLoader(dataset, batch_sampler=order, **self.worker_arguments(persistent))

    def stream_loader(self, stream: Stream, batch_size: int, *, drop_last: bool) -> DataLoader[Any]:
        stream.dataset.set_loader_cfg(num_workers=self.workers)
        return DataLoader(stream.dataset, batch_size, drop_last=drop_last, **self.worker_arguments(True))

    def worker_arguments(self, persistent: bool) -> dict[str, Any]:
        workers = self.workers
        return {
            "num_workers": workers,
            "persistent_workers": persistent and workers > 0,
            "pin_memory": self.device.type == "cuda",
            "worker_init_fn": leave_signals_to_the_main_process,
        }

    def on_device(self, loader: DataLoader[Any], training: bool = False) -> PrefetchLoader:
        checked = CheckedBatches(loader, self.classes, self.corrupt, training)
        return PrefetchLoader(checked, self.view.mean, self.view.std, device=self.device, img_dtype=torch.float32)


def centre_square(image: Image.Image, side: int, size: tuple[int, int]) -> Image.Image:
    """The square in which the centre of `size` lies where torchvision's crop of the image has it, rounded once."""
    left, top = (
        round((whole - own) / 2) - round((side - own) / 2) for whole, own in zip(image.size, size[::-1], strict=True)
    )
    return image.crop((left, top, left + side, top + side))


def cpus() -> int:
    """That this process may use: a batch system or taskset may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


GRACE = 5  # seconds that a worker goes on for when it is told to end


def leave_signals_to_the_main_process(worker: int) -> None:
    """Ctrl-C and SIGTERM reach the whole group: the workers go on until the main process has done its step and saved.

    They do not ignore SIGTERM for good: at its exit the main process sends it to the workers that are left, and waits.
    They leave with code 0, since torch raises an error in the main process for any other.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))

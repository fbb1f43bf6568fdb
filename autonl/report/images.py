"""A trained network on its validation images: what it takes for what, and the mistakes that it is surest of."""

from __future__ import annotations

import base64
import heapq
import io
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from autonl.cam import class_activation_map
from autonl.data.loaders import Loaders, view_of
from autonl.data.memory import View
from autonl.data.sources import Images, ImageSet, open_evaluation, open_source
from autonl.errors import AutoNLError
from autonl.train.config import replace
from autonl.train.folder import run_config
from autonl.train.run import known_classes
from autonl.weights import load

Wrong = tuple[float, int, int, int, Tensor]  # confidence, place in the set, true class, predicted class, image

MISTAKES = 12
PICTURE_SIDE = 192  # pixels; larger images are reduced
SMALL = 64  # up to this side pixels are kept as they are


@dataclass(frozen=True)
class Mistake:
    name: str
    true: int
    predicted: int
    confidence: float  # percent
    picture: str  # data URI
    maps: dict[str, str] = field(default_factory=dict)  # "predicted" and "true" -> the class activation map


@dataclass(frozen=True)
class Judged:
    images: int
    top1: float
    confusion: list[list[int]]  # of true class -> of predicted class
    mistakes: list[Mistake]  # the surest first
    without_maps: str = ""  # why there are no class activation maps
    size: tuple[int, int] = (1, 1)  # height, width of the images
    data: str | None = None  # where they come from, if not from the run's own set

    @property
    def shape(self) -> float:
        return round(self.size[1] / self.size[0], 4)

    @property
    def small(self) -> bool:
        return max(self.size) <= SMALL


def judge(folder: Path, data: str | None = None, progress: Callable[[str], None] = lambda told: None) -> Judged:
    """The network of a run folder on the images of `data`; on None, the validation images of the run."""
    ref = folder.absolute()  # never the zoo's network of that name
    config = run_config(ref)
    config = replace(config, data={"path": data or config.data.path})
    if data is None and config.data.path is None:
        raise AutoNLError("the run does not say where its images are; give --data DIR")
    opened = open_evaluation if data else open_source
    source = opened(config.data, classes=known_classes(ref))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = load(ref).to(device)
    if source.classes and len(source.classes) != model.num_classes:
        raise AutoNLError(f"the network tells {model.num_classes} classes apart, the data has {len(source.classes)}")
    view = view_of(model, config.data)
    loaders = Loaders(config.data, config.augment, view, model.num_classes, device)
    batches = loaders.evaluation(source.validation)
    progress(f"{folder}: looking at {len(source.validation):,} images")

    confusion = torch.zeros(model.num_classes, model.num_classes, dtype=torch.long)
    surest: list[Wrong] = []
    place = 0
    with torch.no_grad():
        for images, labels in batches:
            confidence, predicted = model(images).float().softmax(1).max(1)
            for row in range(len(labels)):
                true, taken_for = int(labels[row]), int(predicted[row])
                if true >= 0:  # -1: could not be read
                    confusion[true, taken_for] += 1
                    if true != taken_for:
                        heapq.heappush(surest, (float(confidence[row]), place, true, taken_for, images[row].cpu()))
                        if len(surest) > MISTAKES:
                            heapq.heappop(surest)
                place += 1
    count = int(confusion.sum())
    if not count:
        raise AutoNLError(f"{config.data.path}: no image could be read")
    surest.sort(key=lambda mistake: mistake[:2], reverse=True)
    name_at = names_of(source.validation, loaders.corrupt.names if config.data.in_memory else {})
    names = [name_at(place) for _, place, *_ in surest]
    maps, without_maps = maps_of(model, surest, device)
    mistakes = [
        Mistake(name, true, predicted, 100 * confidence, picture(image, view), found)
        for name, found, (confidence, _, true, predicted, image) in zip(names, maps, surest, strict=True)
    ]
    top1 = 100 * int(confusion.diagonal().sum()) / count
    return Judged(count, top1, confusion.tolist(), mistakes, without_maps, view.size, data)


def names_of(images: ImageSet, left_out: Container[str]) -> Callable[[int], str]:
    """The name of the image at a place of an evaluation; images in memory close the gap of one that is left out."""
    if not isinstance(images, Images):
        return lambda place: f"image {place}"
    found = [name for name in map(images.name, range(len(images))) if name not in left_out]
    return found.__getitem__


def maps_of(model: Any, surest: list[Wrong], device: torch.device) -> tuple[list[dict[str, str]], str]:
    """Class activation maps of the mistakes for both classes; where the network's head allows none, the reason."""
    if not surest:
        return [], ""
    images = torch.stack([image for *_, image in surest]).to(device)
    classes = torch.tensor([(predicted, true) for _, _, true, predicted, _ in surest])
    try:
        maps, _ = class_activation_map(model, images, classes)  # (N, 2, h, w)
    except AutoNLError as error:
        return [{} for _ in surest], str(error)
    return [{"predicted": overlay(mine), "true": overlay(right)} for mine, right in maps.cpu()], ""


def picture(image: Tensor, view: View) -> str:
    """The pixels as the network saw them."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (view.mean, view.std))
    pixels = ((image * std + mean) * 255).round().clamp(0, 255).byte()
    shown = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    small = max(shown.size) <= SMALL
    shown.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return data_uri(shown, "PNG" if small else "JPEG")


def overlay(activation: Tensor) -> str:
    """(h, w) -> red where the evidence for the class is, see-through where there is none; the browser enlarges it."""
    alpha = (activation.float() / activation.max().clamp(min=1e-12)).clamp(0, 1).mul(255).byte()
    red = torch.zeros(*alpha.shape, 4, dtype=torch.uint8)
    red[..., 0], red[..., 1], red[..., 3] = 255, 32, alpha
    return data_uri(Image.fromarray(red.numpy(), "RGBA"), "PNG")


def data_uri(image: Image.Image, form: str) -> str:
    buffer = io.BytesIO()
    image.save(buffer, form, **({"quality": 85} if form == "JPEG" else {"optimize": True}))
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"

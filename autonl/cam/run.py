"""Pictures of trained networks, a file an image: what `autonl cam` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from autonl.cam.affinity import affinities
from autonl.cam.drawing import SOFTWARE, Panel, draw_affinities, draw_maps, save
from autonl.cam.inputs import open_files, refuse_unreadable
from autonl.cam.maps import class_activation_map
from autonl.data.loaders import Loaders, view_of
from autonl.data.sources import ImageSet, Source, Stream, open_evaluation, open_source, read_classes
from autonl.errors import AutoNLError, refuse, refuse_name
from autonl.train.config import Config, replace
from autonl.train.run import build_network, known_classes, refuse_what_does_not_run
from autonl.weights import load_weights, run_weights


@dataclass(frozen=True)
class Chosen:
    """The images to draw."""

    classes: tuple[str, ...]  # empty: they have no names
    images: ImageSet
    places: Sequence[int]  # in images
    names: Sequence[str]  # one a place
    truths: Sequence[int | None]  # one a place
    renamed: bool = False  # the names are the user's own, not those that the networks were trained with

    def class_name(self, number: int) -> str:
        return self.classes[number] if self.classes else f"class {number}"


@dataclass(frozen=True)
class Trained:
    """A network with its weights, and how it looks at images."""

    name: str
    module: Any
    loaders: Loaders

    def see(self, images: Any, place: int) -> Tensor:
        """One image (1, 3, H, W) as `autonl evaluate` would hand it to the network."""
        (seen, _), *_ = self.loaders.evaluation(images.subset(np.array([place])))
        return seen

    def pixels(self, seen: Tensor) -> Tensor:
        """(1, 3, H, W) normalised -> (3, H, W) from 0 to 1."""
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.loaders.view.mean, self.loaders.view.std))
        return (seen[0] * std + mean).clamp(0, 1)


@dataclass(frozen=True)
class Picture:
    """A file that was written, and what the networks said of its image."""

    image: str
    file: str
    truth: str | None
    networks: list[dict[str, Any]]  # {"name", "prediction", "probability"}


def choose_images(
    ref: str,
    config: Config,
    paths: Sequence[str] = (),
    *,
    data: str | None = None,
    indices: Sequence[int] = (),
    label: str | None = None,
    classes_file: str | None = None,
) -> Chosen:
    """Image files and folders; or images of a set by their index, in the order in which they are evaluated.

    A set is `data`, else the validation images that the run was judged on. Class names are those of the file, of
    the run folder, or of the set.
    """
    if bool(paths) == bool(indices):
        raise AutoNLError("choose images by their files, or by --index N of a set (--data DIR, or that of the run)")
    if classes_file:
        config = replace(config, data={"classes": classes_file})
    classes = tuple(read_classes(config.data) if classes_file else known_classes(ref))
    if paths:
        if data:
            raise AutoNLError(f"--data {data}: goes with --index N, not with image files")
        images = open_files(paths)
        truth = None if label is None else class_number(label, classes)
        places = range(len(images))
        names = [Path(images.name(place)).name for place in places]
        return Chosen(classes, images, places, names, [truth] * len(images), bool(classes_file))

    if label is not None:
        raise AutoNLError(f"--label {label}: is for image files; the images of a set have their labels")
    config = replace(config, data={"path": data} if data else {})
    source: Source = (open_evaluation if data else open_source)(config.data, classes=classes)
    if isinstance(source.validation, Stream):
        raise AutoNLError(f"{config.data.path}: is a stream, whose images have no index; give image files")
    labels = source.validation.labels
    for index in indices:
        if not 0 <= index < len(labels):
            refuse("--index", index, f"0 to {len(labels) - 1}")
    names = [f"{Path(str(config.data.path)).name}-{index}" for index in indices]
    return Chosen(source.classes, source.validation, indices, names, [int(labels[index]) for index in indices])


def class_number(label: str, classes: Sequence[str]) -> int:
    """A class by its name; by its number where classes have no names."""
    if classes and label not in classes:
        refuse_name("class", label, classes)
    if not classes and not label.isdecimal():
        refuse("--label", label, "a number, or a name with --classes FILE")
    return classes.index(label) if classes else int(label)


def open_trained(
    ref: str, config: Config, chosen: Chosen, weights: str | os.PathLike[str] | None = None, name: str | None = None
) -> Trained:
    """The network of a REF with trained weights, which knows the classes of the chosen images."""
    own = known_classes(ref)
    if own and chosen.classes and not chosen.renamed and list(chosen.classes) != own:
        raise AutoNLError(f"{ref}: was trained on other classes than those of the images, or in another order")
    module = build_network(ref, config.model, Source((), None, chosen.images))
    load_weights(module, weights or trained_weights(ref))
    if chosen.classes and module.num_classes != len(chosen.classes):
        raise AutoNLError(f"{ref}: tells {module.num_classes} classes apart, {len(chosen.classes)} have names")
    view = view_of(module, config.data)
    refuse_what_does_not_run(module, view)
    config = replace(config, data={"workers": 0})  # for one image at a time, processes that decode are in the way
    loaders = Loaders(config.data, config.augment, view, module.num_classes, torch.device("cpu"))
    return Trained(name or short_name(ref), module.eval(), loaders)


def trained_weights(ref: str) -> Path:
    try:
        return run_weights(ref)
    except AutoNLError:
        raise AutoNLError(
            f"{ref}: has no trained weights, and random ones look at nothing; give a run folder, or a file of weights"
        ) from None


def short_name(ref: str) -> str:
    return Path(os.path.abspath(ref)).name.removesuffix(".yaml")


def map_pictures(networks: Sequence[Trained], chosen: Chosen, out: Path) -> Iterator[Picture]:
    """A figure an image: class activation maps of every network, for its prediction and for the ground truth."""
    counts = [network.module.num_classes for network in networks]
    if len(set(counts)) > 1:
        raise AutoNLError(f"the networks tell {' and '.join(map(str, counts))} classes apart; allowed: the same ones")
    files = free_files(out, chosen.names, "_vs_".join(network.name for network in networks))
    refuse_unreadable(chosen.images, chosen.places)
    for place, name, truth, file in zip(chosen.places, chosen.names, chosen.truths, files, strict=True):
        asked: list[list[Panel]] = []  # a network: its prediction, and the ground truth where that is known
        answers, right = [], truth is not None
        for network in networks:
            seen = network.see(chosen.images, place)
            with torch.no_grad():
                prediction = int(network.module(seen).argmax())
            classes = [prediction] if truth is None else [prediction, truth]
            try:  # one image: (K, h, w), (C,)
                (maps,), (logits,) = class_activation_map(network.module, seen, torch.tensor([classes]))
            except AutoNLError as error:
                raise AutoNLError(f"{network.name}: {error}") from None
            shares, pixels = logits.softmax(0), network.pixels(seen)
            panels = []
            for question, number, values in zip(("prediction", "ground truth"), classes, maps, strict=False):
                probability = f"probability {100 * shares[number]:.1f} %"
                lines = (network.name, f"{question}: {chosen.class_name(number)}", probability)
                panels.append(Panel(lines, pixels, values))
            asked.append(panels)
            answers.append(answer(network, chosen, prediction, float(shares[prediction])))
            right = right and prediction == truth
        rows = list(zip(*asked, strict=True))  # a question: a panel a network
        told = None if truth is None else chosen.class_name(truth)
        title = [name] if told is None else [name, f"ground truth: {told}"]
        write(draw_maps(title, asked[0][0].pixels, rows[:1] if right else rows), file)
        yield Picture(name, str(file), told, answers)


def affinity_pictures(
    network: Trained,
    chosen: Chosen,
    out: Path,
    positions: Sequence[tuple[int, int]] = (),
    blocks: Sequence[int] = (),
) -> Iterator[Picture]:
    """A figure an image: where LightNL looks from the positions (x, y), default the centre, in some of the blocks."""
    files = free_files(out, chosen.names, f"{network.name}_affinity")
    refuse_unreadable(chosen.images, chosen.places)
    height, width = network.loaders.view.size
    positions = positions or [(width // 2, height // 2)]
    for place, name, truth, file in zip(chosen.places, chosen.names, chosen.truths, files, strict=True):
        seen = network.see(chosen.images, place)
        try:
            rows = affinities(network.module, seen, positions, blocks or None)
        except AutoNLError as error:
            raise AutoNLError(f"{network.name}: {error}") from None
        with torch.no_grad():
            shares = network.module(seen)[0].softmax(0)
        prediction = int(shares.argmax())
        told = None if truth is None else chosen.class_name(truth)
        write(draw_affinities([name, network.name], network.pixels(seen), positions, rows), file)
        yield Picture(name, str(file), told, [answer(network, chosen, prediction, float(shares[prediction]))])


def answer(network: Trained, chosen: Chosen, prediction: int, probability: float) -> dict[str, Any]:
    name = chosen.class_name(prediction)
    return {"name": network.name, "prediction": name, "probability": round(probability, 4)}


def free_files(out: Path, names: Sequence[str], ending: str) -> list[Path]:
    """A file an image; pictures of ours are made anew, a file that is something else is left alone."""
    files: list[Path] = []
    for name in names:
        stem = f"{Path(name).stem}_{ending}".replace(":", "-").replace(os.sep, "-")[:200]  # as long as names may be
        candidates = (out / f"{stem}{number}.png" for number in ("", *(f"-{n}" for n in range(2, len(names) + 2))))
        file = next(path for path in candidates if path not in files)
        if file.exists() and not is_ours(file):
            raise AutoNLError(f"{file}: is there already and no picture of autonl; choose another --out")
        files.append(file)
    return files


def is_ours(file: Path) -> bool:
    try:
        with Image.open(file) as image:
            return str(image.info.get("Software", "")).split()[:1] == SOFTWARE.split()[:1]
    except OSError:
        return False


def write(figure: Figure, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(figure, file)
    except OSError as error:
        raise AutoNLError(f"{file}: cannot be written: {error.strerror}") from None

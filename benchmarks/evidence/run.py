"""One job -> one row."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autonl.arch.codec import block_to_string, spec_from_dict, spec_to_dict
from autonl.arch.macs import count_macs
from autonl.arch.spec import ArchSpec
from autonl.models import Ref, resolve
from autonl.nn.kernels import missing_on
from autonl.search.chance import random_network
from autonl.search.config import SearchConfig
from autonl.search.run import search
from autonl.search.space import Space, load_space
from autonl.segment.config import SegmentConfig
from autonl.segment.run import train_segmenter
from autonl.train.config import load_config
from autonl.train.run import train_classifier
from autonl.weights import FINAL_WEIGHTS
from benchmarks.evidence.jobs import RECIPE, SUITES, Job

COLUMNS = (
    *("suite", "job", "seed", "top1", "top5", "ema_top1", "miou", "selection_top1", "train_loss", "val_loss"),
    *("macs", "params", "lightnl_blocks", "resolution", "epochs", "images_per_second", "seconds", "at_once"),
    *("commit", "gpu", "torch", "timm", "python", "date", "command", "blocks"),
)


CURVES = ("suite", "job", "seed", "epoch", "train_loss", "val_loss", "top1", "miou")  # an epoch of a job a row


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is the same for all jobs of a call."""

    data: str
    voc: str  # the folder that holds VOCdevkit, and files of weights
    folder: Path  # run folders; what a later job needs of an earlier one is found here or in `architectures`
    architectures: Path  # {key of a search: architecture}, JSON
    settings: tuple[str, ...] = ()  # on top of every job's
    at_once: int = 1
    command: str = ""


def run(job: Job, setup: Setup) -> dict[str, Any]:
    """Do the job and return its row, with the course of its training; with a search's goes what it found."""
    folder = setup.folder / folder_name(job.key)
    result = {"train": train, "search": find, "segment": segment}[job.kind](job, setup, folder)
    row = {
        "suite": job.suite,
        "job": job.name,
        "seed": job.seed,
        "resolution": job.resolution,
        "at_once": setup.at_once,
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": setup.command,
    }
    return dict.fromkeys(COLUMNS, "") | row | result


def folder_name(key: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in key)


def settings_of(job: Job, setup: Setup) -> list[str]:
    return [f"data.path={setup.data}", f"data.image_size={job.resolution}", *job.settings, *setup.settings]


def train(job: Job, setup: Setup, folder: Path) -> dict[str, Any]:
    config = load_config(RECIPE, [f"seed={job.seed}", *settings_of(job, setup)])
    held_out = config.data.selection > 0  # tuning: judged by images kept from training
    if config.loop.kernels and torch.cuda.is_available() and (reason := missing_on(torch.device("cuda"))):
        raise SystemExit(f"{job.key}: not without the kernels: {reason}")  # it would be a row of the plain path
    network = network_of(job, setup)
    result = train_classifier(network, config, folder, resume=folder.exists(), command=setup.command)
    stop_if_asked(result)
    metrics = result.metrics
    spec = resolve(network)
    ema = {"ema_top1": metrics["top1"]} if config.loop.ema else {}
    return {
        ("selection_top1" if held_out else "top1"): round(metrics["top1"], 3),
        "top5": round(metrics["top5"], 3),
        "val_loss": round(metrics["val_loss"], 4),
        **course(result.history),
        **figures(result.module, job.resolution, spec if isinstance(spec, ArchSpec) else None),
        **ema,
    }


def find(job: Job, setup: Setup, folder: Path) -> dict[str, Any]:
    """A search. Its architecture goes along in the row, for a training to find it."""
    settings = [f"seed={job.seed}", f"search.macs={budget_of(job)}", f"search.width={job.width}"]
    config = load_config(RECIPE, [*settings, *settings_of(job, setup)], SearchConfig)
    space = space_of(job, fitted=False)
    found = search(config, folder, space=space, resume=folder.exists(), command=setup.command)
    stop_if_asked(found.result)
    assert found.spec is not None
    best = found.candidates[0]
    return {
        "selection_top1": round(best.top1, 3),
        **course(found.result.history),
        "macs": best.macs,
        "lightnl_blocks": lightnl_blocks(found.spec),
        "blocks": " ".join(map(block_to_string, found.spec.blocks)),
        "architecture": spec_to_dict(found.spec),
    }


def segment(job: Job, setup: Setup, folder: Path) -> dict[str, Any]:
    """DeepLabv3 on a backbone: one with a file of weights, or the classifier that this job needs.

    Weights are not kept between sessions: where the classifier's run folder is gone, it is trained again first.
    """
    settings = [f"seed={job.seed}", f"data.path={setup.voc}", *job.settings, *setup.settings]
    config = load_config("voc", settings, SegmentConfig)
    network: Ref = job.network
    if job.needs:
        (needed,) = (other for other in SUITES[job.needs.split("/")[0]]() if other.key == job.needs)
        network = setup.folder / folder_name(job.needs)
        if not (network / FINAL_WEIGHTS).exists():
            train(needed, setup, network)
    weights = Path(setup.voc) / job.weights if job.weights else None
    result = train_segmenter(network, config, folder, resume=folder.exists(), weights=weights, command=setup.command)
    stop_if_asked(result)
    resolution = config.data.image_size
    assert resolution is not None  # the recipe has it
    return {
        "miou": round(result.metrics["miou"], 3),
        "val_loss": round(result.metrics["val_loss"], 4),
        "resolution": resolution,
        **course(result.history),
        **figures(result.module, resolution, None),
    }


def course(history: list[dict[str, Any]]) -> dict[str, Any]:
    """How the training went; the seconds are those of its epochs, without the start and the evaluations."""
    last = history[-1]
    return {
        "train_loss": round(last["train_loss"], 4),
        "epochs": last["epoch"],
        "images_per_second": last["images_per_second"],
        "seconds": round(sum(row["seconds"] for row in history), 1),
        "curve": [{key: format(row[key], ".5g") for key in CURVES if row.get(key) is not None} for row in history],
    }


def stop_if_asked(result: Any) -> None:
    if result.stopped_by:
        raise SystemExit(128 + result.stopped_by)


# -- networks --


def network_of(job: Job, setup: Setup) -> Ref:
    name, _, operator = job.network.partition("+")
    if name == "random":
        return random_network(space_of(job), budget_of(job), random.Random(job.seed))
    if name == "found":
        spec = spec_from_dict(json.loads(setup.architectures.read_text())[job.needs])
    elif operator:
        spec = resolve(name)
        assert isinstance(spec, ArchSpec)
    else:
        return name
    if operator == "none":
        return with_blocks(spec, job, lightnl=None)
    if operator == "se":
        return with_blocks(spec, job, se=0.25)
    spec = spec.with_operator(operator) if operator else spec
    return with_ratio(spec, job.ratio) if job.ratio else spec


def with_ratio(spec: ArchSpec, ratio: float) -> ArchSpec:
    places = (block.lightnl and dataclasses.replace(block.lightnl, ratio=ratio) for block in spec.blocks)
    blocks = (dataclasses.replace(block, lightnl=place) for block, place in zip(spec.blocks, places, strict=True))
    return dataclasses.replace(spec, blocks=tuple(blocks))


def with_blocks(spec: ArchSpec, job: Job, **changes: Any) -> ArchSpec:
    blocks = tuple(dataclasses.replace(block, **changes) for block in spec.blocks)
    return dataclasses.replace(spec, name=job.network, blocks=blocks)


def budget_of(job: Job) -> int:
    """MACs at the job's resolution, with as many classes as the set has."""
    spec = resolve(job.budget)
    assert isinstance(spec, ArchSpec)
    classes = space_of(job).classes
    return int(job.share * count_macs(dataclasses.replace(spec, classes=classes), (job.resolution, job.resolution)))


def space_of(job: Job, fitted: bool = True) -> Space:
    """The job's space; fitted: as wide as the job's networks (a search scales it by itself)."""
    changes = {"classes": CLASSES, "resolution": str(job.resolution)} | SPACES[job.space]
    space = dataclasses.replace(load_space("autonl"), **changes)
    return space.scaled(job.width) if fitted and job.width != 1 else space


CLASSES = 100  # of Tiny-ImageNet-100; a smoke run on fewer has budgets of its own all the same
PUBLISHED = {"operator": "lightnl"}  # the space itself has LightNL by energy
SPACES: dict[str, dict[str, Any]] = {
    "as published": PUBLISHED,
    "without LightNL": {"ratios": ()} | PUBLISHED,
    "by energy": {"operator": "lightnl_energy"},
    "location only": {"ratios": (0.25,), "strides": (1,)} | PUBLISHED,
}


def figures(module: nn.Module, resolution: int, spec: ArchSpec | None) -> dict[str, Any]:
    """MACs and parameters of the network as it was trained."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module.eval().cpu()(torch.zeros(1, 3, resolution, resolution))  # where nothing is hidden in a kernel of ours
    return {
        "macs": counter.get_total_flops() // 2,
        "params": sum(p.numel() for p in module.parameters()),
        "lightnl_blocks": lightnl_blocks(spec) if spec else "",
        "blocks": " ".join(map(block_to_string, spec.blocks)) if spec else "",
    }


def lightnl_blocks(spec: ArchSpec) -> int:
    return sum(block.lightnl is not None for block in spec.blocks)


def commit() -> str:
    """The checkout's commit; a machine that has no repository is told by AUTONL_COMMIT."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return os.environ.get("AUTONL_COMMIT") or asked.stdout.strip()

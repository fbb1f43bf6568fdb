"""A segmentation network trained in a run folder: what `autonl segment` does."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from autonl.arch.spec import ArchSpec
from autonl.data.loaders import Loaders, view_of
from autonl.data.masks import evaluation_batches, training_batches
from autonl.data.order import derive_seed, rank_batch_size
from autonl.data.pairs import open_pairs
from autonl.errors import refuse
from autonl.models import Ref, resolve, run_arguments, run_folder
from autonl.segment.config import SegmentConfig
from autonl.segment.network import Segmenter, create_backbone, name_of, take_over
from autonl.segment.pictures import draw_overlays
from autonl.segment.task import Segmentation
from autonl.train.config import replace
from autonl.train.folder import (
    IOU_FILE,
    OVERLAYS_FILE,
    describe,
    describe_data,
    run_colours,
    view_settings,
    write_description,
)
from autonl.train.loop import Result, share
from autonl.train.progress import Progress
from autonl.train.records import rows_to_csv
from autonl.train.run import Started, Where, refuse_what_does_not_run, start
from autonl.train.state import write_atomically
from autonl.weights import SEGMENTATION, run_weights


def train_segmenter(
    ref: Ref,
    config: SegmentConfig,
    folder: Path,
    *,
    resume: bool = False,
    weights: str | os.PathLike[str] | None = None,
    where: Where = Where(),
    progress: Callable[[], Progress] = Progress,
    command: str = "",
) -> Result:
    """Train DeepLabv3 on the backbone of a REF with the images and masks of `config.data.path` into a run folder.

    The backbone starts from the file of a classifier's weights, else from those of the run folder that is the REF.
    """
    with start(config, folder, resume, where, progress) as started:
        return segmented(started, ref, config, weights, command)


def segmented(
    started: Started, ref: Ref, config: SegmentConfig, weights: str | os.PathLike[str] | None, command: str
) -> Result:
    fabric, folder = started.fabric, started.folder
    if rank_batch_size(config.data.batch_size, fabric.world_size, config.loop.accumulate) < 2:
        allowed = "two images and more on a device at a time: the head takes BN statistics of one value an image"
        refuse("data.batch_size", config.data.batch_size, allowed)
    source = open_pairs(config.data)
    config = replace(config, model=run_arguments(ref) | config.model, data=run_colours(ref, config))
    torch.manual_seed(derive_seed("init", config.seed))
    backbone = create_backbone(ref, config.segment.output_stride, config.model)
    view = dataclasses.replace(view_of(backbone, config.data), interpolation="bilinear", crop_pct=1.0)
    config = replace(config, data=view_settings(view))
    module = Segmenter(backbone, len(source.classes))
    if not weights and run_folder(ref):
        weights = run_weights(ref)
    if weights:
        take_over(backbone, ref, weights, config.model)
    else:
        started.shown.say(f"{name_of(ref)}: no weights are given, the backbone starts from fresh ones")
    refuse_what_does_not_run(module, view)

    architecture = resolve(ref)
    outputs = architecture.classes if isinstance(architecture, ArchSpec) else 0  # arch.yaml stays the classifier's
    about = describe(ref, config, outputs, view.size, command) | describe_data(source)
    about |= {"task": SEGMENTATION, "weights": os.fspath(weights) if weights else None}
    started.refuse_other_run(about)
    loaders = Loaders(config.data, config.augment, view, len(source.classes), fabric.device, share(fabric), config.seed)
    task = Segmentation(len(source.classes), config)
    train = training_batches(source.train, loaders, config.segment.scale, config.loop.accumulate)
    loop = started.loop(config, module, task, train, evaluation_batches(source.validation, loaders), about)
    if fabric.is_global_zero:
        write_description(folder, about, source.classes)
    result = loop.run()
    if fabric.is_global_zero and not result.stopped_by:
        rows = [
            {"class": name, "iou": "" if math.isnan(value) else value}
            for name, value in zip(source.classes, task.iou.by_class, strict=True)
        ]
        write_atomically(folder / IOU_FILE, rows_to_csv(rows).encode())
        if config.segment.pictures:
            with fabric.autocast():
                draw_overlays(result.module, source, view, config.segment.pictures, folder / OVERLAYS_FILE)
    fabric.barrier()
    return result

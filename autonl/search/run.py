"""A search in a run folder: what `autonl search` does."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autonl.arch.codec import block_to_string, resolution_from, resolution_to_text, write_arch
from autonl.arch.macs import amount
from autonl.arch.spec import ArchSpec
from autonl.data.loaders import Loaders, view_of
from autonl.data.memory import Batch
from autonl.data.order import derive_seed
from autonl.data.sources import STREAM_PREFIXES, Source, Stream, keep_selection, open_source
from autonl.errors import AutoNLError, refuse
from autonl.models import ARCH_FILE
from autonl.search.budget import parse_budget, parse_latency
from autonl.search.compare import Candidate, Comparison
from autonl.search.config import FEW_TRIALS, SearchConfig, SearchSettings
from autonl.search.gates import Gates, from_choices, to_choices
from autonl.search.landing import land
from autonl.search.latency import TableCost
from autonl.search.pictures import draw_architecture, draw_search
from autonl.search.space import Choice, Space, load_space
from autonl.search.supernet import SuperNet
from autonl.search.task import Search
from autonl.search.trials import tried
from autonl.train.config import replace, to_dict
from autonl.train.folder import SEARCH_FILE, describe, describe_data, view_settings, write_description
from autonl.train.loop import Loop, Result, share
from autonl.train.progress import Progress
from autonl.train.run import Started, Where, images_at_once, refuse_what_does_not_train, start
from autonl.train.state import write_atomically, write_weights
from autonl.weights import BEST_WEIGHTS, FINAL_WEIGHTS

TRIALS_FOLDER = "trials"  # while they run
LEAST_SIDE = 8  # pixels that a trial sees
LEAST_REDUCED = 96  # pixels a side from which on many trials see fewer than the search
DEFAULT_BUDGET = "50%"
SELECTION = 0.1  # share of the training images that choose, where the settings name none


@dataclass(frozen=True)
class Found:
    """What a search ends with; `spec` is None where it was stopped on the way."""

    result: Result
    space: Space
    spec: ArchSpec | None = None
    budget: float | None = None
    unit: str = "macs"  # of the budget; or milliseconds
    candidates: list[Candidate] = field(default_factory=list)  # the best first
    margins: list[Tensor] = field(default_factory=list)  # (blocks, gates) at the end of every epoch
    warnings: list[str] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)  # of the candidates, where there is a table


def search(
    config: SearchConfig,
    folder: Path,
    *,
    space: Space | None = None,
    source: Source | None = None,
    resume: bool = False,
    where: Where = Where(),
    progress: Callable[[], Progress] = Progress,
    command: str = "",
) -> Found:
    """Search on the images of `config.data.path` into a run folder: arch.yaml and the weights that come with it.

    space and source, where given, stand in for those that the settings name.
    """
    with start(config, folder, resume, where, progress) as started:
        return found_by(prepare(started, config, space, source, command))


def found_by(searching: Searching) -> Found:
    result, folder = searching.loop.run(), searching.started.folder
    if result.stopped_by:
        return Found(result, searching.space)
    supernet, task, comparison = searching.supernet, searching.task, searching.comparison
    candidates = compared(searching)
    settings, say = searching.config.search, searching.started.shown.say
    if settings.trials > 1 and searching.budget is None:
        say("no trials: without a budget there are no networks of the same cost")
    elif settings.trials > 1 and searching.budget is not None:
        length = "one epoch" if settings.trial_epochs == 1 else f"{settings.trial_epochs} epochs"
        say(f"up to {settings.trials} trials of {length} at {settings.trial_resolution} px")
        candidates, stopped = tried(comparison, searching.budget, candidates, folder / TRIALS_FOLDER, say)
        if stopped:
            return Found(stopped, searching.space)
    network = comparison.network(candidates[0].choices)
    found = Found(
        result,
        searching.space,
        network.spec,
        searching.budget,
        task.unit,
        candidates,
        task.margins,
        collapse_warnings(task),
        [milliseconds(supernet, c.choices) for c in candidates] if searching.config.search.table else [],
    )
    if searching.started.fabric.is_global_zero:
        write_arch(network.spec, folder / ARCH_FILE)
        write_weights(folder / FINAL_WEIGHTS, network)  # in place of the super-network's
        (folder / BEST_WEIGHTS).unlink(missing_ok=True)
        write_atomically(folder / SEARCH_FILE, json.dumps(story(found, supernet.gates)).encode())
        draw_architecture(network.spec, folder / "arch.png")
        draw_search(
            result.history, task.margins, supernet.gates.columns, searching.budget, folder / "search.png", task.unit
        )
        shutil.rmtree(folder / TRIALS_FOLDER, ignore_errors=True)
    searching.started.fabric.barrier()
    return found


@dataclass(frozen=True)
class Searching:
    """A search that is ready to run, and what compares networks at its end."""

    config: SearchConfig
    started: Started
    space: Space
    budget: float | None
    supernet: SuperNet
    task: Search
    loop: Loop
    comparison: Comparison


def prepare(
    started: Started, config: SearchConfig, space: Space | None, source: Source | None, command: str
) -> Searching:
    fabric = started.fabric
    given, config = config.search, with_defaults(config)
    if source is None:
        refuse_stream(config.data.path)
    source = keep_selection(source, config.data) if source else open_source(config.data, config.seed)
    space = fitted_space(space or load_space(config.search.space), config, source)
    config = replace(config, model={})  # the space has it
    cost = TableCost(space, Path(config.search.table)) if config.search.table else None
    budget = budget_of(config.search, space, cost)
    if config.search.macs != given.macs and budget is not None:
        started.shown.say(f"no budget given: --macs {config.search.macs}, {amount(budget)} MACs")
    torch.manual_seed(derive_seed("init", config.seed))
    supernet = SuperNet(space, cost)
    supernet.gates.memory = config.search.memory
    if budget is not None:
        land(supernet.gates, supernet.cost, budget, 1)  # a budget that no network fits is refused now, not at the end
    config = replace(config, data={"image_size": None})  # the space's own, at which its MACs are counted
    view = view_of(supernet.network, config.data)
    config = replace(config, data=view_settings(view))
    size = trial_size(config.search, view.size)
    config = replace(config, search={"trial_resolution": resolution_to_text(size)})
    about = describe(space.spec(space.largest), config, space.classes, view.size, command) | describe_data(source)
    about |= {"space": to_dict(space), "table": fingerprint(config.search.table)}
    refuse_what_does_not_train(supernet.network, view, images_at_once(config, fabric))
    started.refuse_other_run(about)
    loaders = Loaders(config.data, config.augment, view, space.classes, fabric.device, share(fabric), config.seed)
    assert source.train is not None  # open_source gives training images
    assert source.selection is not None  # with_defaults asks for them
    assert not isinstance(source.train, Stream)  # refused above
    assert not isinstance(source.selection, Stream)
    images, chosen_by = loaders.kept(source.train), loaders.kept(source.selection)
    train, selection = loaders.training(images, config.loop.accumulate), loaders.evaluation(chosen_by)
    trial_batches = train, selection
    if size != view.size:
        smaller = loaders.sized(size)
        images, chosen_by = smaller.reduced(images), smaller.reduced(chosen_by)
        trial_batches = smaller.training(images, config.loop.accumulate), smaller.evaluation(chosen_by)

    def calibration() -> Iterable[Batch]:
        return itertools.islice(train.epoch(config.schedule.epochs), config.search.calibrate_batches)

    task = Search(supernet, config, budget, calibration)
    loop = started.loop(config, supernet, task, train, selection, about)
    if fabric.is_global_zero:  # nothing is left behind by settings that do not fit
        write_description(started.folder, about | {"architecture": None}, source.classes)
    comparison = Comparison(config, fabric, supernet, selection, trial_batches, calibration)
    return Searching(config, started, space, budget, supernet, task, loop, comparison)


def budget_of(settings: SearchSettings, space: Space, cost: TableCost | None) -> float | None:
    if settings.latency:
        return parse_latency(settings.latency, space, cost)
    return parse_budget(settings.macs, space) if settings.macs else None


def compared(searching: Searching) -> list[Candidate]:
    """Networks at the budget that the gates value most, or the one that they decide on; the best first."""
    gates, cost, settings = searching.supernet.gates, searching.supernet.cost, searching.config.search

    def ranked(found: Tensor) -> list[Candidate]:
        candidates = [searching.comparison.judge(to_choices(setting, gates.columns)) for setting in found]
        return sorted(candidates, key=lambda candidate: -candidate.top1)

    if searching.budget is None:
        return ranked(gates.decisions().cpu()[None])
    return ranked(land(gates, cost, searching.budget, settings.candidates))


@torch.no_grad()
def milliseconds(supernet: SuperNet, choices: Sequence[Choice]) -> float:
    """By the table that is the super-network's cost."""
    gates = from_choices(choices, supernet.gates.columns).to(supernet.gates.threshold)
    return float(supernet.cost(supernet.reached(gates)))


def story(found: Found, gates: Gates) -> dict[str, Any]:
    """What search.json keeps of a search: for reports, and for whoever wants to know why."""
    space = found.space
    opens = [*space.expands, *space.kernels[1:], *space.se, *space.ratios, *(space.strides[1:] if space.ratios else ())]
    return {
        "space": space.name,
        "budget": found.budget,
        "unit": found.unit,
        "warnings": found.warnings,
        # gate by gate: which choice it belongs to; margins[epoch][block][gate], open where above 0
        "gates": [name for name, span in gates.columns.items() for _ in range(span.start, span.stop)],
        "opens": opens,  # the candidate that each leads to
        "always_open": gates.always_open.tolist(),
        "margins": [[[round(value, 4) for value in row] for row in epoch.tolist()] for epoch in found.margins],
        "candidates": [
            {
                "macs": candidate.macs,
                "milliseconds": time,  # None: there is no table
                "top1": candidate.top1,
                "loss": candidate.loss if math.isfinite(candidate.loss) else None,
                "trained": candidate.trained,
                "kept": [choice.expand > 0 for choice in candidate.choices],
                "blocks": [block_to_string(block) for block in space.spec(candidate.choices).blocks],
            }
            for candidate, time in itertools.zip_longest(found.candidates, found.milliseconds)
        ],
    }


def with_defaults(config: SearchConfig) -> SearchConfig:
    """A budget where neither it nor a cost weight is given, images to choose by, no average of weights, trials."""
    settings = config.search
    share = 0.4 if settings.trials > FEW_TRIALS else 0.125
    macs = settings.macs or (DEFAULT_BUDGET if settings.cost_weight is None and settings.latency is None else None)
    return replace(
        config,
        search={"macs": macs, "trial_epochs": settings.trial_epochs or math.ceil(share * config.schedule.epochs)},
        data={"selection": config.data.selection or SELECTION},
        loop={"ema": None, "calibrate_batches": 0},
    )


def refuse_stream(path: str | None) -> None:
    if path and path.startswith(STREAM_PREFIXES):
        raise AutoNLError(
            f"{path}: is a stream, which a search cannot use: it keeps training images apart to choose by; "
            "allowed: a folder of class folders, a .tar file of one, hfds/NAME, digits"
        )


def fingerprint(path: str | None) -> str | None:
    """Of a file that is known to be readable."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


def fitted_space(space: Space, config: SearchConfig, source: Source) -> Space:
    """The space at the resolution, width, number of classes and dropout of this search."""
    settings = config.search
    resolution = settings.resolution or str(config.data.image_size or space.resolution)
    resolution_from(resolution)  # refuses what is no size
    for name in set(config.model) - {"drop_rate"}:
        refuse(f"model.{name}", config.model[name], "drop_rate alone in a search: the space says what its networks are")
    space = space.scaled(settings.width) if settings.width != 1 else space
    dropout = config.model.get("drop_rate", space.dropout)
    classes = len(source.classes) or space.classes
    return dataclasses.replace(space, classes=classes, resolution=resolution, dropout=dropout)


def trial_size(settings: SearchSettings, most: tuple[int, int]) -> tuple[int, int]:
    """What trials see, of images that the search sees with `most` pixels: by default the same, of many trials about two
    thirds a side, in multiples of 32, at which a mobile network cuts no map: 96 -> 64, 128 -> 96, 224 -> 160."""
    text = settings.trial_resolution
    if text is None:
        reduced = settings.trials > FEW_TRIALS and min(most) >= LEAST_REDUCED
        return (32 * round(most[0] / 48), 32 * round(most[1] / 48)) if reduced else most
    size = resolution_from(text, "search.trial_resolution")
    if any(side > limit or side < LEAST_SIDE for side, limit in zip(size, most, strict=True)):
        allowed = f"{LEAST_SIDE} to {resolution_to_text(most)}, the search's own resolution"
        refuse("search.trial_resolution", text, allowed)
    return size


def collapse_warnings(task: Search) -> list[str]:
    """What a person should know before trusting the result."""
    gates = task.supernet.gates
    warnings = []
    if task.warmup_end is None or not task.task_was_learned:
        warnings.append("the task was hardly learned when the gates began to act: search longer, or change the recipe")
    decisions, searched = gates.decisions().cpu(), ~gates.always_open.cpu()
    for name, span in gates.columns.items():
        for index, column in enumerate(range(span.start, span.stop)):
            values = decisions[:, column][searched[:, column]]
            if len(values) > 2 and (values.all() or not values.any()):
                state = "open" if values.all() else "closed"
                warnings.append(f"all gates of {name} ({index + 1} of {span.stop - span.start}) ended {state}")
    signs = [margins > 0 for margins in task.margins[task.warmup_epochs :]]
    if len(signs) > 2 and all(torch.equal(signs[0], later) for later in signs):
        warnings.append("no gate changed since the warm-up: the search did not react")
    return warnings

"""A search in a run folder: what `autonl search` does."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autonl.arch.codec import block_to_string, resolution_from, write_arch
from autonl.arch.macs import count_macs
from autonl.arch.spec import ArchSpec
from autonl.data.loaders import EvaluationBatches, Loaders, view_of
from autonl.data.memory import Batch
from autonl.data.order import derive_seed
from autonl.data.sources import Source, keep_selection, open_source
from autonl.errors import AutoNLError
from autonl.models import ARCH_FILE
from autonl.search.budget import TOLERANCE, land, parse_budget
from autonl.search.config import SearchConfig
from autonl.search.cost import Cost
from autonl.search.derive import derive
from autonl.search.gates import Columns, Gates, Reached, from_choices, to_choices
from autonl.search.pictures import draw_architecture, draw_search
from autonl.search.space import Choice, Space, load_space
from autonl.search.supernet import SuperNet
from autonl.search.task import Search
from autonl.train.bn import calibrate_bn
from autonl.train.config import replace
from autonl.train.loop import Fabric, Loop, Result, evaluate, launch, share
from autonl.train.progress import Progress
from autonl.train.run import (
    Where,
    describe,
    describe_data,
    find_checkpoint,
    refuse_other_run,
    view_settings,
    write_description,
)
from autonl.train.state import write_atomically, write_weights
from autonl.train.tasks import Classification
from autonl.weights import BEST_WEIGHTS, FINAL_WEIGHTS

SEARCH_FILE = "search.json"  # how the gates moved and what was compared
DEFAULT_BUDGET = "50%"
SELECTION = 0.1  # share of the training images that choose, where the settings name none


@dataclass(frozen=True)
class Candidate:
    choices: tuple[Choice, ...]
    macs: int
    top1: float  # on the selection images, with the super-network's weights
    loss: float


@dataclass(frozen=True)
class Found:
    """What a search ends with; `spec` is None where it was stopped on the way."""

    result: Result
    space: Space
    spec: ArchSpec | None = None
    budget: int | None = None
    candidates: list[Candidate] = field(default_factory=list)  # the best first
    margins: list[Tensor] = field(default_factory=list)  # (blocks, gates) at the end of every epoch
    warnings: list[str] = field(default_factory=list)


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
    searching = prepare(config, folder, space, source, resume, where, progress, command)
    result = searching.loop.run()
    if result.stopped_by:
        return Found(result, searching.space)
    supernet, task, budget = searching.supernet, searching.task, searching.budget
    settings = decided(supernet, budget, searching.config)
    candidates = [searching.judge(to_choices(setting, supernet.gates.columns)) for setting in settings]
    candidates.sort(key=lambda candidate: (-candidate.top1, candidate.loss))
    network = searching.network(candidates[0].choices)
    found = Found(result, searching.space, network.spec, budget, candidates, task.margins, collapse_warnings(task))
    if searching.fabric.is_global_zero:
        write_arch(network.spec, folder / ARCH_FILE)
        write_weights(folder / FINAL_WEIGHTS, network)  # in place of the super-network's
        (folder / BEST_WEIGHTS).unlink(missing_ok=True)
        write_atomically(folder / SEARCH_FILE, json.dumps(story(found, supernet.gates)).encode())
        draw_architecture(network.spec, folder / "arch.png")
        draw_search(result.history, task.margins, supernet.gates.columns, budget, folder / "search.png")
    searching.fabric.barrier()
    return found


@dataclass(frozen=True)
class Searching:
    """A search that is ready to run, and what judges networks at its end."""

    config: SearchConfig
    fabric: Fabric
    space: Space
    budget: int | None
    supernet: SuperNet
    task: Search
    loop: Loop
    selection: EvaluationBatches  # the images that choose
    calibration: Callable[[], Iterable[Batch]]  # training batches for BN statistics

    def network(self, choices: Sequence[Choice]) -> Any:
        """The chosen network on its own, with the super-network's weights behind BN statistics of its own."""
        network = self.fabric.to_device(derive(self.supernet, choices, f"{self.space.name}-found"))
        with self.fabric.autocast():
            calibrate_bn(network, self.calibration(), self.fabric.world_size)
        return network

    def judge(self, choices: tuple[Choice, ...]) -> Candidate:
        network = self.network(choices)
        task = Classification(self.space.classes, self.config.optim, self.config.schedule)
        metrics = evaluate(self.fabric, network, task, self.selection)
        return Candidate(choices, count_macs(network.spec), metrics["top1"], metrics["val_loss"])


def prepare(
    config: SearchConfig,
    folder: Path,
    space: Space | None,
    source: Source | None,
    resume: bool,
    where: Where,
    progress: Callable[[], Progress],
    command: str,
) -> Searching:
    fabric = launch(where.devices, where.num_nodes, config.loop.precision, where.accelerator)
    shown = progress() if fabric.is_global_zero else Progress()
    checkpoint = find_checkpoint(folder, resume, shown)
    fabric.barrier()  # all have looked before the first one writes

    config = with_defaults(config)
    source = keep_selection(source, config.data) if source else open_source(config.data, config.seed)
    space = fitted_space(space or load_space(config.search.space), config, source)
    budget = parse_budget(config.search.macs, space) if config.search.macs else None
    torch.manual_seed(derive_seed("init", config.seed))
    supernet = SuperNet(space)
    view = view_of(supernet.network, config.data)
    config = replace(config, data=view_settings(view))
    about = describe(space.spec(space.largest), config, space.classes, view.size, command) | describe_data(source)
    if checkpoint:
        refuse_other_run(folder, checkpoint["about"], about)
    if fabric.is_global_zero:
        write_description(folder, about | {"architecture": None}, source.classes)

    loaders = Loaders(config.data, config.augment, view, space.classes, fabric.device, share(fabric), config.seed)
    assert source.train is not None  # open_source gives training images
    assert source.selection is not None  # with_defaults asks for them
    train = loaders.training(source.train, config.loop.accumulate)
    selection = loaders.evaluation(source.selection)

    def calibration() -> Iterable[Batch]:
        return itertools.islice(train.epoch(config.schedule.epochs), config.search.calibrate_batches)

    task = Search(supernet, config, budget, calibration)
    loop = Loop(
        fabric,
        supernet,
        task,
        train,
        selection,
        config.loop,
        epochs=config.schedule.epochs,
        batch_size=config.data.batch_size,
        seed=config.seed,
        folder=folder,
        about=about,
        resume=checkpoint,
        progress=shown,
    )
    return Searching(config, fabric, space, budget, supernet, task, loop, selection, calibration)


def story(found: Found, gates: Gates) -> dict[str, Any]:
    """What search.json keeps of a search: for reports, and for whoever wants to know why."""
    return {
        "space": found.space.name,
        "budget": found.budget,
        "warnings": found.warnings,
        # gate by gate: which choice it belongs to; margins[epoch][block][gate], open where above 0
        "gates": [name for name, span in gates.columns.items() for _ in range(span.start, span.stop)],
        "always_open": gates.always_open.tolist(),
        "margins": [[[round(value, 4) for value in row] for row in epoch.tolist()] for epoch in found.margins],
        "candidates": [
            {
                "macs": candidate.macs,
                "top1": candidate.top1,
                "loss": candidate.loss,
                "blocks": [block_to_string(block) for block in found.space.spec(candidate.choices).blocks],
            }
            for candidate in found.candidates
        ],
    }


def with_defaults(config: SearchConfig) -> SearchConfig:
    """A budget where neither it nor a cost weight is given, images to choose by, no average of the weights."""
    settings = config.search
    macs = settings.macs or (DEFAULT_BUDGET if settings.cost_weight is None else None)
    return replace(
        config,
        search={"macs": macs},
        data={"selection": config.data.selection or SELECTION},
        loop={"ema": None, "calibrate_batches": 0},
    )


def fitted_space(space: Space, config: SearchConfig, source: Source) -> Space:
    """The space at the resolution, width and number of classes of this search."""
    settings = config.search
    resolution = settings.resolution or str(config.data.image_size or space.resolution)
    resolution_from(resolution)  # refuses what is no size
    space = space.scaled(settings.width) if settings.width != 1 else space
    return dataclasses.replace(space, classes=len(source.classes) or space.classes, resolution=resolution)


def decided(supernet: SuperNet, budget: int | None, config: SearchConfig) -> Tensor:
    """(n, blocks, gates): networks at the budget that the gates value most, or the one that they decide on."""
    gates = supernet.gates
    if budget is None:
        return gates.decisions().cpu()[None]
    return land(gates, supernet.cost, budget, config.search.candidates, derive_seed("landing", config.seed))


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


def random_network(space: Space, budget: int, rng: random.Random, tries: int = 2_000_000) -> ArchSpec:
    """A network drawn uniformly from the space, accepted within the tolerance below the budget."""
    cost, columns = Cost(space, resolution_from(space.resolution)), Columns.of(space)
    every = space.every_choice()
    settings = torch.stack([from_choices([choice] * len(space.skeleton), columns) for choice in every])
    table = cost.blocks(Reached.by(settings.double(), columns)).tolist()  # (choices, blocks)
    costs = dict(zip(every, table, strict=True))
    fixed = cost.fixed.item()
    for _ in range(tries):
        choices = space.random(rng)
        macs = fixed + sum(costs[choice][block] for block, choice in enumerate(choices))
        if (1 - TOLERANCE) * budget <= macs <= budget:
            return space.spec(choices, f"{space.name}-random")
    raise AutoNLError(f"no network of the space {space.name} was drawn within 1% below {budget / 1e6:.2f}M MACs")

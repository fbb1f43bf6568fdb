"""Trials: networks at the budget, trained from scratch for a while; later ones follow what earlier ones have shown.

The super-network tells networks at one budget badly apart, a short training tells them better, and some short trainings
together say what a gate is worth: the second half of the trials is drawn by that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from autonl.data.order import derive_seed
from autonl.search.budget import land
from autonl.search.compare import Candidate, Comparison
from autonl.search.gates import from_choices, to_choices
from autonl.train.loop import Result
from autonl.train.records import NonFiniteError
from autonl.train.state import write_atomically

BEFORE_A_MODEL = 8  # trials: of fewer nothing is concluded about single gates
A_ROUND = 4  # trials that follow one model, before the next is made
RIDGE = 20.0  # added to the squared distances of networks in gates: of about 100 that differ, a gate is worth little
STRENGTH = 2.0  # of the model's mean margin, against a logistic noise of LUCK
LUCK = 0.5


def tried(
    comparison: Comparison, budget: float, best: list[Candidate], folder: Path, say: Callable[[str], None]
) -> tuple[list[Candidate], Result | None]:
    """The candidates with those in front that were trained, the best one first; or what was asked to stop on the way.

    best  the networks that the gates value most; the first one is tried
    """
    fabric, kept = comparison.fabric, folder.with_suffix(".json")
    known: dict[str, list[float]] = json.loads(kept.read_text()) if kept.exists() else {}
    fabric.barrier()  # all have read before the first one writes
    trained: list[Candidate] = []
    lost: list[Candidate] = []
    images = 1.0
    count = comparison.config.search.trials
    for candidate in proposals(comparison, budget, best[0], trained, lost):
        index = len(trained) + len(lost) + 1
        name = hashlib.sha256(repr(candidate.choices).encode()).hexdigest()[:16]
        if name not in known:  # one that has ended is not run again when the search is resumed
            say(f"trial {index} of {count}")
            try:
                result = comparison.trial(candidate.choices, folder / name)
            except NonFiniteError as error:
                if fabric.world_size > 1:
                    raise  # the other processes may not have noticed yet
                say(f"trial {index}: {error}; it cannot win")
                lost.append(candidate)
                continue
            if result.stopped_by:
                return [], result
            known[name] = [result.metrics["top1"], result.metrics["val_images"]]
            if fabric.is_global_zero:
                write_atomically(kept, json.dumps(known).encode())
        top1, images = known[name]
        trained.append(dataclasses.replace(candidate, trained=top1))
    tried_ones = {candidate.choices for candidate in (*trained, *lost)}
    others = [candidate for candidate in best if candidate.choices not in tried_ones]
    return [*(by_trial(trained, images) if trained else []), *others, *lost], None


def proposals(
    comparison: Comparison, budget: float, favourite: Candidate, trained: list[Candidate], lost: list[Candidate]
) -> Iterator[Candidate]:
    """`search.trials` different networks: the gates' own, some drawn by the gates' margins, then, once there are enough
    results in `trained`, some drawn by what these say."""
    gates, cost = comparison.supernet.gates, comparison.supernet.cost
    count, seed = comparison.config.search.trials, comparison.config.seed
    yield favourite
    while (done := len(trained) + len(lost)) < count:
        follow = len(trained) >= max(BEFORE_A_MODEL, count // 2)
        margins = STRENGTH * worth(trained, comparison) if follow else None
        wanted = min(A_ROUND, count - done) if follow else min(count, max(BEFORE_A_MODEL, count // 2)) - done
        luck = LUCK if follow else 1.0
        drawn = land(gates, cost, budget, count + wanted, derive_seed("trials", seed, done), luck, margins)
        known = {candidate.choices for candidate in (*trained, *lost)}
        new = [choices for setting in drawn if (choices := to_choices(setting, gates.columns)) not in known]
        if not new:
            return  # a space so small that all of it has been tried
        for choices in new[:wanted]:
            yield comparison.judge(choices)


def worth(trained: list[Candidate], comparison: Comparison) -> Tensor:
    """(blocks, gates): what every gate adds to top-1 by the trials, their mean size being one.

    Ridge regression on the gates, in its dual form: there are far more gates than trials.
    """
    columns = comparison.supernet.gates.columns
    settings = torch.stack([from_choices(candidate.choices, columns) for candidate in trained]).double()
    top1 = torch.tensor([candidate.trained for candidate in trained], dtype=torch.float64)
    x = (settings - settings.mean(0)).flatten(1)  # (trials, blocks * gates)
    dual = torch.linalg.solve(x @ x.T + RIDGE * torch.eye(len(x)).double(), top1 - top1.mean())
    found = (x.T @ dual).view_as(settings[0])
    return found / found.abs().mean().clamp(min=1e-12)


def by_trial(trained: list[Candidate], images: float) -> list[Candidate]:
    """The best trial first. The first candidate, the gates' own, gives way only to a difference that so many images
    can show, one standard error: where no trial has learned anything yet, the trials choose nothing."""
    favourite, ranked = trained[0], sorted(trained, key=lambda candidate: -(candidate.trained or 0.0))
    share = (ranked[0].trained or 0.0) / 100
    error = 100 * math.sqrt(2 * share * (1 - share) / max(images, 1))
    if (ranked[0].trained or 0.0) - (favourite.trained or 0.0) <= error:
        ranked.remove(favourite)
        ranked.insert(0, favourite)
    return ranked

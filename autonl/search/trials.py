"""Trials: networks at the budget, trained from scratch for a while; of many, the later follow what the earlier showed.

The super-network tells networks at one budget badly apart; short trainings are hoped to tell them better, and many of
them together what a gate is worth. How much they know: `python -m benchmarks.fidelity`, docs/results.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from autonl.data.order import derive_seed
from autonl.search.compare import Candidate, Comparison
from autonl.search.config import FEW_TRIALS
from autonl.search.gates import Gates, from_choices, to_choices
from autonl.search.landing import land
from autonl.search.space import Choice, Space
from autonl.train.loop import Result
from autonl.train.records import NonFiniteError
from autonl.train.state import write_atomically

A_ROUND = 4  # trials that follow one regression, before the next
RIDGE = 0.5  # how large a trial's luck is, beside what networks differ by
ALIKE = 0.3  # how alike a gate's worth is in blocks of one stage, and again in all, beside what is a block's own
LUCK = 0.25  # logistic noise, where the mean gate's worth is one


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
    count, ran, started = comparison.config.search.trials, 0, time.perf_counter()
    for candidate in proposals(comparison, budget, best[0], trained, lost):
        index = len(trained) + len(lost) + 1
        name = hashlib.sha256(repr(candidate.choices).encode()).hexdigest()[:16]
        if name not in known:  # one that has ended is not run again when the search is resumed
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
            ran += 1
            left = timedelta(seconds=round((count - index) * (time.perf_counter() - started) / ran))
            right = f"{known[name][0]:.2f}% of {known[name][1]:.0f} selection images right"
            say(f"trial {index} of {count}: {right}" + (f", {left} left" if index < count else ""))
        top1, images = known[name]
        trained.append(dataclasses.replace(candidate, trained=top1))
    if (done := len(trained) + len(lost)) < count:
        say(f"{done} trials in place of {count}: the space has no more networks at the budget")
    seen = {candidate.choices for candidate in (*trained, *lost)}
    others = [candidate for candidate in best if candidate.choices not in seen]
    return [*by_trial(trained, best[0], images), *others, *lost], None


def proposals(
    comparison: Comparison, budget: float, favourite: Candidate, trained: list[Candidate], lost: list[Candidate]
) -> Iterator[Candidate]:
    """`search.trials` different networks: the gates' own, and others drawn by the gates' margins.

    Where there are more than FEW_TRIALS, a quarter is drawn by the margins and a quarter by whims, since results of
    networks that are too much alike tell little; the rest by what the results in `trained` say by then, and the last
    one is the best by that.
    """
    gates, cost = comparison.supernet.gates, comparison.supernet.cost
    count, seed = comparison.config.search.trials, comparison.config.seed
    by_gates, first = drawn_blind(count)

    def new(number: int, luck: float, margins: Tensor | None) -> list[tuple[Choice, ...]]:
        """Networks that were not tried yet; where so many draws, or so little luck, bring none: with more of it."""
        tried = {candidate.choices for candidate in (*trained, *lost)}
        drawing, many = derive_seed("trials", seed, len(tried)), len(tried) + number
        for asked, more in ((number, luck), (many, luck), (many, 1.0)):
            drawn = land(gates, cost, budget, asked, drawing, more, margins)
            found = [choices for setting in drawn if (choices := to_choices(setting, gates.columns)) not in tried]
            if found:
                return found[:number]
        return []

    yield favourite
    rounds = (by_gates, *range(by_gates + 1, first + 1), *range(first + A_ROUND, count - 1, A_ROUND), count - 1, count)
    for end in rounds:
        while (done := len(trained) + len(lost)) < end:
            if done < by_gates:
                chosen = new(end - done, 1.0, None)
            elif done < first:
                chosen = new(end - done, 1.0, whim(gates, derive_seed("whims", seed, done)))
            else:
                margins = worth(trained, gates, comparison.supernet.space)
                chosen = new(end - done, LUCK if end < count else 0.0, margins)
            if not chosen:
                break
            for choices in chosen:
                yield comparison.judge(choices)


def drawn_blind(count: int) -> tuple[int, int]:
    """Of so many trials those that the gates draw, and with them those by whims: all before results tell anything."""
    first = min(count, max(FEW_TRIALS, count // 2))
    return (first // 2 if first < count else count), first


def whim(gates: Gates, seed: int) -> Tensor:
    """(blocks, gates): a liking for some kinds of gates and a dislike of others, the same in all blocks."""
    kinds = torch.rand(gates.columns.count, generator=torch.Generator().manual_seed(seed)).logit(eps=1e-6)
    return kinds.expand_as(gates.threshold)


def worth(trained: list[Candidate], gates: Gates, space: Space) -> Tensor:
    """(blocks, gates): what every gate adds to top-1 by the trials, their mean size being one.

    Ridge regression on the gates, in its dual form: there are far more gates than trials. What a gate is worth in one
    block tells something about the same gate in others.
    """
    if len(trained) < 2:
        return torch.zeros_like(gates.threshold)
    settings = torch.stack([from_choices(candidate.choices, gates.columns) for candidate in trained]).double()
    top1 = torch.tensor([candidate.trained for candidate in trained], dtype=torch.float64)
    x = settings - settings.mean(0)  # (trials, blocks, gates)
    spread = likeness(space) @ x  # the same: each block's differences, and some of the others'
    kernel = x.flatten(1) @ spread.flatten(1).T  # (trials, trials)
    luck = RIDGE * kernel.diagonal().mean().clamp(min=1e-12)
    dual = torch.linalg.solve(kernel + luck * torch.eye(len(x)).double(), top1 - top1.mean())
    found = torch.einsum("t,tbg->bg", dual, spread)
    return found / found.abs().mean().clamp(min=1e-12)


def likeness(space: Space) -> Tensor:
    """(blocks, blocks): the covariance of a gate's worth in one block and in another, before any trial."""
    stage = torch.repeat_interleave(torch.tensor([blocks for *_, blocks in space.stages]))
    return torch.eye(len(stage)).double() + ALIKE * (stage[:, None] == stage) + ALIKE


def by_trial(trained: list[Candidate], favourite: Candidate, images: float) -> list[Candidate]:
    """The best trial first. The gates' own network gives way only to a difference that so many images can show, one
    standard error: where no trial has learned anything yet, the trials choose nothing."""
    ranked = sorted(trained, key=lambda candidate: -(candidate.trained or 0.0))
    own = [candidate for candidate in trained if candidate.choices == favourite.choices]
    if own:
        best = ranked[0].trained or 0.0
        error = math.sqrt(2 * best * (100 - best) / max(images, 1))
        if best - (own[0].trained or 0.0) <= error:
            ranked = [*own, *(candidate for candidate in ranked if candidate is not own[0])]
    return ranked

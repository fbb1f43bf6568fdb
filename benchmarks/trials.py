"""What the trials of a search gain where the truth is known: made-up worths of gates in place of trainings.

    python -m benchmarks.trials [--seeds 32] [--out benchmarks/results]

The full skeleton at 96 px and the MACs of MobileNetV2 1.0. Every gate of every block has a worth, drawn at random: a
part that is the block's own, and parts that all blocks of a stage and of the network share. A network's top-1 is the
sum, in standard deviations of networks drawn at random. A trial sees another sum, correlated with it by FIDELITY, and
luck of NOISE on top. The gates' own margins know nothing. Rows say how far the network that the trials chose is above
the mean of random ones: what the settings in search/trials.py were chosen by.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autonl.arch.macs import count_macs
from autonl.models import resolve
from autonl.search import trials
from autonl.search.compare import Candidate
from autonl.search.gates import from_choices, to_choices
from autonl.search.landing import Knapsack, land
from autonl.search.space import Choice, load_space
from autonl.search.supernet import SuperNet
from benchmarks import RESULTS, put_rows

FIDELITY, NOISE = 0.85, 0.8
STRUCTURES = {"own": (1.0, 0.0, 0.0), "shared": (0.6, 0.6, 0.5)}  # block, stage, network
SPACE = replace(load_space("autonl"), resolution="96", classes=100)
COLUMNS = ("worths", "trials", "alike", "gain", "error", "n")


class World:
    """Worths of gates, true and as trials see them."""

    def __init__(self, supernet: SuperNet, at_random: Tensor, parts: tuple[float, float, float], seed: int) -> None:
        self.columns = supernet.gates.columns
        self.generator = torch.Generator().manual_seed(seed)
        stage = torch.repeat_interleave(torch.tensor([blocks for *_, blocks in SPACE.stages]))
        self.true, other = (self.worths(at_random, stage, parts) for _ in range(2))
        seen = FIDELITY * self.true + (1 - FIDELITY**2) ** 0.5 * other
        self.seen = seen / total(at_random, seen).std()
        self.margins = 1.5 * self.normal(*self.true.shape)
        self.average = total(at_random, self.true).mean()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def worths(self, at_random: Tensor, stage: Tensor, parts: tuple[float, float, float]) -> Tensor:
        own, stages, network = parts
        gates = at_random.shape[2]
        found = own * self.normal(len(stage), gates) + network * self.normal(1, gates)
        found += stages * self.normal(len(SPACE.stages), gates)[stage]
        found[:, 0] *= 2  # to leave a block out is the largest change
        return found / total(at_random, found).std()

    def trial(self, choices: tuple[Choice, ...], folder: Path) -> Any:
        top1 = 50 + total(from_choices(choices, self.columns)[None], self.seen) + NOISE * self.normal(1)
        return SimpleNamespace(stopped_by=None, metrics={"top1": top1.item(), "val_images": 1e9})

    def gain(self, choices: tuple[Choice, ...]) -> float:
        return (total(from_choices(choices, self.columns)[None], self.true) - self.average).item()


def total(settings: Tensor, worths: Tensor) -> Tensor:
    return (settings * worths).sum((1, 2))


def random_settings(knapsack: Knapsack, columns: Any, count: int) -> Tensor:
    """Networks of the space drawn uniformly, accepted at the budget."""
    rng, found = random.Random(0), []
    while len(found) < count:
        setting = from_choices(SPACE.random(rng), columns)
        setting[:, 1:] &= setting[:, :1]
        places = (
            (knapsack.options[:, None] == setting).all(2).int().argmax(0)
        )  # an option a block; 0 where there is none
        cost = knapsack.fixed + knapsack.costs.gather(1, places[:, None]).sum().item()
        if 0.99 * knapsack.budget <= cost <= knapsack.budget:
            found.append(knapsack.options[places])
    return torch.stack(found)


def chosen(world: World, supernet: SuperNet, budget: float, count: int, seed: int) -> tuple[Choice, ...]:
    """What `search.trials.tried` ends with."""
    with torch.no_grad():
        supernet.gates.threshold.copy_(-world.margins)
    comparison: Any = SimpleNamespace(
        supernet=supernet,
        config=SimpleNamespace(search=SimpleNamespace(trials=count), seed=seed),
        fabric=SimpleNamespace(world_size=1, is_global_zero=True, barrier=lambda: None),
        judge=lambda choices: Candidate(choices, 0, 0.0, 0.0),
        trial=world.trial,
    )
    landed = land(supernet.gates, supernet.cost, budget, 1)
    best = [comparison.judge(to_choices(setting, supernet.gates.columns)) for setting in landed]
    if count < 2:
        return best[0].choices  # type: ignore[no-any-return]
    with tempfile.TemporaryDirectory() as folder:
        candidates, _ = trials.tried(comparison, budget, best, Path(folder) / "trials", lambda said: None)
    return candidates[0].choices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    supernet = SuperNet(SPACE)
    budget = count_macs(replace(resolve("mobilenetv2_100"), classes=100), (96, 96))  # type: ignore[type-var]
    knapsack = Knapsack.of(supernet.gates, supernet.cost, budget)
    at_random = random_settings(knapsack, supernet.gates.columns, 200)
    rows = []
    for worths, parts in STRUCTURES.items():
        for count, alike in ((0, trials.ALIKE), (6, trials.ALIKE), (20, trials.ALIKE), (20, 0.0)):
            trials.ALIKE, before = alike, trials.ALIKE
            worlds = [World(supernet, at_random, parts, seed) for seed in range(arguments.seeds)]
            gains = [world.gain(chosen(world, supernet, budget, count, seed)) for seed, world in enumerate(worlds)]
            trials.ALIKE = before
            error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
            figures = (worths, count, alike, round(mean(gains), 2), round(error, 2), len(gains))
            rows.append(dict(zip(COLUMNS, figures, strict=True)))
            print(rows[-1], flush=True)
    put_rows(arguments.out / "trials_simulated.csv", COLUMNS, rows)


if __name__ == "__main__":
    main()

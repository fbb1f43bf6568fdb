"""Networks drawn at random: what a search has to beat."""

from __future__ import annotations

import random

import torch

from autonl.arch.codec import resolution_from
from autonl.arch.spec import ArchSpec
from autonl.errors import AutoNLError
from autonl.search.budget import TOLERANCE
from autonl.search.cost import Cost
from autonl.search.gates import Columns, Reached, from_choices
from autonl.search.space import Space


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

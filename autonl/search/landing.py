"""The discrete landing: of all networks within 1 % below a budget, those that the gates value most.

A network's value is the sum of the margins of the gates that are open and act; its cost is a sum over its blocks too.
So this is a knapsack from which every block takes one option, and dynamic programming solves it: block by block, the
best value at every cost so far. Costs are rounded to STEPS of the budget on the way; what comes out is counted exactly.
At every rounded cost one network is kept, so that another of a little more value may be missed where that one turns out
to be outside; a budget that some network fits is not: the cheapest and the dearest of every rounded cost are looked at
too.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autonl.errors import AutoNLError
from autonl.search.budget import TOLERANCE
from autonl.search.gates import FIELDS, Columns, Gates, Reached

STEPS = 5000  # a budget; 1 % of it are 50
AT_ONCE = 16  # knapsacks


@torch.no_grad()
def land(
    gates: Gates, cost: Any, budget: float, count: int, seed: int = 0, luck: float = 0.0, margins: Tensor | None = None
) -> Tensor:
    """Up to `count` different gate settings within the tolerance below the budget, (n, blocks, gates) of booleans.

    They are the ones that the gates value most, the best of every rounded cost; the best first.

    luck     each is the best for margins of its own, with so much logistic noise on them. With 1, a gate that has no
             others inside would be open as often as when it is drawn by its margin, but for the budget.
    margins  (blocks, gates) in place of the gates' own
    """
    knapsack = Knapsack.of(gates, cost, budget)
    own = (gates.margins() if margins is None else margins).cpu().double()
    generator = torch.Generator().manual_seed(seed)
    found: dict[bytes, Tensor] = {}
    further: list[Tensor] = [] if luck else list(knapsack.best(own[None])[0])
    before = -1
    while luck and before < len(found) < count:
        before = len(found)
        noise = torch.rand((min(count, AT_ONCE), *own.shape), generator=generator).double().logit(eps=1e-9)
        for settings in knapsack.best(own + luck * noise):
            found |= {setting.numpy().tobytes(): setting for setting in settings[:1]}
            further += settings[1:]
    for setting in further:  # with luck, where there are few networks at all
        found.setdefault(setting.numpy().tobytes(), setting)
    if not found:
        raise AutoNLError(
            f"no network of the space was found within {TOLERANCE:.0%} below a budget of {budget:,.6g}; "
            "allowed: another budget, or a space with more candidates"
        )
    return torch.stack(list(found.values())[:count])


@dataclass(frozen=True)
class Knapsack:
    options: Tensor  # (K, gates) of booleans: all that a block can be, gates that do not act closed
    costs: Tensor  # (blocks, K): beyond the block's cheapest option; infinite where a block cannot be that
    fixed: float  # what the cheapest network costs
    budget: float

    @classmethod
    def of(cls, gates: Gates, cost: Any, budget: float) -> Knapsack:
        options, always_open = every_option(gates.columns), gates.always_open.cpu()
        cost = copy.deepcopy(cost).cpu()
        everywhere = options[:, None].expand(-1, len(always_open), -1).double()  # (K, blocks, gates)
        costs = cost.blocks(Reached.by(everywhere, gates.columns)).T
        left_out = always_open[:, :1] & ~options[:, 0]  # (blocks, K)
        costs = costs.masked_fill(left_out, torch.inf)
        least = costs.amin(1, keepdim=True)  # by a table of times even below zero
        return cls(options, costs - least, float(cost.fixed + least.sum()), budget)

    def best(self, margins: Tensor) -> list[Tensor]:
        """For each of the margins (n, blocks, gates): settings (m, blocks, gates) inside the tolerance, best first."""
        values = torch.einsum("kg,nbg->nbk", self.options.double(), margins)  # (n, blocks, K)
        ends = torch.stack([-self.costs, self.costs])
        step = self.budget / STEPS
        steps = (self.costs / step).round()  # (blocks, K); together they are off by half a step a block at most
        slack = len(steps) // 2 + 1
        last = int((self.budget - self.fixed) / step) + slack
        first = max(0, int((self.budget * (1 - TOLERANCE) - self.fixed) / step) - slack)
        picks, reachable = fill(torch.cat([values, ends]), steps, last)
        chosen = [  # (m, blocks) of options
            trace(picked, steps, places[places >= first])
            for picked, places in zip(picks.unbind(1), reachable, strict=True)
        ]
        return [self.inside(torch.cat([own, *chosen[-2:]]), worth) for own, worth in zip(chosen, values, strict=False)]

    def inside(self, chosen: Tensor, values: Tensor) -> Tensor:
        """Of options (m, blocks) the settings that are within the tolerance, by their value (blocks, K)."""
        exact = self.fixed + self.costs.gather(1, chosen.T).sum(0)
        chosen = chosen[(exact <= self.budget) & (exact >= (1 - TOLERANCE) * self.budget)]
        value = values.gather(1, chosen.T).sum(0)
        return self.options[chosen[value.argsort(descending=True, stable=True)]]


def every_option(columns: Columns) -> Tensor:
    """(K, gates) of booleans: every candidate of a block once."""
    sizes = {name: span.stop - span.start for name, span in columns.items()}
    rows = []
    for reached in itertools.product(*(range(sizes[name] + 1) for name in FIELDS)):
        level = dict(zip(FIELDS, reached, strict=True))
        if not level["expand"] and any(reached):  # left out: nothing inside counts
            continue
        if sizes["ratio"] and not level["ratio"] and level["stride"]:
            continue
        rows.append([index < level[name] for name in FIELDS for index in range(sizes[name])])
    return torch.tensor(rows)


def fill(values: Tensor, steps: Tensor, last: int) -> tuple[Tensor, list[Tensor]]:
    """Which option of each block belongs to the best value at a cost, and which costs can be had.

    values (n, blocks, K), steps (blocks, K) -> (blocks, n, last + 1), and n lists of costs in steps
    """
    count, blocks, _ = values.shape
    best = values.new_full((count, last + 1), -torch.inf)
    best[:, 0] = 0
    picks = torch.zeros((blocks, count, last + 1), dtype=torch.int16)
    for block in range(blocks):
        before, best = best, torch.full_like(best, -torch.inf)
        for option, cost in enumerate(steps[block].tolist()):
            if cost > last:
                continue
            value, pick = best[:, int(cost) :], picks[block, :, int(cost) :]  # views
            tried = before[:, : last + 1 - int(cost)] + values[:, block, option, None]
            pick.masked_fill_(tried > value, option)
            torch.maximum(value, tried, out=value)
    return picks, [row.isfinite().nonzero().squeeze(1) for row in best]


def trace(picks: Tensor, steps: Tensor, places: Tensor) -> Tensor:
    """Back from costs (m,) to the options (m, blocks) that make them up; picks (blocks, steps)."""
    chosen = []
    for pick, cost in zip(picks.flip(0), steps.flip(0), strict=True):
        option = pick[places].long()
        chosen.append(option)
        places = places - cost[option].long()
    return torch.stack(chosen[::-1], dim=1)

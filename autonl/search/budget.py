"""A budget of MACs or milliseconds: read, kept by dual ascent, hit exactly by a discrete landing at the end."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from torch import Tensor

from autonl.arch.macs import amount, count_macs
from autonl.errors import AutoNLError, refuse
from autonl.search.gates import Columns, Gates, Reached, from_choices
from autonl.search.space import Space

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}
TOLERANCE = 0.01  # a network may cost up to this share less than the budget, never more


def parse_budget(text: str, space: Space) -> int:
    """MACs from "300M", "1.2G", "5000000" or a share of the space's largest network, "50%"."""
    smallest, largest = (count_macs(space.spec(choices)) for choices in (space.smallest, space.largest))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG%]?)", text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        refuse("--macs", text, "MACs such as 300M, or a share of the largest network such as 50%")
    number, unit = float(match[1]), match[2].upper()
    macs = largest * number / 100 if unit == "%" else number * UNITS[unit]
    refuse_outside("--macs", text, macs, smallest, largest, space, "macs")
    return int(macs)  # once it is known not to be infinite


def parse_latency(text: str, space: Space, cost: Any) -> float:
    """Milliseconds from "12ms", "12" or a share of what the space's largest network takes, "60%"."""
    columns = Columns.of(space)
    smallest, largest = (
        cost(Reached.by(from_choices(choices, columns).double(), columns)).item()
        for choices in (space.smallest, space.largest)
    )
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|%)?", text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        refuse("--latency", text, "milliseconds such as 12ms, or a share of the largest network's such as 60%")
    milliseconds = largest * float(match[1]) / 100 if match[2] == "%" else float(match[1])
    refuse_outside("--latency", text, milliseconds, smallest, largest, space, "milliseconds")
    return float(milliseconds)


def refuse_outside(
    flag: str, text: str, value: float, smallest: float, largest: float, space: Space, unit: str
) -> None:
    if not smallest <= value <= largest:
        refuse(
            flag,
            text,
            f"{amount(smallest, unit)} to {amount(largest, unit)}, {100 * smallest / largest:.1f}% to 100%: "
            f"what the networks of the space {space.name} cost",
        )


class DualAscent:
    """lambda follows what the budget is exceeded by, excess = log E[MACs] - log budget:

        steady <- max(0, steady + rate excess),    lambda = max(0, steady + gain excess)

    The first line alone is dual ascent. Thresholds add up what lambda tells them, so it would swing far past the
    budget before it turned; the second line brakes. All on the device: no step waits for it.
    """

    def __init__(self, budget: float, rate: float, gain: float = 2.0) -> None:
        self.log_budget, self.rate, self.gain = math.log(budget), rate, gain
        self.steady = torch.zeros((), dtype=torch.float64)
        self.weight = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def update(self, log_macs: Tensor) -> None:
        excess = log_macs.double() - self.log_budget
        self.steady = (self.steady.to(excess) + self.rate * excess).clamp(min=0)
        self.weight = (self.steady + self.gain * excess).clamp(min=0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"steady": self.steady.cpu(), "weight": self.weight.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steady, self.weight = state["steady"], state["weight"]


@torch.no_grad()
def land(
    gates: Gates,
    cost: Any,
    budget: float,
    count: int,
    seed: int,
    luck: float = 0.0,
    margins: Tensor | None = None,
) -> Tensor:
    """Up to `count` different gate settings within the tolerance below the budget, (n, blocks, gates) of booleans.

    They keep what the gates value most: the largest sums of the margins of the gates that act. Many copies of
    the gates' decision are changed by one to three flips at a time, each kept when it brings the cost nearer to the
    budget or, inside the tolerance, the value up; and now and then, less and less, when it does not.

    luck: every copy has margins of its own, with so much logistic noise on them, and the settings are its best ones.
    With 1, a gate that has no others inside would be open as often as when it is drawn by its margin.
    margins: (blocks, gates) in place of the gates' own.
    """
    copies, rounds = 128, 1000
    generator = torch.Generator().manual_seed(seed)
    always_open, columns = gates.always_open.cpu(), gates.columns
    own = gates.margins() if margins is None else margins
    margins = own.cpu().double().expand(copies, *always_open.shape)  # (copies, blocks, gates)
    if luck:
        margins = margins + luck * torch.rand(margins.shape, generator=generator).double().logit(eps=1e-9)
    cost = copy.deepcopy(cost).cpu()
    settings = ((own.cpu() > 0) | always_open).expand_as(margins).clone()
    settings[0], settings[1] = always_open, True  # the smallest and the largest: budgets at the ends of the range
    scores, inside = score(settings, margins, columns, cost, budget)
    free = (~always_open).flatten().nonzero().squeeze(1)
    kept: dict[bytes, tuple[float, Tensor]] = {}
    for turn in range(rounds):
        heat = 2.0 * (1 - turn / rounds)
        tried = settings.clone().flatten(1)
        for flip in range(3):  # one flip always, a second and a third with falling probability
            where = free[torch.randint(len(free), (copies,), generator=generator)]
            wanted = torch.rand(copies, generator=generator) < 0.5**flip
            rows = torch.arange(copies)[wanted]
            tried[rows, where[wanted]] ^= True
        tried = tried.view_as(settings)
        new, new_inside = score(tried, margins, columns, cost, budget)
        chance = torch.rand(copies, generator=generator).clamp(min=1e-12).log().double() * heat
        accepted = new - scores > chance
        settings[accepted], scores[accepted], inside[accepted] = tried[accepted], new[accepted], new_inside[accepted]
        if turn >= rounds // 2 and not luck:
            collect(kept, settings, scores, inside, columns)
    if luck:  # values of different copies cannot be compared: the first ones
        collect(kept, settings, torch.zeros_like(scores), inside, columns, copies)
    best = sorted(kept.values(), key=lambda item: -item[0])[:count]
    if not best:
        raise AutoNLError(
            f"no network of the space was found within {TOLERANCE:.0%} below a budget of {budget:,.6g}; "
            "allowed: another budget, or a space with more candidates"
        )
    return torch.stack([setting for _, setting in best])


def score(settings: Tensor, margins: Tensor, columns: Columns, cost: Any, budget: float) -> tuple[Tensor, Tensor]:
    """(copies,) twice: the value of each setting, below every value there is where its cost is outside the tolerance,
    and the lower the further; and whether it is inside."""
    reached = Reached.by(settings.double(), columns)
    share = cost(reached) / budget
    outside = (share - 1).clamp(min=0) + (1 - TOLERANCE - share).clamp(min=0)
    most = margins.abs().sum((-2, -1)) + 30  # half of how far apart two values can be, and more than heat lets pass
    return value(reached, margins, columns) - 2 * most * ((outside > 0) + 10 * outside), outside == 0


def value(reached: Reached, margins: Tensor, columns: Columns) -> Tensor:
    """Sum of the margins of the gates that are open and act: those inside what is absent earn nothing."""

    def earned(candidates: Tensor, first: int, last: int) -> Tensor:
        return (candidates[..., 1:] * margins[..., first:last]).sum(-1)

    c = columns
    inside = earned(reached.expand, c.expand.start + 1, c.expand.stop) + earned(
        reached.kernel, c.kernel.start, c.kernel.stop
    )
    if c.se.stop > c.se.start:
        inside = inside + reached.squeeze * (margins[..., c.se.start] + earned(reached.se, c.se.start + 1, c.se.stop))
    if c.ratio.stop > c.ratio.start:
        compact = earned(reached.ratio, c.ratio.start + 1, c.ratio.stop)
        compact = compact + earned(reached.stride, c.stride.start, c.stride.stop)
        inside = inside + reached.nonlocal_ * (margins[..., c.ratio.start] + compact)
    return (reached.keep * (margins[..., 0] + inside)).sum(-1)


def collect(
    kept: dict[bytes, tuple[float, Tensor]],
    settings: Tensor,
    scores: Tensor,
    inside: Tensor,
    columns: Columns,
    most: int = 16,
) -> None:
    """Keep the best settings inside the budget, one of each network: gates that do not act make no difference."""
    for index in scores.topk(most).indices.tolist():
        if inside[index]:
            acting = canonical(settings[index], columns)
            kept.setdefault(acting.numpy().tobytes(), (scores[index].item(), acting))


def canonical(setting: Tensor, columns: Columns) -> Tensor:
    """The setting with every gate closed that does not act."""
    out = setting.clone()
    for _, span in columns.items():
        out[:, span] = setting[:, span].long().cumprod(1).bool()
    if columns.ratio.stop > columns.ratio.start:
        out[:, columns.stride] &= out[:, columns.ratio.start, None]
    out[:, 1:] &= out[:, :1]
    return out

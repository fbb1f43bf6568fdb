"""A budget of MACs or milliseconds: read, and kept by dual ascent. `landing` hits it exactly at the end."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from autonl.arch.macs import amount, count_macs
from autonl.errors import refuse
from autonl.search.gates import Columns, Reached, from_choices
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
    if not smallest * (1 - 1e-9) <= value <= largest * (1 + 1e-9):  # sums of milliseconds are rounded
        least = math.ceil(1000 * smallest / largest) / 10  # rounded up: what is told as allowed must be
        refuse(
            flag,
            text,
            f"{amount(smallest, unit)} to {amount(largest, unit)}, {least}% to 100%: "
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

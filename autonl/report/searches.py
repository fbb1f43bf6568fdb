"""search.json: what a search leaves behind besides the network.

space, budget, warnings
gates       the choice that each gate belongs to, and opens, the candidate that it leads to
margins     epochs x blocks x gates; above 0: open
candidates  the networks compared, the best first: macs, milliseconds where there is a table, top1, loss, blocks, and
            kept, whether each searched block was kept
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from autonl.errors import AutoNLError, shown
from autonl.report.charts import number

KINDS = {
    "expand": "block and expansion",
    "kernel": "kernel",
    "se": "SE",
    "ratio": "LightNL and its channels",
    "stride": "LightNL's positions",
}


@dataclass(frozen=True)
class Rival:
    macs: float
    top1: float
    loss: float | None  # None: not finite
    trained: float | None  # top-1 after a trial; None: not tried
    blocks: list[str]
    kept: list[bool] | None  # of the searched blocks; None: not known

    @property
    def lightnl(self) -> int:
        return sum("_nl" in block for block in self.blocks)


@dataclass(frozen=True)
class SearchRecord:
    space: str
    budget: float | None
    unit: str  # of the budget: macs, or milliseconds
    gates: list[str]
    opens: list[float] | None
    margins: list[list[list[float]]]
    rivals: list[Rival]
    warnings: list[str]
    always_open: set[tuple[int, int]]  # (block, gate)

    @property
    def searched(self) -> int:
        """The number of searched blocks; the first block of a network is none of them."""
        return len(self.margins[0]) if self.margins else 0

    @property
    def kept(self) -> list[bool]:
        """Of every searched block, whether the network found has it; empty where that is not known."""
        if not self.rivals:
            return []
        best = self.rivals[0]
        all_kept = len(best.blocks) - 1 == self.searched
        return best.kept or ([True] * self.searched if all_kept else [])

    def gate_name(self, gate: int) -> str:
        kind = self.gates[gate]
        number = gate - self.gates.index(kind)
        if self.opens is None:
            return f"{KINDS.get(kind, kind)}, step {number + 1}"
        value = f"{self.opens[gate]:g}"
        words = {
            "expand": f"{'block with ' if number == 0 else ''}expansion {value}",
            "kernel": f"kernel {value}",
            "se": f"SE {value}",
            "ratio": f"{'LightNL on ' if number == 0 else ''}{value} of the channels",
            "stride": f"LightNL's stride {value}",
        }
        return words.get(kind, f"{kind} {value}")


def search_record(text: str) -> SearchRecord:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise AutoNLError("not a JSON object")
    gates = [str(kind) for kind in content.get("gates", [])]
    opens = [drawable(value) for value in content["opens"]] if content.get("opens") else None
    margins = [[[drawable(z) for z in row] for row in epoch] for epoch in content.get("margins", [])]
    searched = len(margins[0]) if margins else 0
    if opens and len(opens) != len(gates):
        raise AutoNLError(f"opens has {len(opens)} values for {len(gates)} gates")
    for epoch in margins:
        if len(epoch) != searched or any(len(row) != len(gates) for row in epoch):
            raise AutoNLError(f"margins are not epochs x {searched} blocks x {len(gates)} gates")
    budget = content.get("budget")
    return SearchRecord(
        space=str(content.get("space", "")),
        budget=None if budget is None else drawable(budget),
        unit=str(content.get("unit", "macs")),
        gates=gates,
        opens=opens,
        margins=margins,
        rivals=[rival(entry, searched) for entry in content.get("candidates", [])],
        warnings=[str(warning) for warning in content.get("warnings", [])],
        always_open={
            (block, gate)
            for block, row in enumerate(content.get("always_open", []))
            for gate, fixed in enumerate(row)
            if fixed is True
        },
    )


def rival(entry: dict[str, Any], searched: int) -> Rival:
    blocks = [str(block) for block in entry["blocks"]]
    kept = [bool(value) for value in entry["kept"]] if entry.get("kept") else None
    if kept and (len(kept) != searched or sum(kept) != len(blocks) - 1):
        raise AutoNLError(f"a candidate keeps {sum(kept)} of {len(kept)} blocks, has {len(blocks)}")
    loss, trained = (None if entry.get(name) is None else drawable(entry[name]) for name in ("loss", "trained"))
    return Rival(drawable(entry["macs"]), drawable(entry["top1"]), loss, trained, blocks, kept)


def drawable(value: object) -> float:
    found = number(value)
    if found is None:
        raise AutoNLError(f"{shown(value)} is no number that can be shown")
    return found

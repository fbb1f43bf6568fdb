"""A table of the milliseconds of a space's candidate blocks (`autonl measure` writes it), and its sum as a cost."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from autonl.arch.codec import block_to_string, resolution_from, resolution_to_text
from autonl.arch.spec import map_sizes
from autonl.errors import AutoNLError
from autonl.search.cost import chosen
from autonl.search.gates import Columns, Reached, from_choices
from autonl.search.space import Choice, Space

SMALLEST, LARGEST = "smallest network", "largest network"


@dataclass(frozen=True)
class Row:
    """One line of the table: a block (its string, on a map of these channels and size), or a whole network."""

    space: str
    resolution: str
    runtime: str
    threads: int
    block: str
    in_chs: int
    height: int  # of the input
    width: int
    milliseconds: float  # of a block: what it adds
    operator: str = "lightnl"  # what LightNL stands for; tables had no such column when there was this one alone
    networks: str = ""  # which smallest and largest network; older tables do not tell
    classes: int = 0  # of those two


@dataclass(frozen=True)
class Place:
    """Blocks of the space that share their candidates' times."""

    in_chs: int
    height: int
    width: int
    index: int  # of the first searched block like it


def places(space: Space) -> list[Place]:
    """One for every searched block, in order."""
    spec = space.spec(space.largest)
    chs = [block.out_chs for block in spec.blocks]
    sizes = map_sizes(spec, spec.resolution)[1:]
    seen: dict[tuple[object, ...], int] = {}
    found = []
    for index, shape in enumerate(space.skeleton):
        like = (chs[index], *sizes[index], *shape)
        seen.setdefault(like, index)
        found.append(Place(chs[index], *sizes[index], index=seen[like]))
    return found


def networks_of(space: Space) -> str:
    """What tells the smallest and the largest network of a space, but for its classes: ten digits."""
    told = [
        (space.stem, space.head, space.activation, [block_to_string(block) for block in space.spec(choices).blocks])
        for choices in (space.smallest, space.largest)
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:10]


def read_rows(path: Path) -> list[Row]:
    names = [field.name for field in fields(Row)]
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise AutoNLError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise AutoNLError(f"{path}: not a table of latencies; autonl measure makes one") from None
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            whole = {name: int(line[name]) for name in ("threads", "in_chs", "height", "width")}
            text = {name: line[name] for name in ("space", "resolution", "runtime", "block")}
            text |= {name: line.get(name) or getattr(Row, name) for name in ("operator", "networks")}
            text["resolution"] = str(resolution_to_text(resolution_from(text["resolution"])))
            whole["classes"] = int(line.get("classes") or Row.classes)
            row = Row(**text, **whole, milliseconds=float(line["milliseconds"]))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):
            raise AutoNLError(f"{path}: line {number} is not {','.join(names)}; autonl measure writes it") from None
        if not math.isfinite(row.milliseconds):
            raise AutoNLError(f"{path}: line {number} has {row.milliseconds} milliseconds; measure anew")
        rows.append(row)
    return rows


def refuse_other(path: Path, rows: Sequence[Row], space: Space, runtime: str, threads: int) -> None:
    wanted = (space.name, space.operator, space.resolution, runtime, threads)
    for row in rows:
        if (row.space, row.operator, row.resolution, row.runtime, row.threads) != wanted:
            raise AutoNLError(
                f"{path}: was measured for the space {row.space} with {row.operator} at {row.resolution} on "
                f"{row.runtime} with {row.threads} thread(s), not {space.name} with {space.operator} at "
                f"{space.resolution} on {runtime} with {threads}"
            )
        if row.networks not in ("", networks_of(space)):
            raise AutoNLError(
                f"{path}: was measured for another space called {space.name}: its stem, blocks, head or activation are "
                "not the same; measure anew, into another --out"
            )
        if row.classes not in (0, space.classes):
            raise AutoNLError(
                f"{path}: was measured with a classifier for {row.classes} classes, not {space.classes}; "
                f"measure with --classes {space.classes}, into another --out"
            )


class TableCost(nn.Module):
    """Milliseconds of a network as a differentiable function of the gates: what `search.cost.Cost` is for MACs."""

    fixed: Tensor
    residual: Tensor
    compact: Tensor

    def __init__(self, space: Space, path: Path) -> None:
        super().__init__()
        rows = read_rows(path)
        if rows:
            refuse_other(path, rows, space, rows[0].runtime, rows[0].threads)
        times = {(row.in_chs, row.height, row.width, row.block): row.milliseconds for row in rows}
        networks = {row.block: row.milliseconds for row in rows if row.block in (SMALLEST, LARGEST)}
        if len(networks) < 2:
            begun = f" (space {rows[0].space}, runtime {rows[0].runtime})" if rows else ""
            raise AutoNLError(
                f"{path}: is not finished; go on with the autonl measure that began it{begun}, and --resume"
            )

        def of(place: Place, choice: Choice) -> float:
            text = block_to_string(space.block(place.index, choice))
            try:
                return times[place.in_chs, place.height, place.width, text]
            except KeyError:
                raise AutoNLError(
                    f"{path}: has no time for the block {text} on {place.in_chs}x{place.height}x{place.width}; "
                    f"it was measured for another space than {space.name} at {space.resolution}"
                ) from None

        found = places(space)
        residual = [  # (blocks, expansions, kernels, no SE and every SE)
            [
                [[of(place, Choice(e, k, s)) for s in range(len(space.se) + 1)] for k in range(len(space.kernels))]
                for e in range(1, len(space.expands) + 1)
            ]
            for place in found
        ]
        compact = [  # (blocks, ratios, strides)
            [
                [of(place, Choice(1, ratio=r, stride=s)) - of(place, Choice(1)) for s in range(len(space.strides))]
                for r in range(1, len(space.ratios) + 1)
            ]
            or [[0.0] * len(space.strides)]
            for place in found
        ]
        self.register_buffer("residual", torch.tensor(residual, dtype=torch.float64), persistent=False)
        self.register_buffer("compact", torch.tensor(compact, dtype=torch.float64), persistent=False)
        self.register_buffer("fixed", torch.zeros((), dtype=torch.float64), persistent=False)
        self.calibrate(space, networks, path)

    @torch.no_grad()
    def calibrate(self, space: Space, networks: dict[str, float], path: Path) -> None:
        """T = fixed + factor * (sum of its blocks), so that both whole networks come out as they were measured."""
        columns = Columns.of(space)
        sums = [
            float(self.blocks(Reached.by(from_choices(choices, columns).double(), columns)).sum())
            for choices in (space.smallest, space.largest)
        ]
        if not (0 < networks[SMALLEST] < networks[LARGEST] and sums[0] < sums[1]):
            raise AutoNLError(
                f"{path}: makes no sense: the smallest network takes {networks[SMALLEST]:g} ms, the blocks in it "
                f"{sums[0]:g}; the largest network {networks[LARGEST]:g}, its blocks {sums[1]:g}; measure anew"
            )
        factor = (networks[LARGEST] - networks[SMALLEST]) / (sums[1] - sums[0])
        self.residual *= factor
        self.compact *= factor
        self.fixed += networks[SMALLEST] - factor * sums[0]

    def forward(self, reached: Reached) -> Tensor:
        return self.fixed + self.blocks(reached).sum(-1)

    def blocks(self, reached: Reached) -> Tensor:
        """(blocks,): a block that is left out costs nothing, whatever its other gates say."""
        expand, kernel = chosen(reached.expand.double()), chosen(reached.kernel.double())
        squeeze = reached.squeeze.double()[..., None]
        # (..., blocks, no SE and every SE); a space without SE has the first of them alone
        se = torch.cat([1 - squeeze, squeeze * chosen(reached.se.double())], -1)[..., : self.residual.shape[-1]]
        residual = torch.einsum("...be,...bk,...bs,beks->...b", expand, kernel, se, self.residual)
        ratio, stride = chosen(reached.ratio.double()), chosen(reached.stride.double())
        compact = torch.einsum("...br,...bs,brs->...b", ratio, stride, self.compact)
        return reached.keep.double() * (residual + reached.nonlocal_.double() * compact)

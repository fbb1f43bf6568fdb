"""Milliseconds of every candidate block of a search space, measured once on a machine, for `search.latency` to add up.

A block is timed between two small convolutions, which are timed without it too:

    milliseconds of a block = T(conv, block, conv) - (T(conv, conv) at its input + T(conv, conv) at its output) / 2

LightNL is the last part of a block and independent of those before it: it is timed behind the smallest block alone.
Two whole networks of the space, the smallest and the largest, give what is left: the time of stem, head and
classifier, and the factor by which a block inside a network, where caches are cold, is slower than alone.

A machine does not keep its pace for the minutes that this takes. The smallest network is timed in turns with all
others, and what it takes then against what it took first is taken out of their times.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import nn

from autonl.arch.codec import block_to_string
from autonl.arch.spec import BlockSpec
from autonl.errors import AutoNLError
from autonl.export.timing import Run, interleaved
from autonl.latency import Shape, started
from autonl.models import build
from autonl.search.latency import LARGEST, SMALLEST, Place, Row, networks_of, places, read_rows, refuse_other
from autonl.search.space import Choice, Space

NARROW = 8  # channels of the convolutions around a block
REFERENCE = "reference"


def candidates(space: Space, index: int) -> dict[str, BlockSpec]:
    """By their strings: every expansion x kernel x SE, and the smallest of them with every LightNL."""
    choices = [
        Choice(expand, kernel, se)
        for expand in range(1, len(space.expands) + 1)
        for kernel in range(len(space.kernels))
        for se in range(len(space.se) + 1)
    ]
    choices += [
        Choice(1, ratio=ratio, stride=stride)
        for ratio in range(1, len(space.ratios) + 1)
        for stride in range(len(space.strides))
    ]
    blocks = [space.block(index, choice) for choice in choices]
    return {block_to_string(block): block for block in blocks}


# -- measuring --


def measure(
    space: Space,
    runtime: str,
    path: Path,
    *,
    threads: int = 1,
    rounds: int = 30,
    resume: bool = False,
    advance: Callable[[int, int], None] = lambda done, groups: None,
) -> list[Row]:
    """Time all candidates into a .csv file, group after group; `resume` leaves out the groups that are there."""
    if path.is_dir():
        raise AutoNLError(f"{path}: is a folder; allowed: a .csv file")
    rows = read_rows(path) if resume and path.exists() else []
    if path.exists() and not resume:
        raise AutoNLError(f"{path}: holds a table already; go on with it by --resume, or choose another --out")
    refuse_other(path, rows, space, runtime, threads)
    refuse_unwritable(path)
    networks = networks_of(space)

    def row(block: str, in_chs: int, height: int, width: int, milliseconds: float) -> Row:
        known = (space.name, space.resolution, runtime, threads, block, in_chs, height, width, milliseconds)
        return Row(*known, space.operator, networks, space.classes)

    groups = [place for index, place in enumerate(places(space)) if place.index == index]
    held = {(known.in_chs, known.height, known.width, known.block) for known in rows}
    for place in groups:
        missing = keys(space, place) - held
        if missing and keys(space, place) & held:  # a place is measured whole
            lacks = min(missing)[-1]
            raise AutoNLError(
                f"{path}: was measured for another space called {space.name}, without {lacks}; choose another --out"
            )
    size = space.spec(space.smallest).resolution
    with started({SMALLEST: whole_network(space, space.smallest)}, runtime, threads) as reference:
        if not rows:
            rows = [row(SMALLEST, 3, *size, interleaved(reference, threads, rounds)[SMALLEST].low)]
        paces = [known.milliseconds for known in rows if known.block == SMALLEST]
        if not paces:
            raise AutoNLError(f"{path}: has no line of the {SMALLEST}, which gives the pace; measure anew")
        watch = Watch(reference[SMALLEST], paces[0], threads, rounds)
        for done, place in enumerate(groups):
            advance(done, len(groups) + 1)
            if not keys(space, place) & held:
                shape = (place.in_chs, place.height, place.width)
                for text, milliseconds in time_group(space, place, runtime, watch).items():
                    rows.append(row(text, *shape, milliseconds))
                write_rows(path, rows)
        advance(len(groups), len(groups) + 1)
        if not any(known.block == LARGEST for known in rows):
            with started({LARGEST: whole_network(space, space.largest)}, runtime, threads) as runs:
                rows.append(row(LARGEST, 3, *size, watch.times(runs)[LARGEST]))
            write_rows(path, rows)
    advance(len(groups) + 1, len(groups) + 1)
    return rows


@dataclass(frozen=True)
class Watch:
    """Milliseconds at the pace that the machine had when the reference took `pace` of them.

    The lower quartile is taken: it stands for a machine that does nothing else.
    """

    reference: Run
    pace: float
    threads: int
    rounds: int

    def times(self, runs: Mapping[str, Run]) -> dict[str, float]:
        timings = interleaved({**runs, REFERENCE: self.reference}, self.threads, self.rounds)
        return {name: timings[name].low * self.pace / timings[REFERENCE].low for name in runs}


def whole_network(space: Space, choices: Sequence[Choice]) -> tuple[nn.Module, Shape]:
    spec = space.spec(choices)
    return build(spec), (3, *spec.resolution)


def keys(space: Space, place: Place) -> set[tuple[int, int, int, str]]:
    """What tells the lines of a place."""
    return {(place.in_chs, place.height, place.width, text) for text in candidates(space, place.index)}


def time_group(space: Space, place: Place, runtime: str, watch: Watch) -> dict[str, float]:
    """The candidates of one place, timed in turns."""
    blocks = candidates(space, place.index)
    stride, out_chs = next((block.stride, block.out_chs) for block in blocks.values())
    shape: Shape = (NARROW, place.height, place.width)
    behind: Shape = (NARROW, -(-place.height // stride), -(-place.width // stride))
    networks = {text: (between_convolutions(space, place.in_chs, block), shape) for text, block in blocks.items()}
    networks["in"] = (between_convolutions(space, place.in_chs, None), shape)
    networks["out"] = (between_convolutions(space, out_chs, None), behind)
    with started(networks, runtime, watch.threads) as runs:
        times = watch.times(runs)
    around = (times["in"] + times["out"]) / 2
    return {text: times[text] - around for text in blocks}


def between_convolutions(space: Space, in_chs: int, block: BlockSpec | None) -> nn.Module:
    """conv, block, conv; or the convolutions alone."""
    parts: list[nn.Module] = []
    out_chs = in_chs
    if block:
        spec = replace(space.spec(space.largest), blocks=(block,), stem_chs=in_chs, head_chs=8, classes=1)
        network: nn.Module = build(spec)
        parts, out_chs = [network.get_submodule("blocks.0.0")], block.out_chs
    return nn.Sequential(nn.Conv2d(NARROW, in_chs, 1), *parts, nn.Conv2d(out_chs, NARROW, 1)).eval()


# -- the file --


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    with beside(path) as temporary:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows([getattr(row, field.name) for field in fields(Row)] for row in rows)
        temporary.replace(path)


def refuse_unwritable(path: Path) -> None:
    """Before minutes are spent on what could not be kept."""
    with beside(path) as temporary:
        temporary.touch()


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Where to write what is then put into the file's place; nothing of it is left behind."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise AutoNLError(f"{path}: cannot be written: {error.strerror}") from None

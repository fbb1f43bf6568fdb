"""What a search may choose: a skeleton and, for each of its blocks, nested candidates from small to large."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from autonl.arch.codec import block_from_string, block_to_string, resolution_from, resolution_to_text
from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec, divisible
from autonl.errors import AutoNLError, refuse, refuse_name
from autonl.train.config import from_dict, read_yaml

SPACES = tuple(sorted(p.name.removesuffix(".yaml") for p in (resources.files(__package__) / "spaces").iterdir()))

SEARCHED_OPERATORS = ("lightnl", "lightnl_energy")  # those whose smaller candidates the super-network has as masks


@dataclass(frozen=True)
class Choice:
    """What is chosen for one block, as positions in the space's candidates.

    `expand` 0 leaves the block out; otherwise it counts from 1. `se` and `ratio` 0 mean none of it.
    """

    expand: int
    kernel: int = 0
    se: int = 0
    ratio: int = 0
    stride: int = 0


@dataclass(frozen=True)
class Space:
    """Candidates of every list are nested: each contains the one before it."""

    name: str
    first: str
    stages: tuple[tuple[int, int, int], ...]  # channels, stride of the first block, blocks
    resolution: str = "224"  # 32x32 becomes 32
    classes: int = 1000
    stem: int = 32
    head: int = 1280
    activation: str = "swish"
    bn_eps: float = 1e-3
    bn_momentum: float = 0.01
    dropout: float = 0.0
    kernels: tuple[int, ...] = (3, 5)
    expands: tuple[int, ...] = (3, 6)
    drop: bool = True
    se: tuple[float, ...] = (0.25, 0.5)  # empty: no SE
    ratios: tuple[float, ...] = (0.125, 0.25)  # empty: no LightNL
    strides: tuple[int, ...] = (2, 1)  # from the fewest positions to the most
    operator: str = "lightnl_energy"  # or lightnl, as published: where activations are bounded, as by ReLU6

    def __post_init__(self) -> None:
        for name in ("kernels", "expands", "se", "ratios"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                refuse(name, values, "candidates from small to large, each once")
        for name in ("kernels", "expands", "strides"):
            if not getattr(self, name):
                refuse(name, (), "at least one candidate")
        for more, fewer in zip(self.strides[1:], self.strides, strict=False):
            if not 0 < more < fewer or fewer % more:
                refuse("strides", self.strides, "from large to small, each a multiple of the next, such as [2, 1]")
        if any(expand < 2 for expand in self.expands):
            refuse("expands", self.expands, "expansions of 2 and more")
        if any(not ratio > 0 for ratio in self.se):
            refuse("se", self.se, "ratios above 0; a block without SE is always among the candidates")
        if self.operator not in SEARCHED_OPERATORS:
            refuse("operator", self.operator, ", ".join(SEARCHED_OPERATORS))
        if not self.stages:
            refuse("stages", (), "at least one stage")
        for stage in self.stages:
            if stage[2] < 1:
                refuse("stages", stage, "channels, stride of the first block, at least one block")
        self.spec(self.largest)  # the specs refuse what is wrong in the rest, here and in every candidate
        for choice in self.every_choice():
            if choice.expand:
                self.block(0, choice)
        object.__setattr__(self, "resolution", str(resolution_to_text(resolution_from(self.resolution))))

    # -- the blocks that are searched --

    @property
    def skeleton(self) -> list[tuple[int, int]]:
        """(channels, stride) of every searched block."""
        return [(chs, stride if i == 0 else 1) for chs, stride, depth in self.stages for i in range(depth)]

    @property
    def droppable(self) -> list[bool]:
        """Whether a block has a skip that remains when it is left out."""
        inputs = [block_from_string(self.first).out_chs, *(chs for chs, _ in self.skeleton)]
        skips = [stride == 1 and before == chs for before, (chs, stride) in zip(inputs, self.skeleton, strict=False)]
        return [self.drop and skip for skip in skips]

    @property
    def largest(self) -> tuple[Choice, ...]:
        full = Choice(len(self.expands), len(self.kernels) - 1, len(self.se), len(self.ratios), len(self.strides) - 1)
        return (full,) * len(self.skeleton)

    @property
    def smallest(self) -> tuple[Choice, ...]:
        return tuple(Choice(0 if droppable else 1) for droppable in self.droppable)

    def every_choice(self) -> list[Choice]:
        """All that one block could be."""
        sizes = (len(self.expands) + 1, len(self.kernels), len(self.se) + 1, len(self.ratios) + 1, len(self.strides))
        return [Choice(*places) for places in itertools.product(*map(range, sizes))]

    def random(self, rng: random.Random) -> tuple[Choice, ...]:
        """Every candidate of every block with the same probability."""
        return tuple(
            Choice(
                rng.randint(0 if droppable else 1, len(self.expands)),
                rng.randrange(len(self.kernels)),
                rng.randint(0, len(self.se)),
                rng.randint(0, len(self.ratios)),
                rng.randrange(len(self.strides)),
            )
            for droppable in self.droppable
        )

    # -- choices -> architecture --

    def block(self, index: int, choice: Choice) -> BlockSpec:
        chs, stride = self.skeleton[index]
        return BlockSpec(
            self.kernels[choice.kernel],
            stride,
            self.expands[choice.expand - 1],
            chs,
            self.se[choice.se - 1] if choice.se else 0.0,
            LightNLSpec(self.ratios[choice.ratio - 1], self.strides[choice.stride]) if choice.ratio else None,
        )

    def spec(self, choices: Sequence[Choice], name: str | None = None) -> ArchSpec:
        kept = [self.block(index, choice) for index, choice in enumerate(choices) if choice.expand]
        return ArchSpec(
            name=name or self.name,
            blocks=(block_from_string(self.first), *kept),
            resolution=resolution_from(self.resolution),
            classes=self.classes,
            stem_chs=self.stem,
            head_chs=self.head,
            activation=self.activation,
            bn_eps=self.bn_eps,
            bn_momentum=self.bn_momentum,
            dropout=self.dropout,
            operator=self.operator,
        )

    def scaled(self, width: float) -> Space:
        """The space with its channels times `width`, by the rule of ArchSpec.scaled."""
        first = self.spec(self.smallest).scaled(width)
        stages = tuple((divisible(chs * width), stride, depth) for chs, stride, depth in self.stages)
        return replace(
            self,
            name=first.name,
            stem=first.stem_chs,
            head=first.head_chs,
            first=block_to_string(first.blocks[0]),
            stages=stages,
        )


def load_space(name: str) -> Space:
    """A shipped space by name, or the one in a .yaml file."""
    if name in SPACES:
        return from_dict(Space, read_yaml(resources.files(__package__) / "spaces" / f"{name}.yaml"))
    if not name.endswith((".yaml", ".yml")):
        refuse_name("space (or .yaml file)", name, SPACES)
    content = read_yaml(Path(name))
    try:
        return from_dict(Space, content)
    except AutoNLError as error:
        raise AutoNLError(f"{name}: {error}") from None

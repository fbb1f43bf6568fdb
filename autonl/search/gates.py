"""Straight-through gates: hard 0 / 1 in the network, the gradient of a sigmoid for the thresholds.

Every choice of a block is a chain of nested candidates, and a gate opens the way to the next larger one:

    expand   leave the block out -> smallest expansion -> next -> ...     (the first gate keeps the block)
    kernel   smallest kernel -> next -> ...
    se       no SE -> smallest -> next -> ...
    ratio    no LightNL -> fewest channels -> more -> ...                 (the first gate is Eq. 10)
    stride   fewest positions -> more -> ...

A gate is open where its evidence exceeds its trained threshold, 1(evidence > t) (Eq. 10 and 12). For Eq. 12, "the
smaller candidate is not close enough" opens the way to the larger one: the smallest sufficient candidate is taken.
Evidence is measured, never trained: gradients reach the thresholds alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn

from autonl.search.space import Choice, Space

FIELDS = ("expand", "kernel", "se", "ratio", "stride")
MARGIN_LIMIT = 3.0  # beyond it sigmoid' is below 0.05 and a gate could not come back


@dataclass(frozen=True)
class Columns:
    """Where the gates of each choice stand in the (blocks, gates) matrix."""

    count: int
    expand: slice
    kernel: slice
    se: slice
    ratio: slice
    stride: slice

    @classmethod
    def of(cls, space: Space) -> Columns:
        sizes = [
            len(space.expands),
            len(space.kernels) - 1,
            len(space.se),
            len(space.ratios),
            len(space.strides) - 1 if space.ratios else 0,
        ]
        ends = list(itertools.accumulate(sizes))
        spans = {name: slice(end - size, end) for name, end, size in zip(FIELDS, ends, sizes, strict=True)}
        return cls(count=ends[-1], **spans)

    def items(self) -> Iterator[tuple[str, slice]]:
        return ((field, getattr(self, field)) for field in FIELDS)


class Gates(nn.Module):
    """All gates of a space as one matrix of (blocks, gates), in units of each gate's temperature tau.

    margin = (evidence - mean of its kind over the blocks) / tau - threshold. tau is 1 for evidence that is a logarithm
    and 0.1 for distances.
    """

    threshold: nn.Parameter
    evidence: Tensor
    observations: Tensor
    tau: Tensor
    always_open: Tensor

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.columns = Columns.of(space)
        self.memory = 0.98  # of the moving averages of the evidence
        self.mode = "open"  # all open; "sample": drawn by their margins; "decide": what the margins say
        self.temperature = 1.0  # the lower, the more decided are the draws
        self.generator = torch.Generator()  # on the CPU: the same draws on every device and process
        self.choices: Tensor | None = None  # gates as given, whatever the mode
        blocks = len(space.skeleton)
        self.threshold = nn.Parameter(torch.zeros(blocks, self.columns.count))
        self.register_buffer("evidence", torch.zeros(blocks, self.columns.count))
        self.register_buffer("observations", torch.zeros((), dtype=torch.long))
        tau = torch.ones(self.columns.count)
        tau[self.columns.ratio.start + 1 :] = 0.1  # compactness is judged by distances; these columns come last
        self.register_buffer("tau", tau, persistent=False)
        always_open = torch.zeros(blocks, self.columns.count, dtype=torch.bool)
        always_open[:, 0] = ~torch.tensor(space.droppable)
        self.register_buffer("always_open", always_open, persistent=False)

    # -- evidence and margins --

    @torch.no_grad()
    def observe(self, evidence: Tensor) -> None:
        """Put new evidence (blocks, gates) into the moving averages, the same on every process."""
        evidence = mean_of_processes(evidence)
        # a running mean at first, an exponential one later
        share = 1 / torch.clamp(self.observations + 1, max=1 / (1 - self.memory))
        self.evidence.lerp_(evidence.to(self.evidence.dtype), share.to(self.evidence.dtype))
        self.observations += 1

    def margins(self) -> Tensor:
        return self.advantage() - self.threshold

    def advantage(self) -> Tensor:
        """The evidence of each gate beyond the mean of its kind: what its block has more or less of it than the others.

        The mean itself drifts while weights learn (SE scales images more and more alike, for one); taken as it is,
        that drift alone would close or open all gates of a kind.
        """
        searched = (~self.always_open).to(self.evidence)
        scaled = self.evidence / self.tau
        return scaled - (scaled * searched).sum(0) / searched.sum(0).clamp(min=1)

    @torch.no_grad()
    def start(self, margin: float = 1.0) -> None:
        """One common threshold: a block's evidence beyond the others' is its head start."""
        self.threshold.fill_(-margin)
        self.clamp()

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep every margin within the limit by moving its threshold."""
        advantage = self.advantage()
        self.threshold.copy_(torch.clamp(self.threshold, advantage - MARGIN_LIMIT, advantage + MARGIN_LIMIT))

    # -- open or closed --

    def forward(self) -> Tensor:
        """(blocks, gates) of hard 0 / 1 with the straight-through gradient."""
        if self.choices is not None:
            return self.choices.to(self.threshold)
        soft = self.probabilities()
        if self.mode == "sample":  # an undecided gate is tried both ways
            draws = torch.rand(soft.shape, generator=self.generator).to(soft.device, non_blocking=True)
            hard = (draws < soft).to(soft.dtype)
        else:
            hard = (soft > 0.5).to(soft.dtype)
        return hard + soft - soft.detach()

    def probabilities(self) -> Tensor:
        """The relaxed gates, sigmoid(margin / temperature): how likely each is open when drawn."""
        if self.mode == "open":  # a gradient of zero, so that processes have something to exchange
            return torch.ones_like(self.threshold) + 0 * self.threshold
        always_open = self.always_open.clone()  # DDP of torch 2.11 writes to buffers before the backward pass
        return torch.where(always_open, 1.0, torch.sigmoid(self.margins() / self.temperature))

    def decisions(self) -> Tensor:
        """(blocks, gates) of booleans: what the margins say, without any sampling."""
        return (self.margins() > 0) | self.always_open


@dataclass(frozen=True)
class Reached:
    """Which candidates the gates reach, (..., blocks) or (..., blocks, candidates); the first one always.

    With hard gates these are 0 / 1. Candidates of what is absent (a block, SE, LightNL) are given as if it was there.
    """

    keep: Tensor
    expand: Tensor
    kernel: Tensor
    squeeze: Tensor
    se: Tensor
    nonlocal_: Tensor
    ratio: Tensor
    stride: Tensor

    @classmethod
    def by(cls, gates: Tensor, columns: Columns) -> Reached:
        def candidates(span: slice) -> Tensor:
            first = gates.new_ones((*gates.shape[:-1], 1))
            return torch.cat([first, gates[..., span].cumprod(-1)], -1)

        def present(span: slice) -> Tensor:
            return gates[..., span.start] if span.stop > span.start else gates.new_zeros(gates.shape[:-1])

        def further(span: slice) -> slice:
            return slice(span.start + 1, span.stop)

        return cls(
            keep=present(columns.expand),
            expand=candidates(further(columns.expand)),
            kernel=candidates(columns.kernel),
            squeeze=present(columns.se),
            se=candidates(further(columns.se)),
            nonlocal_=present(columns.ratio),
            ratio=candidates(further(columns.ratio)),
            stride=candidates(columns.stride),
        )


def mean_of_processes(value: Tensor) -> Tensor:
    if world_size() == 1:
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total / world_size()


def world_size() -> int:
    in_a_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if in_a_group else 1


def to_choices(gates: Tensor, columns: Columns) -> tuple[Choice, ...]:
    """Hard gates (blocks, gates) -> what they choose."""
    reached = {name: gates[:, span].long().cumprod(1).sum(1).tolist() for name, span in columns.items()}
    return tuple(
        Choice(**dict(zip(FIELDS, values, strict=True))) for values in zip(*(reached[f] for f in FIELDS), strict=True)
    )


def from_choices(choices: Sequence[Choice], columns: Columns) -> Tensor:
    """Choices -> (blocks, gates) of booleans."""
    gates = torch.zeros(len(choices), columns.count, dtype=torch.bool)
    for row, choice in zip(gates, choices, strict=True):
        for name, span in columns.items():
            row[span][: getattr(choice, name)] = True
    return gates

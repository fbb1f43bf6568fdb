"""Order and randomness of the data as pure functions of (seed, epoch, sample).

Nothing here depends on which worker or rank loads a sample, or on how many there are, so a run that was
killed inside an epoch goes on with exactly the batches it would have seen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autonl.errors import AutoNLError

# What a data set is asked for: the epoch, which seeds the augmentation, and the place in the set.
Key = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """Which part of every batch this process takes."""

    rank: int = 0
    world: int = 1


def derive_seed(purpose: str, *numbers: int) -> int:
    """A seed below 2^63 that is unrelated to that of any other purpose or numbers."""
    text = f"{purpose} {numbers}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed every generator that an image transform may draw from."""
    number = derive_seed("sample", seed, epoch, index)
    random.seed(number)
    np.random.seed(number % 2**32)
    # not torch.manual_seed, which visits every kind of accelerator
    torch.default_generator.manual_seed(number)


def permutation(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(count, generator=generator)


class TrainingOrder:
    """The batches of an epoch that this rank loads, as lists of keys; a batch sampler for a DataLoader.

    batch_size is that of an optimiser step over all ranks and accumulation rounds: which images make a step
    does not depend on how it is divided. Images that do not fill a last step are left out of the epoch.
    """

    def __init__(self, count: int, batch_size: int, seed: int, share: Share, accumulate: int = 1) -> None:
        self.count, self.seed, self.share = count, seed, share
        self.batch_size = rank_batch_size(batch_size, share.world, accumulate)
        self.batches = count // batch_size * accumulate
        if not self.batches:
            raise AutoNLError(
                f"{count} training images do not fill one batch: data.batch_size is {batch_size}; "
                f"allowed: up to {count}, by --set data.batch_size=N; --recipe few suits a few hundred images"
            )
        self.begin(0)

    def begin(self, epoch: int, first_batch: int = 0) -> None:
        """What the next iteration goes through."""
        self.epoch, self.first_batch = epoch, first_batch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[Key]]:
        for positions in self.positions():
            yield [(self.epoch, position) for position in positions.tolist()]

    def positions(self, device: torch.device | None = None) -> Iterator[Tensor]:
        """The same batches as tensors of places in the set, on the device."""
        order = permutation(self.count, self.seed, self.epoch).to(device)
        together = self.batch_size * self.share.world
        for batch in range(self.first_batch, self.batches):
            yield order[batch * together :][:together][self.share.rank :: self.share.world]


def rank_batch_size(batch_size: int, world: int, accumulate: int) -> int:
    if batch_size % (world * accumulate):
        raise AutoNLError(
            f"data.batch_size: {batch_size} cannot be divided over {world} device(s) x loop.accumulate {accumulate}; "
            "allowed: a multiple of their product"
        )
    return batch_size // (world * accumulate)


class EvaluationOrder:
    """Every image once, over all ranks together: their shares may differ by one image."""

    def __init__(self, count: int, batch_size: int, share: Share) -> None:
        self.own = range(share.rank, count, share.world)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(range(0, len(self.own), self.batch_size))

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.own), self.batch_size):
            yield [(0, position) for position in self.own[start : start + self.batch_size]]


def split_by_class(labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out) indices: a fixed split that holds out the same share of every class, at least one image.

    A class with a single image keeps it: it could not be learned otherwise.
    """
    generator = np.random.default_rng(0)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held_out[members[:count]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)

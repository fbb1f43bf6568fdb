"""Milliseconds of several networks on one machine: in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

Run = Callable[[], object]  # one image through a network
WARM_UP, BURST = 5, 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds an image."""

    median: float
    low: float  # quartiles
    high: float
    runs: int


def run_eager(network: nn.Module, image: torch.Tensor) -> None:
    with torch.no_grad():
        network(image)


def interleaved(runs: Mapping[str, Run], threads: int = 1, rounds: int = 30) -> dict[str, Timing]:
    """Every network in turn, `rounds` times: once to bring its weights back into the caches, then a few times timed.

    With one thread it is the processor's time that counts: what others do on the machine is left out.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            for _ in range(BURST):
                started = clock()
                run()
                times[name].append(1e3 * (clock() - started))
    return {name: timing_of(values) for name, values in times.items()}


def timing_of(milliseconds: list[float]) -> Timing:
    low, median, high = np.quantile(milliseconds, (0.25, 0.5, 0.75)).tolist()
    return Timing(median, low, high, len(milliseconds))

"""Settings of a search: those of a training, and the section `search`."""

from __future__ import annotations

from dataclasses import dataclass, field

from autonl.data.config import at_least, between
from autonl.errors import AutoNLError
from autonl.train.config import Config

FEW_TRIALS = 8  # up to these only the network that did best counts; more tell what single gates are worth


@dataclass(frozen=True)
class SearchSettings:
    space: str = "autonl"  # a shipped one, or a .yaml file
    resolution: str | None = None  # 128, or HEIGHTxWIDTH; default: data.image_size, else the space's own
    width: float = 1.0  # times the space's channels
    macs: str | None = None  # the budget: 300M, or a share of the largest network, 50%
    latency: str | None = None  # instead: 12ms, or a share of the largest network's time, 60%
    table: str | None = None  # of latencies, which `autonl measure` writes
    cost_weight: float | None = None  # instead of a budget: the lambda of Eq. 15
    warmup: tuple[float, float] = (0.15, 0.4)  # least and most of the search with all gates open
    learned: float = 0.85  # the warm-up ends when the loss is below this share of chance's
    travel: float = 5.0  # how far a threshold can move over the search, in temperatures of its gate
    temperature: tuple[float, float] = (1.0, 0.2)  # of drawing the gates, from the warm-up's end to the search's
    memory: float = 0.98  # of the moving averages of the evidence; 0: the last look alone
    observe_steps: int = 10  # steps between two looks at the evidence
    candidates: int = 16  # networks at the budget that are compared on the selection images
    trials: int = 6  # networks at the budget that are trained from scratch for a while; 0 or 1: none
    trial_epochs: int | None = None  # default: an eighth of the search's, of more than FEW_TRIALS two fifths
    trial_resolution: str | None = None  # default: the search's own, of more than FEW_TRIALS about two thirds of it
    calibrate_batches: int = 8  # training batches that BN statistics are taken from before a network is judged

    def __post_init__(self) -> None:
        given = [flag for flag in ("macs", "latency", "cost_weight") if getattr(self, flag) is not None]
        if len(given) > 1:
            first, second = (f"--{flag.replace('_', '-')}" for flag in given[:2])
            raise AutoNLError(f"{first} and {second} exclude each other: a budget or a fixed weight; give one")
        if self.latency is not None and self.table is None:
            raise AutoNLError("--latency needs --table FILE, the times of the space's blocks; autonl measure writes it")
        if self.table is not None and self.latency is None and self.cost_weight is None:
            raise AutoNLError("--table needs --latency, a budget in milliseconds, or --cost-weight")
        at_least("search.cost_weight", self.cost_weight, 0)
        between("search.width", self.width, 0.05, 20)
        between("search.warmup", self.warmup[0], 0, self.warmup[1])
        between("search.warmup", self.warmup[1], 0, 1)
        between("search.learned", self.learned, 0, 1)
        between("search.travel", self.travel, 0.01, 1000)
        between("search.memory", self.memory, 0, 0.9999)
        for value in self.temperature:
            between("search.temperature", value, 0.01, 100)
        at_least("search.trials", self.trials, 0)
        for name in ("observe_steps", "candidates", "calibrate_batches", "trial_epochs"):
            at_least(f"search.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class SearchConfig(Config):
    search: SearchSettings = field(default_factory=SearchSettings)

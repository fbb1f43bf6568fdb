"""Trials: which networks, what they tell, and which one is taken."""

import json
import random
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest
import torch

from autonl import AutoNLError
from autonl.search.budget import parse_budget
from autonl.search.compare import Candidate, Comparison, shortened
from autonl.search.config import SearchConfig
from autonl.search.gates import from_choices, to_choices
from autonl.search.landing import land
from autonl.search.run import trial_size, with_defaults
from autonl.search.space import Choice
from autonl.search.supernet import SuperNet
from autonl.search.trials import by_trial, tried, whim, worth
from autonl.train.config import load_config
from autonl.train.progress import Progress
from autonl.train.records import NonFiniteError
from tests.search.small import prepared, run_search
from tests.search.test_supernet import SMALL


def test_pictures_warnings_and_trials(tmp_path):
    """Of those that were trained for a while the best is taken, or the gates' own where the best is hardly better."""
    settings = ("search.learned=0.0", "search.warmup=[0.1,0.2]", "search.trials=3", "search.trial_epochs=1")
    found = run_search(tmp_path / "run", *settings, images=200, epochs=3)
    for name in ("arch.png", "search.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")
    assert "the task was hardly learned" in found.warnings[0]
    tried = [candidate for candidate in found.candidates if candidate.trained is not None]
    assert len(tried) == 3
    assert tried == found.candidates[:3]
    assert tried == by_trial(tried, tried[0], 20)
    assert found.space.spec(tried[0].choices, found.spec.name) == found.spec
    assert not (tmp_path / "run" / "trials").exists()
    story = json.loads((tmp_path / "run" / "search.json").read_text())
    assert [candidate["trained"] for candidate in story["candidates"][:3]] == [c.trained for c in tried]


@pytest.mark.parametrize(
    ("tops", "images", "order"),
    [
        # sqrt(2 * 0.4 * 0.6 / 4800) is a standard error of 1 point
        ([39.0, 40.0, 20.0], 4800, [39.0, 40.0, 20.0]),
        ([38.9, 40.0, 20.0], 4800, [40.0, 38.9, 20.0]),
        ([38.9, 40.0, 20.0], 48, [38.9, 40.0, 20.0]),
        ([10.0, 10.0, 10.0], 4800, [10.0, 10.0, 10.0]),
        ([0.0, 0.0], 4800, [0.0, 0.0]),
    ],
)
def test_a_trial_beats_the_gates_by_a_standard_error(tops, images, order):
    trained = [Candidate((Choice(index),), 0, 0.0, 0.0, trained=top1) for index, top1 in enumerate(tops)]
    assert [candidate.trained for candidate in by_trial(trained, trained[0], images)] == order
    lost = Candidate((Choice(9),), 0, 0.0, 0.0)  # nobody else has its privilege
    assert [candidate.trained for candidate in by_trial(trained, lost, images)] == sorted(tops, reverse=True)


def test_a_trial_that_diverges_cannot_win_and_no_trial_runs_twice(tmp_path, monkeypatch):
    """The search goes on without it; resumed behind its end, it does not try what it has tried."""
    trial, tried = Comparison.trial, []

    def diverge_once(self, choices, folder):
        tried.append(choices)
        if len(tried) > 1 and choices == tried[1]:
            raise NonFiniteError("the loss turned nan at step 1")
        return trial(self, choices, folder)

    monkeypatch.setattr(Comparison, "trial", diverge_once)
    settings = ("search.trials=3", "search.trial_epochs=1")
    found = run_search(tmp_path / "run", *settings, images=160, epochs=1)
    assert len(tried) == 3
    assert sum(candidate.trained is not None for candidate in found.candidates) == 2
    assert found.candidates[0].trained is not None
    assert found.candidates[-1].choices == tried[1]
    again = run_search(tmp_path / "run", *settings, images=160, epochs=1, resume=True)
    assert tried[3:] == [tried[1]]  # the one that had no result
    assert again.spec == found.spec


def additive(space):
    """A super-network, and a top-1 after a trial that is 50 and the sum of what the open gates are worth."""
    supernet = SuperNet(space)
    columns = supernet.gates.columns
    effects = torch.randn(supernet.gates.threshold.shape, generator=torch.Generator().manual_seed(1))

    def top1(choices):
        return 50 + (from_choices(choices, columns) * effects).sum().item()

    return supernet, top1


def test_trials_tell_what_a_gate_is_worth():
    """Networks that were not tried are ranked by it."""
    supernet, top1 = additive(SMALL)
    rng = random.Random(0)
    drawn = [SMALL.random(rng) for _ in range(80)]
    settings = torch.stack([from_choices(choices, supernet.gates.columns) for choices in drawn]).double()
    trained = [Candidate(choices, 0, 0.0, 0.0, trained=top1(choices)) for choices in drawn[:40]]
    found = worth(trained, supernet.gates, SMALL)
    assert found.abs().mean().item() == pytest.approx(1)
    predicted = (settings[40:] * found).sum((1, 2))
    actual = torch.tensor([top1(choices) for choices in drawn[40:]], dtype=torch.float64)
    assert torch.corrcoef(torch.stack([predicted, actual]))[0, 1] > 0.7
    assert (worth(trained[:1], supernet.gates, SMALL) == 0).all()
    assert (worth([], supernet.gates, SMALL) == 0).all()


def test_what_holds_for_a_kind_of_gate_is_learned_from_all_its_blocks():
    """Every block that is kept costs a point: also the one that all trials have kept."""
    gates, rng = SuperNet(SMALL).gates, random.Random(0)
    drawn = [choices for choices in (SMALL.random(rng) for _ in range(200)) if choices[1].expand][:40]
    trained = [Candidate(c, 0, 0.0, 0.0, trained=50.0 - sum(choice.expand > 0 for choice in c)) for c in drawn]
    keep = worth(trained, gates, SMALL)[:, 0]
    assert SMALL.droppable[1]
    assert keep[1] < 0
    assert (keep[torch.tensor(SMALL.droppable)] < 0).all()


def try_networks(folder, space, trials, share="60%", diverging=()):
    """(candidates, choices in the order of their trials, their top-1, what was said)"""
    supernet, top1 = additive(space)
    budget = parse_budget(share, space)
    tries, said = [], []

    def trial(choices, folder):
        tries.append(choices)
        if len(tries) in diverging:
            raise NonFiniteError("the loss turned nan at step 1")
        return SimpleNamespace(stopped_by=None, metrics={"top1": top1(choices), "val_images": 1e6})

    comparison = SimpleNamespace(
        supernet=supernet,
        config=SimpleNamespace(search=SimpleNamespace(trials=trials), seed=0),
        fabric=SimpleNamespace(world_size=1, is_global_zero=True, barrier=lambda: None),
        judge=lambda choices: Candidate(choices, 0, 0.0, 0.0),
        trial=trial,
    )
    landed = land(supernet.gates, supernet.cost, budget, 4)
    best = [comparison.judge(to_choices(setting, supernet.gates.columns)) for setting in landed]
    candidates, stopped = tried(comparison, budget, best, folder / "trials", said.append)
    assert stopped is None
    assert tries[0] == best[0].choices
    for choices in tries:
        assert 0.99 * budget <= supernet.macs(from_choices(choices, supernet.gates.columns).double()) <= budget
    return candidates, tries, [top1(choices) for choices in tries], said


def test_later_trials_follow_earlier_ones(tmp_path):
    candidates, tries, results, _ = try_networks(tmp_path, SMALL, 24)
    assert len(tries) == len(set(tries)) == 24
    assert mean(results[12:]) > max(results[:12])
    supernet = SuperNet(SMALL)
    known = [Candidate(c, 0, 0.0, 0.0, trained=result) for c, result in zip(tries[:23], results, strict=False)]
    valued = land(
        supernet.gates, supernet.cost, parse_budget("60%", SMALL), 24, margins=worth(known, supernet.gates, SMALL)
    )
    unseen = [choices for s in valued if (choices := to_choices(s, supernet.gates.columns)) not in tries[:23]]
    assert tries[23] == unseen[0]  # the last one is the best by what was known
    assert candidates[0].trained == max(results)
    assert all(candidate.trained is None for candidate in candidates[24:])


def test_whims_like_kinds_of_gates():
    """The same everywhere, and another one next time: networks that they lead to differ more than lucky ones do."""
    supernet = SuperNet(SMALL)
    gates, budget = supernet.gates, parse_budget("60%", SMALL)
    likings = [whim(gates, seed) for seed in range(12)]
    assert all((liking == liking[0]).all() for liking in likings)
    assert len({liking[0, 0].item() for liking in likings}) == 12
    flat = torch.zeros_like(gates.threshold)
    by_whims = torch.cat([land(gates, supernet.cost, budget, 1, seed, 1.0, w) for seed, w in enumerate(likings)])
    by_luck = land(gates, supernet.cost, budget, 12, 0, 1.0, flat)
    spread = [drawn.double().sum(1).std(0).mean() for drawn in (by_whims, by_luck)]  # of how many of a kind are open
    assert spread[0] > 1.3 * spread[1]


@pytest.mark.parametrize("diverging", [(1,), (3, 4), tuple(range(1, 13))])
def test_trials_end_whatever_diverges(tmp_path, diverging):
    candidates, tries, results, _ = try_networks(tmp_path, SMALL, 12, diverging=diverging)
    assert len(tries) == len(set(tries)) == 12
    lost = {tries[number - 1] for number in diverging}
    left = [result for choices, result in zip(tries, results, strict=True) if choices not in lost]
    assert candidates[0].trained == (max(left) if left else None)
    assert {candidate.choices for candidate in candidates[-len(lost) :]} == lost


def test_no_trial_is_left_out_where_there_are_networks(tmp_path):
    """Many of one cost, of which a landing without luck knows the best."""
    space = replace(SMALL, stages=((40, 2, 6),), kernels=(3,), se=(), ratios=())
    _, tries, _, said = try_networks(tmp_path, space, 20, share="50%")
    assert len(set(tries)) == 20
    assert "in place of" not in said[-1]


def test_a_small_space_has_few_trials_and_says_so(tmp_path):
    """Seven networks within 1 % of that budget: all are tried, none twice."""
    _, tries, _, said = try_networks(tmp_path, replace(SMALL, se=(), ratios=()), 12, share="97%")
    assert len(tries) == len(set(tries)) == 7
    assert said[-1] == "7 trials in place of 12: the space has no more networks at the budget"


@pytest.mark.parametrize(
    ("trials", "epochs", "sizes"),
    [
        (8, 4, {96: 96, 224: 224}),
        (9, 12, {32: 32, 64: 64, 95: 95, 96: 64, 128: 96, 160: 96, 192: 128, 224: 160}),
    ],
)
def test_many_trials_are_longer_and_see_fewer_pixels(trials, epochs, sizes, tmp_path):
    """As they were when they beat random networks: 12 of 30 epochs, at 64 px of 96. The run's settings say so."""
    settings = [f"search.trials={trials}", "schedule.epochs=30"]
    config = load_config("demo", settings, SearchConfig)
    assert {side: trial_size(config.search, (side, side))[1] for side in sizes} == sizes
    assert trial_size(config.search, (96, 224)) == (sizes[96], sizes[224])
    prepared(config, tmp_path / "run", 160)
    written = load_config(str(tmp_path / "run" / "config.yaml"), (), SearchConfig).search
    assert (written.trial_epochs, written.trial_resolution) == (epochs, "32")
    config = load_config("demo", [*settings, "search.trial_epochs=3"], SearchConfig)
    assert with_defaults(config).search.trial_epochs == 3


def test_trials_have_the_epochs_and_the_size_of_the_settings(tmp_path):
    said = []
    progress = type("Told", (Progress,), {"say": lambda self, message: said.append(message)})
    run = tmp_path / "run"
    settings = ("search.trials=2", "search.trial_epochs=3", "search.trial_resolution=24")
    run_search(run, *settings, images=160, epochs=1, progress=progress)
    assert "up to 2 trials of 3 epochs at 24 px" in said
    assert [line.split(":")[0] for line in said if line.startswith("trial")] == ["trial 1 of 2", "trial 2 of 2"]
    said.clear()
    run_search(tmp_path / "free", "search.trials=2", "search.cost_weight=1", images=160, epochs=1, progress=progress)
    assert "no trials: without a budget there are no networks of the same cost" in said


def test_trials_may_see_fewer_pixels_of_the_same_images(tmp_path):
    config = load_config("demo", ["search.trial_resolution=24x20"], SearchConfig)
    searching = prepared(config, tmp_path / "run", 160)
    train, selection = searching.comparison.trial_batches
    for batches in (train.epoch(0), selection):
        assert next(iter(batches))[0].shape[2:] == (24, 20)
    assert next(iter(searching.comparison.selection))[0].shape[2:] == (32, 32)
    assert train.stored.images.shape[2:] == (24, 24)  # with a low-pass filter: what is cut out later has none
    assert searching.loop.train.stored.images.shape[2:] == (32, 32)
    assert len(train) == len(searching.loop.train)
    for text, allowed in (("few", "a size such as 224"), ("7", "8 to 32"), ("33", "8 to 32"), ("32x48", "8 to 32")):
        config = load_config("demo", [f"search.trial_resolution={text}"], SearchConfig)
        with pytest.raises(AutoNLError, match=rf"search\.trial_resolution: '{text}' is not allowed; .*{allowed}"):
            prepared(config, tmp_path / text, 160)
        assert not (tmp_path / text / "run.yaml").exists()


def test_a_trial_has_the_whole_schedule_in_it():
    """By the paper's steps the rate falls as far in 7 epochs as in 350."""
    config = load_config("imagenet_mnas", [], SearchConfig)
    short = shortened(config, 7)
    whole, few = config.schedule, short.schedule
    assert few.epochs / few.decay_epochs == pytest.approx(whole.epochs / whole.decay_epochs)
    assert few.warmup_epochs == 7 / 4

"""A whole search: its budget, its reaction to the cost weight and to the task, kill and resume, several processes."""

import itertools
import json
import math
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from autonl import AutoNLError, read_arch
from autonl.arch.macs import count_macs
from autonl.data.digits import digits
from autonl.data.sources import Source
from autonl.search.budget import parse_budget
from autonl.search.chance import random_network
from autonl.search.compare import Candidate, Comparison
from autonl.search.config import SearchConfig
from autonl.search.gates import Reached, from_choices, to_choices
from autonl.search.landing import Knapsack, land
from autonl.search.run import prepare, search
from autonl.search.space import Choice, Space, load_space
from autonl.search.supernet import SuperNet
from autonl.search.task import Search
from autonl.search.trials import by_trial, tried, whim, worth
from autonl.train.config import load_config
from autonl.train.progress import Progress
from autonl.train.records import NonFiniteError
from autonl.weights import load
from tests.conftest import PROVE, prove
from tests.search.far_apart import SPACE, far_apart
from tests.search.test_supernet import SMALL
from tests.train.small import ON_CPU, in_child, kill, rows
from tests.train.test_processes import join, processes

TINY = Space(
    name="tiny",
    resolution="32",
    classes=10,
    stem=8,
    head=16,
    activation="relu6",
    bn_eps=1e-5,
    bn_momentum=0.1,
    first="k3_s1_e1_c8",
    stages=((16, 2, 2), (24, 2, 2)),
    expands=(2, 4),
)


def few_digits(images):
    """So many training images, evenly from all classes, and 200 to validate on."""
    train, validation = digits()
    kept, few = torch.arange(0, len(train), len(train) // images), torch.arange(0, len(validation), 5)
    return Source(tuple("0123456789"), train.subset(kept), validation.subset(few))


def run_search(folder, *settings, space=TINY, images=400, resume=False, source=None, epochs=2):
    settings = [
        "data.batch_size=16",
        f"schedule.epochs={epochs}",
        "schedule.warmup_epochs=0.5",
        "search.candidates=3",
        "search.trials=0",
        "search.calibrate_batches=2",
        "search.learned=1.0",
        "loop.checkpoint_steps=5",
        *settings,
    ]
    config = load_config("demo", settings, SearchConfig)
    return search(config, Path(folder), space=space, source=source or few_digits(images), resume=resume, where=ON_CPU)


# -- the images --


@pytest.mark.parametrize(("asked", "size"), [("24", (24, 24)), ("24x40", (24, 40))])
def test_images_have_the_size_that_macs_are_counted_at(asked, size, tmp_path):
    """Whatever the recipe says."""
    config = load_config("demo", [f"search.resolution={asked}", "data.image_size=64"], SearchConfig)
    searching = prepare(config, tmp_path / "run", TINY, few_digits(400), False, ON_CPU, Progress, "")
    images, _ = next(iter(searching.loop.train.epoch(0)))
    assert images.shape[2:] == searching.supernet.resolution == size
    assert searching.config.data.image_size == (24 if asked == "24" else None)  # the architecture has the rectangle


@pytest.mark.parametrize("path", ["wds/shards", "hfids/images"])
def test_a_stream_is_refused_as_one(path, tmp_path):
    config = load_config("demo", [f"data.path={path}"], SearchConfig)
    with pytest.raises(AutoNLError, match=f"{path}: is a stream, which a search cannot use"):
        search(config, tmp_path / "run", where=ON_CPU)
    assert not (tmp_path / "run").exists()


# -- the budget --


@pytest.mark.parametrize("share", [30, 45, 60, 75, 90])
@pytest.mark.parametrize("seed", range(prove(1, 3)))
def test_the_budget_is_hit_from_below(share, seed, tmp_path):
    space = load_space("digits")
    found = run_search(
        tmp_path / "run",
        f"search.macs={share}%",
        f"seed={seed}",
        space=space,
        images=prove(200, 4000),
        epochs=prove(1, 6),
    )
    largest = count_macs(space.spec(space.largest))
    macs = count_macs(found.spec)
    assert 0.99 * share / 100 * largest <= macs <= share / 100 * largest
    # the folder holds that network with its weights
    assert read_arch(tmp_path / "run" / "arch.yaml") == found.spec
    network = load(tmp_path / "run")
    assert network(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_landing_hits_every_budget_of_the_full_skeleton():
    space = load_space("autonl")
    torch.manual_seed(0)
    supernet = SuperNet(space)
    supernet.gates.observe(torch.randn_like(supernet.gates.evidence))
    for share in prove((25, 85), (20, 25, 40, 55, 70, 85, 99)):
        budget = parse_budget(f"{share}%", space)
        settings = land(supernet.gates, supernet.cost, budget, 4, seed=share)
        macs = [supernet.macs(setting.float()).item() for setting in settings]
        assert all(0.99 * budget <= m <= budget for m in macs)
        assert len({setting.numpy().tobytes() for setting in settings}) == len(settings)


@pytest.mark.parametrize("more", [0, 1])
def test_landing_finds_the_smallest_network_whatever_is_liked(more):
    """SE costs less than what costs are rounded to: a network with it stands in the place of the one without."""
    space = load_space("autonl")
    supernet = SuperNet(space)
    with torch.no_grad():
        supernet.gates.threshold[:, supernet.gates.columns.se.start] = -3.0
    budget = count_macs(space.spec(space.smallest)) + more
    (found,) = land(supernet.gates, supernet.cost, budget, 4)
    assert to_choices(found, supernet.gates.columns) == space.smallest


@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_landing_is_inside_whatever_the_margins_are(shift):
    """Also where every gate wants to be open, or closed, and at the ends of the range."""
    supernet = SuperNet(SMALL)
    torch.manual_seed(0)
    with torch.no_grad():
        supernet.gates.threshold.copy_((torch.randn_like(supernet.gates.threshold) / 2 - shift).clamp(-3, 3))
    ends = [count_macs(SMALL.spec(choices)) for choices in (SMALL.smallest, SMALL.largest)]
    for budget in (ends[0], int(0.98 * ends[1]), ends[1]):
        settings = land(supernet.gates, supernet.cost, budget, 4, seed=0)
        macs = [supernet.macs(setting.float()).item() for setting in settings]
        assert all(0.99 * budget <= m <= budget for m in macs)


def test_landing_keeps_what_the_gates_value_most():
    """All gates alike but those of LightNL, which are worth much more: the landing keeps every one of them."""
    supernet = SuperNet(SMALL)
    with torch.no_grad():
        supernet.gates.threshold[:, supernet.gates.columns.ratio.start] = -3.0
    budget = parse_budget("60%", SMALL)
    best = land(supernet.gates, supernet.cost, budget, 1, seed=0)[0]
    reached = Reached.by(best.float(), supernet.gates.columns)
    assert (reached.nonlocal_ * reached.keep).sum() == reached.keep.sum()


@pytest.mark.parametrize("share", ["45%", "70%", "95%"])
def test_landing_finds_the_most_valued_network_of_all(share):
    """Against all networks of a space that is small enough to try them."""
    space = replace(TINY, kernels=(3,), se=(0.25,), ratios=(0.25,))
    supernet, budget = SuperNet(space), parse_budget(share, space)
    torch.manual_seed(1)
    with torch.no_grad():
        supernet.gates.threshold.copy_(torch.randn_like(supernet.gates.threshold))
    options = Knapsack.of(supernet.gates, supernet.cost, budget).options
    assert len({tuple(option.tolist()) for option in options}) == len(options) == 13  # left out; 2 x no SE, SE x 3
    every = torch.tensor(list(itertools.product(range(len(options)), repeat=4)))
    settings = options[every]  # (13^4, blocks, gates)
    macs, values = supernet.macs(settings.double()), (settings * supernet.gates.margins()).sum((1, 2))
    inside = (0.99 * budget <= macs) & (macs <= budget) & (settings | ~supernet.gates.always_open).all(2).all(1)
    found = land(supernet.gates, supernet.cost, budget, 3)
    assert (found[0] * supernet.gates.margins()).sum().item() == pytest.approx(values[inside].max().item())
    assert len(found) == 3
    worths = [(setting * supernet.gates.margins()).sum().item() for setting in found]
    assert worths == sorted(worths, reverse=True)


def test_landing_takes_times_below_zero():
    """As a table of measured times may have them: here every block that is kept makes the network faster."""
    gates, cost = SuperNet(SMALL).gates, SuperNet(SMALL).cost
    cost.blocks = lambda reached: -1e3 * reached.keep * (1 + reached.nonlocal_)
    found = land(gates, cost, cost.fixed.item() - 8e3, 4)
    reached = Reached.by(found.double(), gates.columns)
    assert ((reached.keep * (1 + reached.nonlocal_)).sum(1) == 8).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10%", r"--macs: '10%' is not allowed; allowed: 102.53M to 548.59M, 18.7% to 100%"),
        ("600M", "--macs: '600M' is not allowed"),
        ("1", "--macs: '1' is not allowed"),
        ("many", "MACs such as 300M, or a share of the largest network"),
        ("-5%", "MACs such as 300M"),
        ("9" * 400, "allowed: 102.53M to 548.59M"),
        ("9" * 400 + "%", "allowed: 102.53M to 548.59M"),
    ],
)
def test_a_budget_outside_the_space_is_refused_with_the_range(text, message):
    with pytest.raises(AutoNLError, match=message):
        parse_budget(text, load_space("autonl"))


def test_budgets_as_people_write_them():
    space = load_space("autonl")
    assert parse_budget("300M", space) == 300_000_000
    assert parse_budget("0.3G", space) == 300_000_000
    assert parse_budget("300000000", space) == 300_000_000
    assert parse_budget("50%", space) == count_macs(space.spec(space.largest)) // 2


def test_the_small_space_is_fine_enough():
    """From 25 % to 100 % of its largest network there is a network in every percent."""
    space = load_space("digits")
    largest, smallest = (count_macs(space.spec(choices)) for choices in (space.largest, space.smallest))
    assert smallest <= 0.25 * largest
    supernet = SuperNet(space)
    for percent in prove((30, 50, 80), range(26, 101)):
        budget = largest * percent // 100
        macs = supernet.macs(land(supernet.gates, supernet.cost, budget, 1, seed=percent)[0].float()).item()
        assert budget - 0.01 * largest < macs <= budget


def test_random_networks_cost_the_budget():
    space = load_space("digits")
    budget = parse_budget("50%", space)
    drawn = [random_network(space, budget, random.Random(seed)) for seed in range(3)]
    assert all(0.99 * budget <= count_macs(spec) <= budget for spec in drawn)
    assert len({spec.blocks for spec in drawn}) == 3


def test_dual_ascent_takes_one_step_an_optimiser_step():
    """Whatever the number of rounds of forward and backward in it."""
    steady = []
    for rounds in (1, 3):
        task = task_of(load_config("demo", ["search.warmup=[0,0]", "search.observe_steps=1000"], SearchConfig), 200_000)
        for step in (1, 2):
            for _ in range(rounds):
                task.step(task.supernet, some_digits(), step)
            task.after_step(task.supernet, step)
        steady.append(task.dual.steady.item())
    assert steady[0] == steady[1] > 0


def task_of(config, budget=None):
    supernet = SuperNet(TINY)
    task = Search(supernet, config, budget, list)
    task.tunings(supernet, 10)
    return task


def some_digits():
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


# -- the cost weight --


def test_the_cost_weight_decides_how_much_is_kept(tmp_path):
    """A very large one ends at the smallest network; with none no threshold sees the cost."""
    settings = ("search.travel=8", "search.warmup=[0.1,0.1]")
    found = {
        weight: run_search(tmp_path / str(weight), f"search.cost_weight={weight}", *settings, epochs=4).spec
        for weight in (0, 1, 1000)
    }
    assert found[1000].blocks == TINY.spec(TINY.smallest).blocks
    assert count_macs(found[0]) > count_macs(found[1]) >= count_macs(found[1000])


@pytest.mark.parametrize("weight", [0, 0.001])
def test_no_cost_gradient_with_weight_zero(weight):
    config = load_config("demo", [f"search.cost_weight={weight}"], SearchConfig)
    task = task_of(config)
    task.warmup_end = 0
    taken = task.step(task.supernet, some_digits(), 1)
    gradients = {
        name: torch.autograd.grad(taken[name], task.supernet.gates.threshold, retain_graph=True)[0]
        for name in ("task_loss", "loss")
    }
    assert gradients["task_loss"].any()
    assert torch.equal(gradients["loss"], gradients["task_loss"]) == (weight == 0)


# -- the task --


def far_apart_accuracy(folder, space, source, seed, *settings):
    """(top-1 of the network found, its LightNL blocks)."""
    settings = ["search.macs=1220000", "search.learned=0.85", "optim.label_smoothing=0", *settings]
    settings += ["augment.scale=[1,1]", "augment.ratio=[1,1]", "data.evaluation_batch_size=500", f"seed={seed}"]
    spec = run_search(folder, *settings, space=space, source=source, epochs=3).spec
    assert 0.99 * 1_220_000 <= count_macs(spec) <= 1_220_000
    return accuracy(load(folder), source.validation), sum(block.lightnl is not None for block in spec.blocks)


def test_it_keeps_lightnl_where_only_long_range_helps(tmp_path):
    """The far-apart test, small: see far_apart.py."""
    settings = ("data.batch_size=16", "optim.lr=0.03", "schedule.warmup_epochs=0.2")
    top1, kept = far_apart_accuracy(tmp_path / "run", SPACE, far_apart(2_500, 500), 0, *settings)
    assert kept >= 1
    assert top1 > 90


@pytest.mark.skipif(not PROVE, reason="six searches on 20,000 pairs: make prove")
def test_it_beats_the_search_without_lightnl(tmp_path):
    """At the same MACs, by more than two standard errors; without LightNL nothing beats chance."""
    source = far_apart()
    settings = ("data.batch_size=64", "optim.lr=0.05", "search.trials=6")
    spaces = {"with": SPACE, "without": replace(SPACE, ratios=())}
    found = {
        name: [far_apart_accuracy(tmp_path / f"{name}{seed}", space, source, seed, *settings) for seed in range(3)]
        for name, space in spaces.items()
    }
    print(found)
    top1 = {name: [accuracy for accuracy, _ in runs] for name, runs in found.items()}
    difference = mean(top1["with"]) - mean(top1["without"])
    assert difference > 2 * math.hypot(*(standard_error(values) for values in top1.values()))
    assert mean(top1["without"]) < 55
    assert all(kept >= 1 for _, kept in found["with"])


@torch.no_grad()
def accuracy(network, stored):
    """In percent, with the embedded set's normalisation of the recipe's view."""
    mean, std = (torch.tensor(network.default_cfg[name]).view(-1, 1, 1) for name in ("mean", "std"))
    logits = network((stored.images / 255 - mean) / std)
    return 100 * (logits.argmax(1) == stored.labels).float().mean().item()


def mean(values):
    return sum(values) / len(values)


def standard_error(values):
    spread = sum((value - mean(values)) ** 2 for value in values)
    return math.sqrt(spread / max(1, len(values) - 1) / len(values))


# -- kill, resume, several processes --


def assert_same_search(folder, reference):
    assert (folder / "arch.yaml").read_text() == (reference / "arch.yaml").read_text()
    assert rows(folder) == rows(reference)
    assert (folder / "result.json").read_text() == (reference / "result.json").read_text()
    weights, expected = load_file(folder / "final.safetensors"), load_file(reference / "final.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


def resume_search(folder):
    run_search(folder, resume=True)


def test_killed_and_resumed_ends_the_same(tmp_path):
    started = time.perf_counter()
    run_search(tmp_path / "unbroken")
    seconds = time.perf_counter() - started
    moments = random.Random(0)
    for _ in range(prove(2, 12)):
        process = in_child(resume_search, tmp_path / "killed")
        time.sleep(moments.uniform(0.1, 0.9) * seconds)
        kill(process)
    process = in_child(resume_search, tmp_path / "killed")
    process.join()
    assert process.exitcode == 0
    assert_same_search(tmp_path / "killed", tmp_path / "unbroken")


def test_resumed_behind_its_last_epoch_ends_the_same(tmp_path):
    settings = ("search.cost_weight=1", "search.warmup=[0,0.1]", "search.travel=20")
    run_search(tmp_path / "run", *settings, images=160, epochs=1)
    shutil.copytree(tmp_path / "run", tmp_path / "ended")
    run_search(tmp_path / "run", *settings, images=160, epochs=1, resume=True)
    assert_same_search(tmp_path / "run", tmp_path / "ended")
    # the same largest network, and yet another space
    other = replace(TINY, ratios=(0.25,))
    with pytest.raises(AutoNLError, match=r"started with space.ratios = \[0.125, 0.25\], this command has \[0.25\]"):
        run_search(tmp_path / "run", *settings, images=160, epochs=1, resume=True, space=other)


def search_and_note(folder, notes):
    found = run_search(folder)
    torch.save({"margins": found.margins, "spec": str(found.spec)}, f"{notes}{os.environ['RANK']}.pt")


def test_two_processes_have_the_same_gates(tmp_path):
    join(processes(2, search_and_note, tmp_path / "run", tmp_path / "rank"))
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["spec"] == second["spec"]
    assert len(first["margins"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(first["margins"], second["margins"], strict=True))


def warm_up_and_note(notes):
    torch.distributed.init_process_group("gloo")
    rank = os.environ["RANK"]
    task, losses = task_of(SearchConfig()), []
    for step in range(2):
        torch.manual_seed(int(rank) + step)
        losses.append(task.step(task.supernet, some_digits(), step)["task_loss"].detach())
    torch.save({"losses": losses, "smoothed": task.state_dict()["smoothed"]}, f"{notes}{rank}.pt")


def test_processes_agree_on_how_well_the_task_is_learned(tmp_path):
    """A checkpoint holds the first one's, from which all go on."""
    join(processes(2, warm_up_and_note, tmp_path / "rank"))
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["losses"] != second["losses"]
    expected = torch.tensor(math.log(10))
    for one, other in zip(first["losses"], second["losses"], strict=True):
        expected = expected.lerp((one + other) / 2, 0.02)
    assert first["smoothed"] == second["smoothed"]
    assert first["smoothed"].item() == pytest.approx(expected.item(), abs=1e-6)


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
    landed = land(supernet.gates, supernet.cost, budget, 4, seed=0)
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


def test_trials_may_see_fewer_pixels_of_the_same_images(tmp_path):
    config = load_config("demo", ["search.trial_resolution=24x20"], SearchConfig)
    searching = prepare(config, tmp_path / "run", TINY, few_digits(160), False, ON_CPU, Progress, "")
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
            prepare(config, tmp_path / text, TINY, few_digits(160), False, ON_CPU, Progress, "")
        assert not (tmp_path / text / "run.yaml").exists()


def test_the_memory_of_the_evidence_is_a_setting(tmp_path):
    config = load_config("demo", ["search.memory=0"], SearchConfig)
    searching = prepare(config, tmp_path / "run", TINY, few_digits(160), False, ON_CPU, Progress, "")
    assert searching.supernet.gates.memory == 0


@pytest.mark.parametrize("share", ["100%", "99.5%"])
def test_a_landing_without_any_preference_finds_the_end_of_the_space(share):
    supernet = SuperNet(SMALL)  # all margins zero
    budget = parse_budget(share, SMALL)
    macs = supernet.macs(land(supernet.gates, supernet.cost, budget, 4, seed=0).double())
    assert ((0.99 * budget <= macs) & (macs <= budget)).all()


def test_lucky_landings_differ_and_follow_the_margins():
    """What the gates value is drawn more often; what they do not, now and then."""
    supernet = SuperNet(SMALL)
    columns = supernet.gates.columns
    budget = parse_budget("60%", SMALL)
    shares = []
    for margin in (3.0, -3.0):
        with torch.no_grad():
            supernet.gates.threshold[:, columns.ratio.start] = -margin
        drawn = land(supernet.gates, supernet.cost, budget, 40, seed=0, luck=1.0)
        assert len(drawn) == 40
        macs = supernet.macs(drawn.double())
        assert ((0.99 * budget <= macs) & (macs <= budget)).all()
        reached = Reached.by(drawn.double(), columns)
        shares.append(reached.nonlocal_[reached.keep.bool()].mean().item())
    assert shares[0] > shares[1] + 0.3
    assert shares[1] > 0
    assert shares[0] < 1

"""A whole search: its budget, its reaction to the cost weight and to the task, kill and resume, several processes."""

import math
import os
import random
import re
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from autonl import AutoNLError, read_arch
from autonl.arch.macs import count_macs
from autonl.models import build
from autonl.search.budget import parse_budget
from autonl.search.chance import random_network
from autonl.search.config import SearchConfig
from autonl.search.landing import land
from autonl.search.run import search
from autonl.search.space import Space, load_space
from autonl.search.supernet import SuperNet
from autonl.search.task import Search
from autonl.train.config import load_config
from autonl.weights import load
from tests.conftest import PROVE, prove
from tests.search.far_apart import SPACE, far_apart
from tests.search.small import TINY, prepared, run_search
from tests.train.small import ON_CPU, die_at, held_by_another, in_child, rows
from tests.train.test_processes import join, processes

# -- the images --


@pytest.mark.parametrize(("asked", "size"), [("24", (24, 24)), ("24x40", (24, 40))])
def test_images_have_the_size_that_macs_are_counted_at(asked, size, tmp_path):
    """Whatever the recipe says."""
    config = load_config("demo", [f"search.resolution={asked}", "data.image_size=64"], SearchConfig)
    searching = prepared(config, tmp_path / "run", 400)
    images, _ = next(iter(searching.loop.train.epoch(0)))
    assert images.shape[2:] == searching.supernet.resolution == size
    assert searching.config.data.image_size == (24 if asked == "24" else None)  # the architecture has the rectangle


def test_bn_over_a_single_value_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(AutoNLError, match=r"data.batch_size: the network cannot be trained on 1 image of 8x8 at"):
        run_search(tmp_path / "run", "search.resolution=8", "data.batch_size=1", images=50)
    assert not (tmp_path / "run").exists()


def test_a_search_that_another_process_writes_is_refused(tmp_path):
    with held_by_another(tmp_path / "run"), pytest.raises(AutoNLError, match="another process is writing this run"):
        run_search(tmp_path / "run", images=50)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


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


OWN = "name: mine\nfirst: k3_s1_e1_c8\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: mine\nfirst: k3_s1_e1_c16\n", "the field stages is missing; required: name, first, stages"),
        ("name: [", "not a YAML file"),
        (OWN + "stages: []\n", "stages: .* at least one stage"),
        (OWN + "stages: [[8, 1, 1]]\nkernels: [3, 4, 5]\n", "kernel: 4 is not allowed"),
        (OWN + "stages: [[8, 1, 1]]\nkernels: [1, 3]\n", "kernel: 1 is not allowed"),
        (OWN + "stages: [[8, 1, 1]]\nse: [0, 0.5]\n", "se: .* ratios above 0"),
        (OWN + "stages: [[8, 1, 1]]\nse: [-0.5, 0.5]\n", "se: .* ratios above 0"),
        (OWN + "stages: [[8, 1, 1]]\nratios: [0, 0.5]\n", "lightnl.ratio: 0"),
        (OWN + "stages: [[8, 1, 1]]\nstrides: [2, 0]\n", "strides: .* each a multiple of the next"),
        (OWN + "stages: [[8, 1, 1]]\nstrides: [2, -1]\n", "strides: .* each a multiple of the next"),
    ],
)
def test_a_space_file_that_lacks_something_or_has_candidates_that_no_network_can_have(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(AutoNLError, match=f"^{re.escape(str(path))}: {message}"):
        load_space(str(path))


def test_the_least_share_that_a_refusal_names_is_allowed():
    space = Space(
        name="mine", first="k3_s1_e1_c8", stages=((16, 2, 1), (24, 2, 1)), resolution="32", operator="lightnl"
    )
    with pytest.raises(AutoNLError) as refusal:
        parse_budget("1%", space)
    least = re.search(r"(\S+%) to 100%", str(refusal.value))[1]
    assert parse_budget(least, space) > 0
    with pytest.raises(AutoNLError):
        parse_budget(f"{float(least[:-1]) - 0.1}%", space)


def test_a_budget_that_no_network_fits_is_refused_before_the_search(tmp_path):
    space = replace(TINY, stages=((16, 2, 1), (24, 2, 1)), kernels=(3,), expands=(2, 6), se=(), ratios=())
    with pytest.raises(AutoNLError, match="no network of the space was found within 1% below a budget"):
        run_search(tmp_path / "run", "search.macs=80%", space=space)
    assert not (tmp_path / "run").exists()


def test_networks_of_a_search_are_the_spaces(tmp_path):
    """But for the dropout, which the paper's recipe has; arch.yaml takes it along, and nothing else tells of it."""
    for name, value in (("in_chans", 1), ("nonsense", 3)):
        with pytest.raises(AutoNLError, match=f"model.{name}: {value} is not allowed; allowed: drop_rate alone"):
            run_search(tmp_path / "run", f"model.{name}={value}")
    assert not (tmp_path / "run").exists()
    config = load_config("demo", ["model.drop_rate=0.3"], SearchConfig)
    searching = prepared(config, tmp_path / "run", 400)
    assert searching.space.spec(searching.space.largest).dropout == 0.3
    assert searching.config.model == {}


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
        macs = supernet.macs(land(supernet.gates, supernet.cost, budget, 1)[0].float()).item()
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


@pytest.mark.skipif(not PROVE, reason="two trainings: make prove")
@pytest.mark.parametrize(("operator", "least", "most"), [("lightnl", 95, 100), ("depthwise", 44, 56)])
def test_it_is_the_affinity_that_solves_it(operator, least, most):
    """The largest network with LightNL everywhere, and with the control, the same branch without affinity."""
    torch.manual_seed(0)
    source = far_apart(5_000, 1_000)
    network = build(SPACE.spec(SPACE.largest).with_operator(operator))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        for chosen in torch.randperm(len(source.train)).split(64):
            logits = network(normalised(network, source.train.images[chosen]))
            torch.nn.functional.cross_entropy(logits, source.train.labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = accuracy(network.eval(), source.validation)
    print(operator, found)
    assert least <= found <= most


@torch.no_grad()
def accuracy(network, stored):
    """In percent."""
    logits = network(normalised(network, stored.images))
    return 100 * (logits.argmax(1) == stored.labels).float().mean().item()


def normalised(network, images):
    """As the recipe's view of the embedded set does it."""
    mean, std = (torch.tensor(network.default_cfg[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return (images / 255 - mean) / std


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


def search_with_trials(folder, count=0):
    """A search that is killed in the middle of the count-th file that it puts into its place."""
    die_at("replace", count)
    run_search(folder, "search.trials=3", "search.trial_epochs=1", images=160, resume=True)


def test_killed_and_resumed_ends_the_same(tmp_path, monkeypatch):
    """Whether the super-network was being trained, or a trial, or one of the last files written."""
    put, replace_file = [], os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: (put.append(str(target)), replace_file(source, target)))
        search_with_trials(tmp_path / "unbroken")
    in_trials = [index for index, path in enumerate(put, start=1) if "/trials/" in path]
    assert 5 < in_trials[0] < len(put)
    for count in prove((5, in_trials[-3]), range(1, len(put) + 1)):
        folder = tmp_path / str(count)
        for killed in (True, False):
            process = in_child(search_with_trials, folder, count if killed else 0)
            process.join()
            assert process.exitcode == (-signal.SIGKILL if killed else 0)
        assert_same_search(folder, tmp_path / "unbroken")


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


def test_the_memory_of_the_evidence_is_a_setting(tmp_path):
    config = load_config("demo", ["search.memory=0"], SearchConfig)
    searching = prepared(config, tmp_path / "run", 160)
    assert searching.supernet.gates.memory == 0

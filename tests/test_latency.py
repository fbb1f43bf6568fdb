"""Milliseconds: the table's sum is the cost it claims to be, its file is refused where it does not fit."""

import csv
import dataclasses
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

from autonl import latency_table
from autonl.arch.macs import count_macs, layer_costs
from autonl.errors import AutoNLError
from autonl.export.timing import interleaved, timing_of
from autonl.latency import start, time_networks
from autonl.latency_table import measure
from autonl.search.cost import Cost
from autonl.search.gates import Columns, Reached, from_choices
from autonl.search.latency import LARGEST, SMALLEST, TableCost, places, read_rows
from autonl.search.space import Space, load_space

SPACE = Space(
    name="tiny",
    first="k3_s1_e1_c8",
    stages=((8, 2, 2), (16, 2, 1)),
    resolution="32x24",
    classes=3,
    stem=8,
    head=8,
    kernels=(3,),
    expands=(2, 3),
    se=(0.5,),
    ratios=(0.25,),
)


def reached(space, choices):
    columns = Columns.of(space)
    return Reached.by(from_choices(choices, columns).double(), columns)


@pytest.fixture
def macs_for_milliseconds(monkeypatch):
    """A machine on which a block takes 2 ms a MAC, a network 4 ms and 7 ms more, and that gets slower and slower."""
    paces = itertools.count(1)

    def time_group(space, place, runtime, watch):
        times = {}
        for text, block in latency_table.candidates(space, place.index).items():
            spec = dataclasses.replace(space.spec(space.largest), blocks=(block,), stem_chs=place.in_chs)
            resolution = (2 * place.height, 2 * place.width)  # the stem halves it
            times[text] = 2.0 * layer_costs(spec, resolution)[1].macs
        return times

    def whole_times(networks, runtime, threads):
        times = {name: 7 + 4 * count_macs(network.spec) for name, (network, _) in networks.items()}
        return Runs(times)

    def interleaved(times, threads, rounds):
        pace = next(paces)
        return {name: timing_of([pace * time]) for name, time in times.items()}

    class Runs(dict):
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(latency_table, "time_group", time_group)
    monkeypatch.setattr(latency_table, "started", whole_times)
    monkeypatch.setattr(latency_table, "interleaved", interleaved)


@pytest.mark.parametrize(
    "space",
    [SPACE, load_space("digits"), load_space("autonl"), dataclasses.replace(SPACE, se=(), ratios=())],
    ids=lambda space: f"{space.name}-{len(space.se)}",
)
def test_the_sum_of_the_table_is_the_cost(macs_for_milliseconds, tmp_path, space):
    measure(space, "torch", tmp_path / "table.csv")
    cost = TableCost(space, tmp_path / "table.csv")
    rng = random.Random(0)
    for choices in [space.smallest, space.largest, *(space.random(rng) for _ in range(20))]:
        expected = 7 + 4 * count_macs(space.spec(choices))
        assert cost(reached(space, choices)).item() == pytest.approx(expected, rel=1e-9)


def test_the_gradient_is_that_of_the_closed_form(macs_for_milliseconds, tmp_path):
    """Hard gates: what a gate adds when it opens, given the others, is the same for both."""
    space = load_space("digits")
    measure(space, "torch", tmp_path / "table.csv")
    table, macs = TableCost(space, tmp_path / "table.csv"), Cost(space, (32, 32))
    columns = Columns.of(space)
    gradients = []
    for cost in (table, macs):
        gates = from_choices(space.random(random.Random(1)), columns).double().requires_grad_()
        cost(Reached.by(gates, columns)).backward()
        gradients.append(gates.grad)
    assert torch.allclose(gradients[0], 4 * gradients[1], rtol=1e-9)


def test_places_that_are_alike_are_measured_once():
    found = places(load_space("autonl"))
    assert len(found) == 21
    assert len({place.index for place in found}) == 11  # the first block of 6 stages, and the others of 5
    assert [place.index for place in found[:5]] == [0, 1, 1, 1, 4]
    assert (found[0].in_chs, found[0].height) == (16, 112)
    assert (found[-1].in_chs, found[-1].height, found[-1].width) == (192, 7, 7)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that root cannot write to either: /proc")
def test_a_table_that_cannot_be_written_is_told_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(latency_table, "started", lambda *_: pytest.fail("was timed"))
    (tmp_path / "file").touch()
    for path in (Path("/proc/table.csv"), tmp_path / "file" / "table.csv"):
        with pytest.raises(AutoNLError, match=f"{path}: cannot be written: "):
            measure(SPACE, "torch", path)


def test_measure_and_resume(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    steps = []
    rows = measure(SPACE, "torch", path, rounds=1, advance=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (4, 4)
    # 3 places x (2 expansions x 1 kernel x 2 SE + 1 ratio x 2 strides), and two networks
    assert len(rows) == len(read_rows(path)) == 3 * 6 + 2
    assert {row.block for row in rows} >= {SMALLEST, LARGEST, "k3_s2_e2_c8", "k3_s2_e2_c8_nl0.25/1"}
    with pytest.raises(AutoNLError, match="holds a table already; go on with it by --resume"):
        measure(SPACE, "torch", path)
    cost = TableCost(SPACE, path)
    for choices, name in ((SPACE.smallest, SMALLEST), (SPACE.largest, LARGEST)):
        measured = next(row.milliseconds for row in rows if row.block == name)
        assert cost(reached(SPACE, choices)).item() == pytest.approx(measured)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:8]) + "\n")  # stopped behind the first place
    with pytest.raises(
        AutoNLError,
        match=r"is not finished; go on with the autonl measure that began it \(space tiny, runtime torch\), and --res",
    ):
        TableCost(SPACE, path)
    groups = []
    monkeypatch.setattr(latency_table, "time_group", lambda space, place, *more: groups.append(place.index) or {})
    measure(SPACE, "torch", path, rounds=1, resume=True)
    assert groups == [1, 2]
    other = dataclasses.replace(SPACE, ratios=(0.125, 0.25))  # the same smallest and largest network
    with pytest.raises(AutoNLError, match=r"was measured for another space called tiny, without k3_.*_nl0.125/1;"):
        measure(other, "torch", path, rounds=1, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "a,b\n1,2\n", "line 2 is not space,resolution"),
        (lambda text: text.replace("k3_s2_e3_c8,", "k3_s2_e9_c8,"), "has no time for the block k3_s2_e3_c8 on 8x16x12"),
        (lambda text: text.replace("tiny", "huge"), "was measured for the space huge with lightnl_energy at 32x24"),
        (
            lambda text: text.replace("lightnl_energy", "lightnl"),
            "was measured for the space tiny with lightnl at 32x24 .* not tiny with lightnl_energy at 32x24",
        ),
        (lambda text: "", "is not finished"),
    ],
)
def test_a_table_that_does_not_fit(macs_for_milliseconds, tmp_path, change, message):
    path = tmp_path / "table.csv"
    measure(SPACE, "torch", path)
    path.write_text(change(path.read_text()))
    with pytest.raises(AutoNLError, match=message):
        TableCost(SPACE, path)


@pytest.mark.parametrize(
    "change",
    [
        {"stages": ((8, 2, 1), (16, 2, 1))},
        {"expands": (2,)},
        {"ratios": ()},
        {"drop": False},
        {"activation": "relu6"},
        {"stem": 16},
        {"head": 16},
    ],
    ids=str,
)
def test_a_table_of_another_space_of_the_same_name_is_refused(macs_for_milliseconds, tmp_path, change):
    """Every candidate may be there and the sum still be wrong: both whole networks set its scale."""
    path, other = tmp_path / "table.csv", dataclasses.replace(SPACE, **change)
    measure(SPACE, "torch", path)
    with pytest.raises(AutoNLError, match="measured for another space called tiny: its stem, blocks, head or activ"):
        TableCost(other, path)
    with pytest.raises(AutoNLError, match="measured for another space called tiny: its stem, blocks, head or activ"):
        measure(other, "torch", path, resume=True)


def test_a_table_with_another_classifier_is_refused(macs_for_milliseconds, tmp_path):
    measure(SPACE, "torch", tmp_path / "table.csv")
    told = r"with a classifier for 3 classes, not 10; measure with --classes 10, into another --out"
    with pytest.raises(AutoNLError, match=told):
        TableCost(dataclasses.replace(SPACE, classes=10), tmp_path / "table.csv")


def test_a_table_from_before_it_named_operator_and_networks_is_of_lightnl(macs_for_milliseconds, tmp_path):
    path, published = tmp_path / "table.csv", dataclasses.replace(SPACE, operator="lightnl")
    measure(published, "torch", path)
    with open(path, newline="") as file:
        lines = [line[:9] for line in csv.reader(file)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    assert "operator" not in path.read_text()
    assert "networks" not in path.read_text()
    assert {row.operator for row in read_rows(path)} == {"lightnl"}
    TableCost(published, path)
    with pytest.raises(AutoNLError, match="not tiny with lightnl_energy"):
        TableCost(SPACE, path)


def test_a_table_fits_however_its_size_is_written(macs_for_milliseconds, tmp_path):
    measure(dataclasses.replace(SPACE, resolution="48"), "torch", tmp_path / "table.csv")
    before = (tmp_path / "table.csv").read_text()
    older = before.replace(f"{SPACE.name},48,", f"{SPACE.name},48x48,")  # as --res wrote it once
    assert older != before
    (tmp_path / "table.csv").write_text(older)
    TableCost(dataclasses.replace(SPACE, resolution="48x48"), tmp_path / "table.csv")
    with pytest.raises(AutoNLError, match=r"at 48 on torch .* at 48x40 on torch"):
        TableCost(dataclasses.replace(SPACE, resolution="48x40"), tmp_path / "table.csv")


def test_resume_refuses_a_table_of_another_runtime(macs_for_milliseconds, tmp_path):
    measure(SPACE, "torch", tmp_path / "table.csv")
    told = r"on torch with 1 thread\(s\), not tiny with lightnl_energy at 32x24 on openvino with 2"
    with pytest.raises(AutoNLError, match=told):
        measure(SPACE, "openvino", tmp_path / "table.csv", threads=2, resume=True)
    with pytest.raises(AutoNLError, match="cannot be read"):
        TableCost(SPACE, tmp_path / "nothing.csv")


def test_networks_in_turns():
    turns = []
    runs = {name: (lambda name=name: turns.append(name)) for name in "ab"}
    timings = interleaved(runs, rounds=2)
    assert "".join(turns) == "aaaaa" + "bbbbb" + "aaaabbbb" * 2
    assert timings["a"].runs == 6
    assert timing_of([4.0, 1.0, 2.0, 3.0, 5.0]).__dict__ == {"median": 3.0, "low": 2.0, "high": 4.0, "runs": 5}


def test_networks_of_different_sizes_are_refused():
    with pytest.raises(AutoNLError, match="digits 32x32, autonl_s 224x224; give one with --res"):
        time_networks(["digits", "autonl_s"], "torch")
    with pytest.raises(AutoNLError, match="unknown runtime 'onnx'"):
        time_networks(["digits"], "onnx")


def test_larger_networks_take_longer(tmp_path):
    """Ten times the MACs, three times the time: no other work on the machine turns that around."""
    timings = time_networks(["mobilenetv2_140", "mobilenetv2_035"], "torch", (192, 192), rounds=2)
    assert timings["mobilenetv2_140"].low > timings["mobilenetv2_035"].low > 0
    assert start(torch.nn.Conv2d(3, 1, 1), (3, 8, 8), "torch", 1, tmp_path / "x")() is None


def test_a_network_that_cannot_be_run():
    with pytest.raises(AutoNLError, match="patch16_224: torch cannot run it on images of 64x64: Assertion"):
        time_networks(["timm:vit_tiny_patch16_224"], "torch", (64, 64))

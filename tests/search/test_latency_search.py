"""A search to a budget of milliseconds, by a table that was made up rather than measured."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from autonl import AutoNLError
from autonl.arch.codec import block_from_string
from autonl.arch.macs import amount
from autonl.cli.search import print_found, summary
from autonl.latency_table import candidates, write_rows
from autonl.search.budget import parse_latency
from autonl.search.gates import Reached, from_choices
from autonl.search.latency import LARGEST, SMALLEST, Row, TableCost, places, read_rows
from autonl.search.space import load_space
from autonl.search.supernet import SuperNet
from tests.search.small import run_search

SPACE = load_space("digits")


def milliseconds(block):
    nonlocal_ = block.lightnl.ratio / block.lightnl.stride if block.lightnl else 0
    return 0.1 * block.kernel + 0.2 * block.expand + 0.3 * block.se + nonlocal_ + 0.01 * block.out_chs


def total(spec):
    return 1.0 + sum(milliseconds(block) for block in spec.blocks[1:])  # stem, first block, head: one in all


@pytest.fixture
def table(tmp_path):
    common = (SPACE.name, SPACE.resolution, "made up", 1)
    rows = [
        Row(*common, text, place.in_chs, place.height, place.width, milliseconds(block_from_string(text)))
        for index, place in enumerate(places(SPACE))
        if place.index == index
        for text in candidates(SPACE, index)
    ]
    for name, choices in ((SMALLEST, SPACE.smallest), (LARGEST, SPACE.largest)):
        rows.append(Row(*common, name, 3, 32, 32, total(SPACE.spec(choices))))
    write_rows(tmp_path / "table.csv", rows)
    return tmp_path / "table.csv"


def test_the_table_adds_up_to_every_network(table):
    cost, columns = TableCost(SPACE, table), SuperNet(SPACE).gates.columns
    rng = random.Random(0)
    for choices in (SPACE.smallest, SPACE.largest, *(SPACE.random(rng) for _ in range(30))):
        predicted = cost(Reached.by(from_choices(choices, columns).double(), columns)).item()
        assert predicted == pytest.approx(total(SPACE.spec(choices)), rel=1e-9)


def test_its_gradient_is_that_of_finite_differences(table):
    cost, columns = TableCost(SPACE, table), SuperNet(SPACE).gates.columns
    gates = torch.rand(len(SPACE.skeleton), columns.count, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: cost(Reached.by(g, columns)), gates)


def test_the_found_network_is_as_fast_as_asked_for(table, tmp_path, capsys):
    settings = ("search.latency=60%", f"search.table={table}")
    found = run_search(tmp_path / "run", *settings, space=SPACE, images=200, epochs=1)
    wanted = 0.6 * total(SPACE.spec(SPACE.largest))
    assert found.unit == "milliseconds"
    assert found.budget == pytest.approx(wanted)
    assert 0.99 * wanted <= total(found.spec) <= wanted
    assert found.result.history[-1]["train_milliseconds"] > 0
    # and its time is told, beside its MACs
    time = pytest.approx(total(found.spec))
    story = json.loads((tmp_path / "run" / "search.json").read_text())
    assert time == story["candidates"][0]["milliseconds"]
    assert time == summary(tmp_path / "run", found)["milliseconds"]
    print_found(tmp_path / "run", found, None, None, [])
    assert f"{amount(total(found.spec), 'milliseconds')} by the table, " in capsys.readouterr().out
    # the same table under its name is asked for when a search goes on
    write_rows(table, [replace(row, runtime="another") for row in read_rows(table)])
    with pytest.raises(AutoNLError, match="was started with table = "):
        run_search(tmp_path / "run", *settings, space=SPACE, images=200, epochs=1, resume=True)


@pytest.mark.parametrize(
    ("block", "time", "message"),
    [
        (LARGEST, 0.5, "table.csv: makes no sense: the smallest network takes .* the largest network 0.5"),
        (SMALLEST, -1.0, "table.csv: makes no sense"),
        (None, -1.0, "table.csv: makes no sense"),
        (SMALLEST, math.inf, "has inf milliseconds"),
        ("k3_s2_e2_c24", math.nan, "line 2 has nan milliseconds"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(block, time, message, table):
    """A time that is none; the largest network faster than the smallest; blocks (None: all) that take time away."""
    wrong = [block] if block else list({row.block for row in read_rows(table)} - {SMALLEST, LARGEST})
    write_rows(table, [replace(r, milliseconds=time) if r.block in wrong else r for r in read_rows(table)])
    with pytest.raises(AutoNLError, match=message):
        TableCost(SPACE, table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1%", "--latency: '1%' is not allowed; allowed: .* ms to .* ms, .*% to 100%"),
        ("1000ms", "--latency: '1000ms' is not allowed"),
        ("fast", "milliseconds such as 12ms"),
    ],
)
def test_a_budget_outside_the_space_is_refused_with_the_range(text, message, table):
    with pytest.raises(AutoNLError, match=message):
        parse_latency(text, SPACE, TableCost(SPACE, table))

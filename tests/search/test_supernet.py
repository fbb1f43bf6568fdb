"""The super-network is every network of its space."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autonl.arch.macs import count_macs
from autonl.errors import AutoNLError
from autonl.nn.light_nonlocal import LightNL
from autonl.search.derive import derive
from autonl.search.gates import Reached, from_choices, to_choices
from autonl.search.space import Choice, Space, load_space
from autonl.search.supernet import SuperNet, super_block, super_lightnl
from tests.conftest import prove

SMALL = Space(
    name="small",
    resolution="20x28",
    classes=5,
    stem=8,
    head=32,
    first="k3_s1_e1_c8",
    stages=((16, 2, 3), (24, 1, 2), (32, 2, 2)),
    kernels=(3, 5, 7),
    expands=(2, 3, 6),
    se=(0.25, 0.5),
    ratios=(0.125, 0.25, 0.5),
    strides=(4, 2, 1),
)


def space_named(name):
    return {
        "small": SMALL,
        "no SE": replace(SMALL, se=()),
        "no LightNL": replace(SMALL, ratios=()),
        "as published": replace(SMALL, operator="lightnl"),
        "one of each": replace(SMALL, kernels=(3,), expands=(3,), se=(0.5,), ratios=(0.25,), strides=(1,), drop=False),
        "digits": load_space("digits"),
        "autonl": load_space("autonl"),
    }[name]


def trained(space, seed=0):
    """A super-network whose every branch acts and whose BN statistics are those of some data."""
    torch.manual_seed(seed)
    supernet = SuperNet(space)
    for module in supernet.network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.normal_(module.running_mean, std=0.1)
    return supernet.eval()


@pytest.mark.parametrize(
    "name", ["small", "no SE", "no LightNL", "as published", "one of each", "digits", *prove([], ["autonl"])]
)
@torch.no_grad()
def test_every_choice_is_the_network_it_stands_for(name):
    """With BN statistics that fit, and branches of LightNL of a training's size, from 0.1 to 0.3 of what they are added
    to: where they are larger, LightNL, which is cubic, multiplies what rounding leaves, block by block."""
    space = space_named(name)
    supernet = trained(space)
    for module in supernet.network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
        elif isinstance(module, LightNL):
            module.bn.weight *= 0.2
    x = torch.randn(4, 3, *supernet.resolution)
    rng = random.Random(0)
    drawn = [space.largest, space.smallest, *(space.random(rng) for _ in range(prove(10, 50)))]
    for choices in drawn:
        supernet.gates.choices = from_choices(choices, supernet.gates.columns)
        supernet.train()(x)
        supernet.eval()
        network = derive(supernet, choices, "derived").eval()
        expected = network(x)
        assert (supernet(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
        with FlopCounterMode(display=False) as counter:
            network(x[:1])
        assert supernet.macs().item() == counter.get_total_flops() / 2 == count_macs(network.spec)


@pytest.mark.parametrize("name", ["small", "digits"])
def test_choices_and_gates_are_the_same_thing(name):
    space = space_named(name)
    columns = SuperNet(space).gates.columns
    rng = random.Random(0)
    for _ in range(20):
        choices = space.random(rng)
        assert to_choices(from_choices(choices, columns), columns) == choices


@pytest.mark.parametrize("ratios", [(0.125, 0.25), (0.05, 0.08, 0.1, 0.125, 0.2, 0.25)])
def test_the_super_network_costs_what_its_largest_network_costs(ratios):
    space = replace(load_space("autonl"), ratios=ratios)
    supernet = SuperNet(space).eval().to("meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        supernet(torch.empty(1, 3, 224, 224, device="meta"), observing=True)  # the distances count too
    assert counter.get_total_flops() / 2 <= 1.05 * count_macs(space.spec(space.largest))


def test_published_sizes_of_the_space():
    """Millions of MACs in FACTS at 224 and 128."""
    space = load_space("autonl")
    without = replace(space, se=(), ratios=())
    figures = {
        548.59: (space.spec(space.largest), (224, 224)),
        180.16: (space.spec(space.largest), (128, 128)),
        526.21: (without.spec(without.largest), (224, 224)),
        102.53: (space.spec(space.smallest), (224, 224)),
        34.34: (space.spec(space.smallest), (128, 128)),
    }
    for millions, (spec, resolution) in figures.items():
        assert round(count_macs(spec, resolution) / 1e6, 2) == millions
    assert len(space.skeleton) == 21


def test_a_scaled_space_keeps_all_of_its_first_block():
    space = replace(SMALL, first="k5_s1_e1_c8_se0.25_nl0.25/2").scaled(2)
    assert space.first == "k5_s1_e1_c16_se0.25_nl0.25/2"
    assert [chs for chs, *_ in space.stages] == [32, 48, 64]


@pytest.mark.parametrize("operator", ["wang", "eq9", "depthwise", "lightnls"])
def test_a_space_of_another_operator_is_refused(operator, tmp_path):
    (tmp_path / "own.yaml").write_text(f"name: own\nfirst: k3_s1_e1_c8\nstages: [[8, 1, 1]]\noperator: {operator}\n")
    with pytest.raises(AutoNLError, match=f"own.yaml: operator: '{operator}' is .* allowed: lightnl, lightnl_energy"):
        load_space(str(tmp_path / "own.yaml"))


def test_a_closed_gate_is_the_identity_bit_for_bit():
    supernet = trained(SMALL)
    columns = supernet.gates.columns
    x = torch.randn(2, 16, 5, 7)
    dropped, without_lightnl = (
        supernet.masked(Reached.by(from_choices([choice] * 7, columns).float(), columns))[1]
        for choice in (Choice(0, 2, 2, 3, 2), Choice(3, 2, 2, 0, 2))
    )
    with torch.no_grad():
        block, candidates = supernet.searched()[1], supernet.candidates[1]
        assert torch.equal(super_block(x, block, candidates, dropped), x)
        assert torch.equal(super_lightnl(x, block.bn3[1], candidates, without_lightnl, None), x)


def test_a_dropped_block_neither_costs_nor_earns():
    """Its other gates get a gradient of exactly zero from the task and from the cost, and change no MACs."""
    supernet = trained(SMALL).train()
    columns = supernet.gates.columns
    gates = from_choices(SMALL.largest, columns).float()
    gates[1, 0] = 0.0
    gates.requires_grad_()
    supernet.gates.forward = lambda: gates
    (gradient,) = torch.autograd.grad(supernet(torch.randn(4, 3, 20, 28)).square().mean(), gates)
    assert (gradient[1, 1:] == 0).all()
    assert gradient[1, 0] != 0  # the block itself can come back
    assert (gradient[2, 1:] != 0).all()
    (cost_gradient,) = torch.autograd.grad(supernet.macs(gates), gates)
    assert (cost_gradient[1, 1:] == 0).all()
    assert cost_gradient[1, 0] > 0
    closed = gates.detach().clone()
    closed[1, 1:] = 0
    assert supernet.macs(closed) == supernet.macs(gates)


def test_gradient_of_the_cost_is_the_relaxed_forms():
    """By finite differences of the same polynomial at fractional gates."""
    supernet = SuperNet(SMALL)
    torch.manual_seed(0)
    gates = torch.rand(7, supernet.gates.columns.count, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: supernet.macs(g) / 1e6, gates)

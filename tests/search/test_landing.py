"""The landing: within 1 % below the budget, and nothing that the gates value more."""

import itertools
from dataclasses import replace

import pytest
import torch

from autonl.arch.macs import count_macs
from autonl.search.budget import parse_budget
from autonl.search.gates import Reached, to_choices
from autonl.search.landing import Knapsack, land
from autonl.search.space import load_space
from autonl.search.supernet import SuperNet
from tests.conftest import prove
from tests.search.small import TINY
from tests.search.test_supernet import SMALL


def test_landing_hits_every_budget_of_the_full_skeleton():
    space = load_space("autonl")
    torch.manual_seed(0)
    supernet = SuperNet(space)
    supernet.gates.observe(torch.randn_like(supernet.gates.evidence))
    for share in prove((25, 85), (20, 25, 40, 55, 70, 85, 99)):
        budget = parse_budget(f"{share}%", space)
        settings = land(supernet.gates, supernet.cost, budget, 4)
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
        settings = land(supernet.gates, supernet.cost, budget, 4)
        macs = [supernet.macs(setting.float()).item() for setting in settings]
        assert all(0.99 * budget <= m <= budget for m in macs)


def test_landing_keeps_what_the_gates_value_most():
    """All gates alike but those of LightNL, which are worth much more: the landing keeps every one of them."""
    supernet = SuperNet(SMALL)
    with torch.no_grad():
        supernet.gates.threshold[:, supernet.gates.columns.ratio.start] = -3.0
    budget = parse_budget("60%", SMALL)
    best = land(supernet.gates, supernet.cost, budget, 1)[0]
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


@pytest.mark.parametrize("share", ["100%", "99.5%"])
def test_a_landing_without_any_preference_finds_the_end_of_the_space(share):
    supernet = SuperNet(SMALL)  # all margins zero
    budget = parse_budget(share, SMALL)
    macs = supernet.macs(land(supernet.gates, supernet.cost, budget, 4).double())
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

import math
from dataclasses import replace

import pytest
import torch

from autonl.search.evidence import FLOOR, affinity_distances
from autonl.search.gates import MARGIN_LIMIT, Gates
from tests.conftest import prove
from tests.search.test_supernet import SMALL, trained


def opened(margin, mode="decide"):
    """Gates with a given margin everywhere."""
    gates = Gates(SMALL)
    gates.mode = mode
    with torch.no_grad():
        gates.threshold.fill_(-margin)
    return gates


@pytest.mark.parametrize("mode", ["decide", "sample"])
@pytest.mark.parametrize("margin", [-1.0, 0.5])
def test_hard_values_and_the_sigmoids_gradient(mode, margin):
    torch.manual_seed(0)
    gates = opened(margin, mode)
    weights = torch.randn(gates.threshold.shape)
    values = gates()
    assert set(values.unique().tolist()) <= {0.0, 1.0}
    if mode == "decide":
        assert (values == (1.0 if margin > 0 else 0.0)).logical_or(gates.always_open).all()
    (gradient,) = torch.autograd.grad((values * weights).sum(), gates.threshold)

    def relaxed(threshold):  # the same weighted sum with sigmoids in place of the indicators
        soft = torch.sigmoid(gates.advantage() - threshold)
        return (torch.where(gates.always_open, 1.0, soft) * weights).sum()

    step = 1e-2
    for row, column in [(0, 0), (1, 0), (3, 4), (6, 8)]:
        shift = torch.zeros_like(gates.threshold)
        shift[row, column] = step
        slope = (relaxed(gates.threshold + shift) - relaxed(gates.threshold - shift)) / (2 * step)
        assert gradient[row, column].item() == pytest.approx(slope.item(), abs=1e-4)


def test_a_block_without_a_skip_is_always_there():
    gates = opened(-3.0)
    # the first block of each stage changes stride or width
    assert gates.always_open[:, 0].tolist() == [True, False, False, True, False, True, False]
    assert gates()[:, 0].tolist() == [1, 0, 0, 1, 0, 1, 0]


def test_a_closed_gate_reopens_when_the_loss_asks_for_it():
    """All closed; the task's loss falls when block 1 is there, and nothing else counts."""
    supernet = trained(SMALL)
    gates = supernet.gates
    gates.mode = "decide"
    with torch.no_grad():
        gates.threshold.fill_(0.5)
    optimizer = torch.optim.Adam([gates.threshold], lr=0.05)
    assert not gates.decisions()[1, 0]
    for _ in range(30):
        optimizer.zero_grad()
        (1 - gates()[1, 0]).square().backward()
        optimizer.step()
        gates.clamp()
    assert gates.decisions()[1, 0]
    assert not gates.decisions()[2, 0]


def test_no_gradient_to_thresholds_during_the_warm_up():
    supernet = trained(SMALL)
    assert supernet.gates.mode == "open"
    supernet(torch.randn(2, 3, 20, 28)).sum().backward()
    assert (supernet.gates.threshold.grad == 0).all()
    (gradient,) = torch.autograd.grad(supernet.macs(), supernet.gates.threshold)
    assert (gradient == 0).all()


def test_margins_stay_where_a_gate_can_come_back():
    gates = opened(100.0)
    gates.observe(torch.randn(gates.evidence.shape))
    gates.clamp()
    assert gates.margins().abs().max() <= MARGIN_LIMIT + 1e-5


def test_start_is_common_to_a_kind_and_keeps_the_order_of_the_evidence():
    torch.manual_seed(0)
    gates = Gates(SMALL)
    gates.observe(0.3 * torch.randn(gates.evidence.shape))
    gates.start(margin=1.0)
    margins = gates.margins()
    kernel = gates.columns.kernel.start
    assert (margins[:, kernel].argsort() == gates.evidence[:, kernel].argsort()).all()
    assert gates.threshold[:, kernel].unique().numel() == 1
    assert margins[:, kernel].mean().item() == pytest.approx(1.0, abs=1e-5)


def test_what_all_blocks_gain_or_lose_together_opens_and_closes_nothing():
    gates = Gates(SMALL)
    evidence = torch.randn(gates.evidence.shape)
    gates.observe(evidence)
    before_all = gates.margins().detach().clone()
    searched = ~gates.always_open
    gates.evidence += 5.0
    torch.testing.assert_close(gates.margins()[searched], before_all[searched])
    gates.evidence[0, 1] += 1.0  # one block alone: it gains what is beyond the new mean, the others lose their part
    blocks = len(gates.evidence)
    gained = gates.margins()[:, 1] - before_all[:, 1]
    assert gained[0].item() == pytest.approx(1 - 1 / blocks)
    assert gained[1].item() == pytest.approx(-1 / blocks, abs=1e-6)


def test_evidence_is_a_mean_at_first_and_a_moving_average_later():
    gates = Gates(SMALL)
    gates.memory = 0.9
    for value in (1.0, 2.0, 3.0):
        gates.observe(torch.full_like(gates.evidence, value))
    assert gates.evidence[0, 0].item() == pytest.approx(2.0)
    for _ in range(10):
        gates.observe(torch.full_like(gates.evidence, 2.0))
    gates.observe(torch.full_like(gates.evidence, 12.0))
    assert gates.evidence[0, 0].item() == pytest.approx(3.0)  # 0.9 * 2 + 0.1 * 12


def test_sampling_follows_the_margins():
    gates = opened(1.0, "sample")
    share = torch.stack([gates() for _ in range(400)])[:, ~gates.always_open].mean()
    assert share.item() == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.02)
    gates.temperature = 0.2
    share = torch.stack([gates() for _ in range(400)])[:, ~gates.always_open].mean()
    assert share.item() == pytest.approx(torch.sigmoid(torch.tensor(5.0)).item(), abs=0.01)


@pytest.mark.parametrize("seed", range(prove(3, 50)))
def test_distances_equal_the_explicit_matrices(seed):
    """Against H W x H W Frobenius norms in float64."""
    torch.manual_seed(seed)
    height, width, compact, strides = 6, 7, [2, 3, 5], [4, 2, 1]
    x = torch.randn(3, 5, height, width, dtype=torch.float64)
    samples = [x[:, :, ::s, ::s].flatten(2).mT for s in strides]  # (N, S, C)
    grams = [rows.mT @ rows for rows in samples]
    counts = [rows.shape[1] for rows in samples]
    found = affinity_distances(grams, counts, compact)
    rows = samples[-1]
    affinity = rows @ rows.mT  # (N, HW, HW)
    expected = []
    for chs in compact[:-1]:
        smaller = rows[..., :chs] @ rows[..., :chs].mT
        expected.append((frobenius(smaller - affinity) / frobenius(affinity)).mean())
    full = affinity @ affinity / counts[-1]
    for sampled, count in zip(samples[:-1], counts[:-1], strict=True):
        through = rows @ sampled.mT
        expected.append((frobenius(through @ through.mT / count - full) / frobenius(full)).mean())
    assert (found - torch.stack(expected)).abs().max() <= 1e-9


def frobenius(matrices):
    return torch.linalg.matrix_norm(matrices)


def test_candidates_that_coincide_speak_for_none_of_them():
    """SE of 0.05 and of 0.1 is one hidden unit on 8 and on 16 channels, one and two on 24."""
    supernet = trained(replace(SMALL, se=(0.05, 0.1)))
    supernet(torch.randn(2, 3, 20, 28), observing=True)
    evidence = supernet.gates.evidence
    assert evidence.isfinite().all()
    wider = evidence[:, supernet.gates.columns.se][:, 1]
    assert wider[:4].tolist() == pytest.approx([math.log(FLOOR)] * 4)
    assert (wider[4:] > math.log(FLOOR)).all()


def test_the_smallest_sufficient_candidate_is_taken():
    """Eq. 12 by hand: ratio distances 0.3 and 0.1 above the mean against a threshold of 0.2 choose the second one."""
    gates = Gates(SMALL)
    evidence = gates.evidence.clone()
    ratio = gates.columns.ratio
    evidence[0, ratio] = torch.tensor([0.0, 0.3, 0.1])
    evidence[1, ratio] = -evidence[0, ratio]
    gates.observe(evidence)
    with torch.no_grad():
        gates.threshold.fill_(0.2 / 0.1)
        gates.threshold[:, ratio.start] = -1
    assert gates.decisions()[0, ratio].tolist() == [True, True, False]

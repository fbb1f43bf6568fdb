"""Recorded passes: the same training, launched as a whole. Needs a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autonl import create_model
from autonl.errors import AutoNLError
from autonl.search.space import load_space
from autonl.search.supernet import SuperNet
from autonl.train.graphs import Graphed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def course(model, module, steps=12):
    """Losses of a few steps from the same start, on batches that are the same every time."""
    optimizer = torch.optim.SGD(module.parameters(), 0.05, 0.9)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        images = torch.randn(16, 3, 32, 32, generator=generator).cuda()
        labels = torch.randint(10, (16,), generator=generator).cuda()
        torch.manual_seed(step)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_recorded_training_is_the_same_training():
    torch.manual_seed(0)
    modules = [create_model("digits", drop_rate=0.0).cuda().train() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    plain, recorded = course(modules[0], modules[0]), course(Graphed(modules[1]), modules[1])
    assert recorded == pytest.approx(plain, rel=1e-3)
    for (name, value), other in zip(modules[0].state_dict().items(), modules[1].state_dict().values(), strict=True):
        assert torch.allclose(value, other, rtol=1e-2, atol=1e-3), name  # three passes more would show in the BNs
    assert modules[1].bn1.num_batches_tracked == 12


def test_dropout_is_drawn_anew_and_by_the_seed():
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    model, x = Graphed(module), torch.randn(8, 64, device="cuda")
    torch.manual_seed(1)
    first, second = model(x).clone(), model(x).clone()
    torch.manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(model(x), first)


def test_other_batches_and_evaluation_go_the_plain_way():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).cuda()
    model = Graphed(module)
    model(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward()
    assert model(torch.randn(2, 3, 8, 8, device="cuda")).shape[0] == 2
    x = torch.randn(4, 3, 8, 8, device="cuda")
    assert torch.equal(model.eval()(x), module(x))


def test_the_gates_of_a_super_network_act_and_learn_in_a_recording():
    torch.manual_seed(0)
    supernet = SuperNet(load_space("digits")).cuda().train()
    model, x = Graphed(supernet), torch.randn(4, 3, *supernet.resolution, device="cuda")
    for gates in (torch.ones_like(supernet.gates.threshold), supernet.gates.always_open.float()):
        plain, recorded = (gates.clone().requires_grad_() for _ in range(2))
        found = model(x, recorded)  # first: what a pass keeps alive would be in a recording's way
        expected = supernet(x, plain)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
        for logits in (expected, found):
            logits.square().mean().backward()
        assert torch.allclose(recorded.grad, plain.grad, rtol=1e-2, atol=1e-5)
    del found, expected, logits
    for turn in (1, 2, 3):  # a recording of its own
        model(x, recorded.detach().requires_grad_(), True).sum().backward()
        assert supernet.gates.observations == turn


def test_what_cannot_be_recorded_is_said():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, device="cuda"))

        def forward(self, x):
            return x * self.weight if x.sum().item() else x

    with pytest.raises(AutoNLError, match=r"Reads cannot be recorded: .*; allowed: loop\.graph=false"):
        Graphed(Reads())(torch.ones(2, device="cuda"))

"""Recorded passes: the same training, launched as a whole. What really records needs a GPU."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autonl import create_model
from autonl.data.loaders import LoaderTraining
from autonl.data.masks import MemoryMaskTraining
from autonl.data.memory import MemoryTraining
from autonl.errors import AutoNLError
from autonl.search.space import load_space
from autonl.search.supernet import SuperNet
from autonl.search.task import Search
from autonl.segment.task import Segmentation
from autonl.train import graphs
from autonl.train.config import LoopConfig
from autonl.train.graphs import Graphed, can_be_recorded
from autonl.train.tasks import Classification, Task

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def stand_in(device="cuda", world_size=1):
    return SimpleNamespace(device=SimpleNamespace(type=device), world_size=world_size)


@pytest.mark.parametrize(
    ("fabric", "task", "train", "settings", "recorded"),
    [
        (stand_in(), Classification, MemoryTraining, {}, True),
        (stand_in(), Search, MemoryTraining, {"clip_norm": 1.0, "ema": 0.9}, True),
        (stand_in(), Segmentation, MemoryMaskTraining, {}, True),
        (stand_in("cpu"), Classification, MemoryTraining, {}, False),
        (stand_in(world_size=2), Classification, MemoryTraining, {}, False),
        (stand_in(), Task, MemoryTraining, {}, False),
        (stand_in(), Classification, LoaderTraining, {}, False),
        (stand_in(), Classification, MemoryTraining, {"graph": False}, False),
        (stand_in(), Classification, MemoryTraining, {"accumulate": 2}, False),
        (stand_in(), Classification, MemoryTraining, {"compile": True}, False),
    ],
)
def test_what_is_recorded(fabric, task, train, settings, recorded):
    assert can_be_recorded(fabric, task, train.__new__(train), LoopConfig(**settings)) is recorded


class Shown(nn.Module):
    """Returns its arguments."""

    def __init__(self):
        super().__init__()
        self.name = "inner"

    def forward(self, *inputs, **named):
        return (*inputs, *named.values())


def test_which_calls_are_recorded(monkeypatch):
    """On the CPU, with a recording that only says that it was one."""
    made = []

    def record(module, inputs, constants, memory):
        made.append(constants)
        return lambda *tensors: ("replayed", *module(*tensors, *constants))

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")
    model, x, y = Graphed(Shown()).train(), torch.ones(2), torch.zeros(2)
    assert model(x, y) == model(x, y) == ("replayed", x, y)
    assert model(x, y, True) == ("replayed", x, y, True)
    assert made == [(), (True,)]
    for call in ((x, None, y), (x[:1], y)):
        assert model(*call) == call
    assert model(x, named=y) == (x, y)
    assert model.eval()(x, y) == (x, y)
    with torch.no_grad():
        assert model.train()(x, y) == (x, y)
    assert made == [(), (True,)]
    model.release()
    model(x, y)
    assert made == [(), (True,), ()]
    assert model.name == "inner"
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        model.missing  # noqa: B018


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


@NEEDS_GPU
def test_a_recorded_training_is_the_same_training():
    torch.manual_seed(0)
    modules = [create_model("digits", drop_rate=0.0).cuda().train() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    plain, recorded = course(modules[0], modules[0]), course(Graphed(modules[1]), modules[1])
    assert recorded == pytest.approx(plain, rel=1e-3)
    for (name, value), other in zip(modules[0].state_dict().items(), modules[1].state_dict().values(), strict=True):
        assert torch.allclose(value, other, rtol=1e-2, atol=1e-3), name  # three passes more would show in the BNs
    assert modules[1].bn1.num_batches_tracked == 12


@NEEDS_GPU
def test_dropout_is_drawn_anew_and_by_the_seed():
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    model, x = Graphed(module), torch.randn(8, 64, device="cuda")
    torch.manual_seed(1)
    first, second = model(x).clone(), model(x).clone()
    torch.manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(model(x), first)


@NEEDS_GPU
def test_other_batches_and_evaluation_go_the_plain_way():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).cuda()
    model = Graphed(module)
    model(torch.randn(4, 3, 8, 8, device="cuda")).sum().backward()
    assert model(torch.randn(2, 3, 8, 8, device="cuda")).shape[0] == 2
    x = torch.randn(4, 3, 8, 8, device="cuda")
    assert torch.equal(model.eval()(x), module(x))


@NEEDS_GPU
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


@NEEDS_GPU
def test_what_cannot_be_recorded_is_said():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, device="cuda"))

        def forward(self, x):
            return x * self.weight if x.sum().item() else x

    with pytest.raises(AutoNLError, match=r"Reads cannot be recorded: .*; allowed: loop\.graph=false"):
        Graphed(Reads())(torch.ones(2, device="cuda"))

"""Optimiser, schedule, EMA, accumulation and clipping against steps computed by hand."""

import math
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import cuda
from torch import nn

from autonl.data.sources import open_source
from autonl.errors import AutoNLError
from autonl.models import create_model
from autonl.nn.kernels.layers import FusedDepthwise, FusedNormAct
from autonl.nn.light_nonlocal import LightNL
from autonl.search.task import Search
from autonl.train.bn import calibrate_bn
from autonl.train.config import LoopConfig, load_config
from autonl.train.loop import Loop, launch
from autonl.train.progress import Progress
from autonl.train.run import train_classifier
from autonl.train.signals import StopRequest
from autonl.train.state import read_checkpoint
from autonl.train.tasks import Classification, Task, classification_metrics, create_optimizer, create_schedule
from tests.train.small import NETWORK, ON_CPU, small_config, train_small


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return x @ self.weight


class Follow(Task):
    """Loss = mean of w x: the gradient is the mean of x, whatever w is."""

    def __init__(self, optim, schedule):
        self.optim, self.schedule, self.rates, self.seen = optim, schedule, [], []

    def tunings(self, module, steps_per_epoch):
        self.optimizer = create_optimizer(module, self.optim)
        return [(self.optimizer, create_schedule(self.optimizer, self.schedule, steps_per_epoch))]

    def step(self, model, batch, step):
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return {"loss": model(batch[0]).mean()}

    def after_step(self, module, step):
        self.seen.append(module.weight.item())

    def metrics(self):
        return classification_metrics(2)

    def evaluate(self, module, batch, metrics):
        self.evaluated = module.weight.item()
        metrics.update(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))


class Numbers:
    """Batches of one number each."""

    resumes_inside = True

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def epoch(self, epoch, first_batch=0):
        return ((torch.full((2, 1), x), None) for x in self.numbers[first_batch:])


def follow(tmp_path, numbers, recipe_settings, kind=Follow, **loop):
    running = looped(tmp_path, Numbers(numbers), recipe_settings, kind, **loop)
    running.run()
    return running.task, running


def looped(tmp_path, batches, recipe_settings, kind=Follow, module=None, progress=None, **loop):
    config = load_config("imagenet_mnas", recipe_settings)
    task = kind(config.optim, config.schedule)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return Loop(
        fabric, module or Line(), task, batches, [([], [])], LoopConfig(**loop), epochs=config.schedule.epochs,
        batch_size=2, seed=0, folder=tmp_path, about={}, progress=progress,
    )  # fmt: skip


def test_the_papers_steps(tmp_path):
    """RMSprop as TensorFlow has it, warm-up from 0.016 to 0.256, x 0.97 every 2.4 epochs, EMA: four steps an epoch."""
    gradients = [0.5, -1.0, 2.0, 0.25]
    settings = ["schedule.epochs=12", "optim.weight_decay=0"]
    task, loop = follow(tmp_path, gradients, settings, ema=0.9)

    weight, square, momentum, average, rates, weights = 1.0, 1.0, 0.0, 1.0, [], []
    for step in range(48):
        warm = 0.016 + (0.256 - 0.016) * step / 20  # 5 epochs of warm-up
        rate = warm if step < 20 else 0.256 * 0.97 ** math.floor(step / (2.4 * 4))
        gradient = gradients[step % 4]
        square += (1 - 0.9) * (gradient**2 - square)
        momentum = 0.9 * momentum + rate * gradient / math.sqrt(square + 1e-3)
        weight -= momentum
        # timm's average starts as a copy of the first step's weights
        average = weight if step == 0 else 0.9 * average + (1 - 0.9) * weight
        rates.append(rate)
        weights.append(weight)
    assert task.rates == pytest.approx(rates)
    assert task.seen == pytest.approx(weights, rel=1e-4)
    assert loop.training.average.module.weight.item() == pytest.approx(average, rel=1e-4)
    assert task.evaluated == pytest.approx(average, rel=1e-4)


def test_products_on_a_cpu_stay_in_float32():
    """What a training allows for products holds for all that the process does after it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a training on a GPU has left it lower
    try:
        launch(accelerator="cpu")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "num_cuda_devices", lambda: 1)
    with pytest.raises(AutoNLError, match=r"^--devices 2, --num-nodes None: .*\[0, 1\].*\[0\]"):
        launch(devices=2)


class Interrupted(Follow):
    """Asked to stop behind the sixth step."""

    def after_step(self, module, step):
        super().after_step(module, step)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


class Stream(Numbers):
    resumes_inside = False


@pytest.mark.parametrize(
    ("batches", "saved"), [(Numbers([1.0] * 4), 6), (Stream([1.0] * 4), 4), (Stream([1.0] * 8), None)]
)
def test_a_run_that_is_stopped_knows_what_it_has_saved(tmp_path, batches, saved):
    """A stream begins its epoch again: its checkpoint is that of the epoch's start, if there is one."""
    settings = ["schedule.epochs=3", "schedule.warmup_epochs=0"]
    result = looped(tmp_path, batches, settings, Interrupted).run()
    assert (result.stopped_by, result.step, result.saved) == (signal.SIGTERM, 6, saved)
    checkpoint, _ = read_checkpoint(tmp_path)
    assert (checkpoint and checkpoint["step"]) == saved


def test_the_calibration_draws_the_same_every_time(tmp_path):
    """For dropout, another thing for every batch and every process; whatever the fetching of a batch draws."""

    class Drawing(Numbers):
        def epoch(self, epoch, first_batch=0):
            for batch in super().epoch(epoch):
                torch.rand(3)
                yield batch

    running = looped(tmp_path, Drawing([1.0] * 3), [], calibrate_batches=2)

    def drawn(rank):
        running.fabric = SimpleNamespace(global_rank=rank)
        return [torch.rand(()).item() for _ in running.calibration()]

    torch.rand(5)
    assert drawn(0) == drawn(0)
    assert len({*drawn(0), *drawn(1)}) == 4


def test_a_signal_that_comes_while_the_processes_agree_is_not_lost(tmp_path):
    """The others answer that nobody has asked, for all they know."""
    running, stop = looped(tmp_path, Numbers([1.0] * 4), []), StopRequest()

    def reduced(asked, reduce_op):
        stop.signal = signal.SIGTERM
        return asked

    running.fabric = SimpleNamespace(world_size=2, device=torch.device("cpu"), all_reduce=reduced)
    assert [running.agreed_to_stop(stop), running.agreed_to_stop(stop)] == [False, True]
    assert stop.signal == signal.SIGTERM


def test_who_ignores_a_signal_is_not_stopped_by_it():
    """A script's `autonl train ... &`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.signal is None
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_weight_decay_is_added_to_the_gradient(tmp_path):
    task, _ = follow(tmp_path, [0.5], ["schedule.epochs=1", "schedule.warmup_epochs=0", "optim.weight_decay=0.1"])
    gradient = 0.5 + 0.1 * 1.0
    assert task.seen[0] == pytest.approx(1 - 0.256 * gradient / math.sqrt(1 + 0.1 * (gradient**2 - 1) + 1e-3))


def test_cosine_with_warm_up():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.4)
    schedule = load_config("demo", ["schedule.epochs=4", "schedule.warmup_epochs=1", "schedule.warmup_lr=0.1"]).schedule
    scheduler = create_schedule(optimizer, schedule, steps_per_epoch=10)
    rates = []
    for step in range(40):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:10] == pytest.approx([0.1 + 0.03 * step for step in range(10)])
    assert rates[10:] == pytest.approx([0.2 * (1 + math.cos(math.pi * step / 40)) for step in range(10, 40)])


def test_accumulation_is_the_mean_of_its_rounds_and_clipping_the_norm_of_all(tmp_path):
    settings = ["optim.name=momentum", "optim.lr=1", "optim.momentum=0", "optim.weight_decay=0", "optim.arguments={}"]
    settings += ["schedule.epochs=1", "schedule.warmup_epochs=0", "schedule.name=cosine", "schedule.min_lr=1"]
    task, loop = follow(tmp_path / "a", [1.0, 3.0, 8.0, 0.0], settings, accumulate=2)
    assert task.seen == pytest.approx([1 - 2, 1 - 2 - 4])  # means of (1, 3) and (8, 0)
    assert loop.training.history[0]["train_loss"] == pytest.approx((1.0 * 2 + -1.0 * 4) / 2)
    task, _ = follow(tmp_path / "b", [1.0, 3.0, 8.0, 0.0], settings, clip_norm=1.0)
    assert task.seen == pytest.approx([0, -1, -2, -2], abs=1e-5)


def test_calibration_takes_the_plain_mean_over_the_batches():
    bn = nn.Sequential(nn.BatchNorm2d(1))
    batches = [(torch.randn(8, 1, 3, 3) * scale + scale, None) for scale in (1.0, 2.0, 5.0)]
    bn[0].running_mean.fill_(77)
    calibrate_bn(bn, batches)
    assert bn[0].running_mean.item() == pytest.approx(sum(x.mean().item() for x, _ in batches) / 3, rel=1e-5)
    assert bn[0].running_var.item() == pytest.approx(sum(x.var().item() for x, _ in batches) / 3, rel=1e-5)
    assert bn[0].momentum == 0.1


def test_label_smoothing_and_top_k():
    config = load_config("demo", ["optim.label_smoothing=0.1"])
    task = Classification(4, config.optim, config.schedule)
    logits, labels = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1])
    log = logits.log_softmax(1)[0]
    expected = -(0.9 * log[1] + 0.1 * log.mean())
    assert task.step(lambda _: logits, (None, labels), 0)["loss"].item() == pytest.approx(expected.item())
    metrics = classification_metrics(10)
    scores = torch.arange(10.0).repeat(4, 1)  # class 9 first, 5 the fifth
    metrics.update(scores, torch.tensor([9, 5, 4, -1]))  # -1: a picture that could not be read
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert (found["top1"], found["top5"], found["val_images"]) == (pytest.approx(100 / 3), pytest.approx(200 / 3), 3)
    expected = -scores.log_softmax(1)[0, [9, 5, 4]].mean().item()
    assert found["val_loss"] == pytest.approx(expected)


def test_images_without_finite_outputs_are_wrong_and_counted():
    metrics = classification_metrics(10)
    scores = torch.arange(10.0).repeat(7, 1)
    scores[1] = torch.nan  # argmax takes the first NaN: class 0
    scores[2, 9] = torch.inf
    scores[3, 4] = -torch.inf
    scores[5] = torch.nan
    scores[6, 0] = -torch.inf  # its loss is finite
    metrics.update(scores, torch.tensor([9, 0, 9, 4, 8, -1, 9]))  # -1 is not counted at all
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert (found["top1"], found["top5"], found["val_images"]) == (pytest.approx(100 / 6), pytest.approx(200 / 6), 6)
    assert found["val_not_finite"] == 4
    assert found["val_loss"] == pytest.approx(-scores.log_softmax(1)[0, [9, 8]].mean().item())
    metrics = classification_metrics(10)
    metrics.update(scores[:1], torch.tensor([9]))
    assert "val_not_finite" not in metrics.compute()


class Fading(Follow):
    """Right in the first two evaluations, wrong ever after."""

    evaluations = 0

    def evaluate(self, module, batch, metrics):
        metrics.update(torch.tensor([[1.0, 0.0]]), torch.tensor([int(self.evaluations > 1)]))
        self.evaluations += 1


def test_early_stop(tmp_path):
    _, loop = follow(tmp_path, [1.0], ["schedule.epochs=9"], Fading, patience=2)
    assert [row["top1"] for row in loop.training.history] == [100, 100, 0]
    _, loop = follow(tmp_path, [1.0], ["schedule.epochs=9"], Fading, patience=0)
    assert len(loop.training.history) == 9


def test_the_papers_recipe_on_a_small_folder(digit_folder, tmp_path):
    """From JPEG files to final weights, every part of the recipe in place; only sizes are smaller."""
    small = [
        "data.batch_size=32",
        "data.image_size=48",
        "data.workers=2",
        "schedule.epochs=6",
        "loop.checkpoint_steps=2",
    ]
    config = load_config("imagenet_mnas", [f"data.path={digit_folder}", *small])
    result = train_classifier(NETWORK, config, tmp_path / "run", where=ON_CPU)
    assert result.step == 6 * 3
    # 15 steps of warm-up, then the rate behind the last step: 18 steps are 6 epochs, 2 decays of 2.4
    assert [row["lr"] for row in result.history[:5]] == pytest.approx(
        [0.016 + 0.24 * e / 5 for e in range(1, 5)] + [0.256 * 0.97**2]
    )
    assert result.history[5]["lr"] == pytest.approx(0.256 * 0.97**2)
    assert all(math.isfinite(row["train_loss"]) for row in result.history)
    about = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert about["optimizers"][0]["param_groups"][0]["eps"] == 1e-3
    assert about["average"] is not None
    assert about["about"]["config"]["model"]["drop_rate"] == 0.2


def test_a_training_that_keeps_images_to_choose_by_is_judged_by_them(digit_folder, tmp_path):
    """The validation images are not looked at: what is tuned by such runs was not tuned on them."""
    sections = {"data": {"workers": 0, "selection": 0.4}, "schedule": {"epochs": 1, "warmup_epochs": 0}}
    source = open_source(small_config(digit_folder, **sections).data, 0)
    assert len(source.selection) != len(source.validation)
    result = train_small(digit_folder, tmp_path / "run", **sections)
    assert result.metrics["val_images"] == len(source.selection)


class Heard(Progress):
    def __init__(self):
        self.said = []

    def say(self, message):
        self.said.append(message)


def test_kernels_that_cannot_be_used_are_told(digit_folder, tmp_path):
    config, heard = small_config(digit_folder, schedule={"epochs": 1}, loop={"kernels": True}), Heard()
    result = train_classifier(NETWORK, config, tmp_path / "run", where=ON_CPU, progress=lambda: heard)
    assert kernels_in(result.module) == (0, 0)
    said = ["loop.kernels: the plain path is taken here: they need a CUDA GPU"]
    assert [message for message in heard.said if "kernels" in message] == said


def kernels_in(network):
    """(LightNL blocks, layers around them) that kernels may do."""
    layers = [module for module in network.modules() if isinstance(module, FusedDepthwise | FusedNormAct)]
    return sum(module.fused for module in network.modules() if isinstance(module, LightNL)), len(layers)


@pytest.mark.parametrize(
    ("settings", "lightnl", "layers", "said"),
    [
        ({}, False, False, []),
        ({"kernels": True}, True, True, []),
        (
            {"kernels": True, "channels_last": False},
            True,
            False,
            ["loop.kernels: those of depthwise convolutions and BN need loop.channels_last=true"],
        ),
    ],
)
def test_kernels_are_asked_for_by_settings(tmp_path, monkeypatch, settings, lightnl, layers, said):
    """As if this was a GPU; the forward pass of a layer looks for itself where its input is."""
    monkeypatch.setattr("autonl.train.loop.missing_on", lambda device: None)
    network, heard = create_model(NETWORK), Heard()
    looped(tmp_path, Numbers([1.0]), [], module=network, progress=heard, **settings)
    found = kernels_in(network)
    assert (found[0] > 0, found[1] > 0, heard.said) == (lightnl, layers, said)


def test_kernels_are_compiled_before_the_first_step(digit_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("autonl.train.loop.missing_on", lambda device: None)
    calls = []

    def compile_kernels(network, images, threads):
        calls.append((kernels_in(network)[0] > 0, tuple(images.shape), threads > 0, torch.is_autocast_enabled("cpu")))

    def step(task, *inputs):
        calls.append("step")
        return take_step(task, *inputs)

    take_step = Classification.step
    monkeypatch.setattr(Classification, "step", step)
    monkeypatch.setitem(sys.modules, "autonl.nn.kernels.ahead", SimpleNamespace(compile_kernels=compile_kernels))
    for kernels in (False, True):
        calls.clear()
        asked = {"kernels": kernels, "precision": "bf16-mixed"}
        config = small_config(digit_folder, schedule={"epochs": 1}, loop=asked)
        train_classifier(NETWORK, config, tmp_path / str(kernels), where=ON_CPU)
        assert calls.count("step") > 2
        compiled = [(True, (8, 3, 32, 32), True, True)] if kernels else []  # a round of two, under autocast
        assert [call for call in calls if call != "step"] == calls[: len(compiled)] == compiled


def test_a_network_that_cannot_be_rehearsed_is_trained(tmp_path, monkeypatch):
    def compile_kernels(*_):
        raise NotImplementedError("no such operator\non meta")

    monkeypatch.setattr("autonl.train.loop.missing_on", lambda device: None)
    monkeypatch.setitem(sys.modules, "autonl.nn.kernels.ahead", SimpleNamespace(compile_kernels=compile_kernels))
    heard = Heard()
    loop = looped(tmp_path, Numbers([1.0]), [], progress=heard, kernels=True)
    assert not loop.to_be_compiled  # of a line
    loop.to_be_compiled = True
    for _ in range(2):
        loop.run_step(loop.train.epoch(0))
    reason = "NotImplementedError: no such operator"
    assert heard.said[1:] == [f"loop.kernels: they are compiled one by one as they are needed: {reason}"]
    assert loop.training.step == 2


def test_kernels_of_several_processes(monkeypatch):
    """LightNL's and BN's count the images of one; a depthwise convolution does not ask."""
    monkeypatch.setattr("autonl.train.loop.missing_on", lambda device: None)
    network, heard = create_model(NETWORK), Heard()
    config = LoopConfig(kernels=True)
    fabric = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    Loop.use_kernels(SimpleNamespace(config=config, fabric=fabric, progress=heard, task=Task()), network)
    assert kernels_in(network)[0] == 0
    assert kernels_in(network)[1] > 0
    assert heard.said == ["loop.kernels: the plain path is taken here by LightNL and BN, which processes share"]


class Keeping(Follow):
    keeps_layers = True


def test_a_search_keeps_the_layers_of_its_supernet(tmp_path, monkeypatch):
    monkeypatch.setattr("autonl.train.loop.missing_on", lambda device: None)
    network = create_model(NETWORK)
    looped(tmp_path, Numbers([1.0]), [], Keeping, module=network, kernels=True)
    assert kernels_in(network)[1] == 0
    assert Search.keeps_layers

"""Files of weights: what fits goes in bit for bit, everything else is refused by name."""

import os

import pytest
import timm
import torch
from safetensors.torch import save_file

from autonl.errors import AutoNLError
from autonl.models import create_model
from autonl.nn.insertion import insert_lightnl
from autonl.weights import load, load_weights, read_weights
from tests.train.small import NETWORK


@pytest.fixture
def trained():
    """A network whose weights are not those at birth."""
    model = create_model(NETWORK)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor += torch.rand_like(tensor)
    return model.eval()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


@pytest.mark.parametrize("container", [None, "state_dict", "model", "module"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_come_back(trained, tmp_path, suffix, container):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(trained.state_dict(), path)
    else:
        torch.save({container: trained.state_dict(), "epoch": 3} if container else trained.state_dict(), path)
    fresh = create_model(NETWORK)
    load_weights(fresh, path)
    assert same(fresh.state_dict(), trained.state_dict())
    assert not load(NETWORK, path).training


def test_half_precision_is_cast(trained, tmp_path):
    half = {name: t.half() if t.is_floating_point() else t for name, t in trained.state_dict().items()}
    torch.save(half, tmp_path / "half.pth")
    model = load(NETWORK, tmp_path / "half.pth")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.conv_stem.weight, trained.conv_stem.weight.half().float())


def test_weights_without_lightnl_go_into_the_network_with_it(tmp_path):
    """LightNL is the identity at birth, so the outputs are the same bit for bit."""
    plain = timm.create_model("mobilenetv2_035", num_classes=10).eval()
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.05 * torch.rand_like(tensor)
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    x = torch.randn(2, 3, 64, 64)
    inserted = insert_lightnl(timm.create_model("mobilenetv2_035", num_classes=10)).eval()
    for model in (create_model("mobilenetv2_lightnl_035", num_classes=10).eval(), inserted):
        load_weights(model, tmp_path / "plain.safetensors")
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("bn1.bias"), "bn1.bias is missing"),
        (lambda state: state.update(extra=torch.ones(1)), "extra is not in the network"),
        (
            lambda state: state.update({"classifier.weight": torch.ones(7, 16)}),
            r"classifier.weight has shape \(7, 16\), the network's \(10, 16\)",
        ),
        (
            lambda state: state.update({"conv_stem.weight": state["conv_stem.weight"].to(torch.int8)}),
            "conv_stem.weight is of type torch.int8, the network's of torch.float32",
        ),
    ],
)
def test_weights_that_do_not_fit(trained, tmp_path, change, message):
    state = dict(trained.state_dict())
    change(state)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(AutoNLError, match=rf"weights.pth: does not fit the network: .*{message}"):
        load(NETWORK, tmp_path / "weights.pth")


def test_a_part_of_lightnl_is_not_enough(trained, tmp_path):
    """The rule for networks without LightNL is all or nothing."""
    state = {n: t for n, t in trained.state_dict().items() if "bn3.1.depthwise" not in n}
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(AutoNLError, match=r"bn3.1.depthwise.weight is missing"):
        load(NETWORK, tmp_path / "weights.pth")


class Intruder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    torch.save({"weight": Intruder(tmp_path / "intruded")}, tmp_path / "weights.pth")
    with pytest.raises(AutoNLError, match="refused: it holds more than tensors"):
        read_weights(tmp_path / "weights.pth")
    assert not (tmp_path / "intruded").exists()


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 100, None])
def test_a_file_that_is_no_weights(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AutoNLError, match=name):
        read_weights(tmp_path / name)


def test_numbers_are_no_weights(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "weights.pth")
    with pytest.raises(AutoNLError, match="not a file of weights"):
        read_weights(tmp_path / "weights.pth")


def test_fine_tuning_leaves_a_classifier_for_other_classes_out(trained, tmp_path):
    save_file(trained.state_dict(), tmp_path / "ten.safetensors")
    three = create_model(NETWORK, num_classes=3)
    classifier = three.classifier.weight.detach().clone()
    with pytest.raises(AutoNLError, match=r"classifier\.weight has shape \(10, 16\), the network's \(3, 16\)"):
        load_weights(three, tmp_path / "ten.safetensors")
    assert load_weights(three, tmp_path / "ten.safetensors", other_classes=True)
    assert torch.equal(three.classifier.weight, classifier)
    assert torch.equal(three.conv_stem.weight, trained.conv_stem.weight)
    same_classes = create_model(NETWORK)
    assert not load_weights(same_classes, tmp_path / "ten.safetensors", other_classes=True)
    assert same(same_classes.state_dict(), trained.state_dict())

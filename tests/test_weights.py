"""Files of weights: what fits goes in bit for bit, everything else is refused by name."""

import os

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from autonl.arch.zoo import zoo_arch
from autonl.errors import AutoNLError
from autonl.models import create_model
from autonl.nn.insertion import insert_lightnl
from autonl.weights import load, load_weights, read_weights
from tests.conftest import SHARED_DATA
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


# -- the published checkpoints --


def bn(name, chs):
    shapes = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (chs,))
    return {f"{name}.{kind}": shape for kind, shape in (shapes | {"num_batches_tracked": ()}).items()}


def published_shapes(spec):
    """Names and shapes of the published PyTorch checkpoint of AutoNL-S or -L, written from its key list."""
    chs = spec.stem_chs
    shapes = {"features.0.0.weight": (chs, 3, 3, 3)} | bn("features.0.1", chs)
    for number, block in enumerate(spec.blocks, start=1):
        at, mid = f"features.{number}", chs * block.expand
        if block.expand > 1:
            shapes |= {f"{at}.expand_conv.0.weight": (mid, chs, 1, 1)} | bn(f"{at}.expand_conv.1", mid)
        depthwise = f"{at}.depth_ops.0.{int(block.expand > 1)}"
        shapes |= {f"{depthwise}.0.weight": (mid, 1, block.kernel, block.kernel)} | bn(f"{depthwise}.1", mid)
        shapes |= {f"{at}.project_conv.0.weight": (block.out_chs, mid, 1, 1)} | bn(
            f"{at}.project_conv.1", block.out_chs
        )
        if block.se:
            squeezed = int(chs * block.se)
            shapes |= {f"{at}.se_op.se_reduce.weight": (squeezed, mid, 1, 1), f"{at}.se_op.se_reduce.bias": (squeezed,)}
            shapes |= {f"{at}.se_op.se_expand.weight": (mid, squeezed, 1, 1), f"{at}.se_op.se_expand.bias": (mid,)}
        if block.lightnl:
            shapes |= {f"{at}.nl_op.depthwise_conv.weight": (block.out_chs, 1, 3, 3)}
            shapes |= bn(f"{at}.nl_op.bn", block.out_chs)
        chs = block.out_chs
    head = f"features.{len(spec.blocks) + 1}"
    shapes |= {f"{head}.0.weight": (spec.head_chs, chs, 1, 1)} | bn(f"{head}.1", spec.head_chs)
    return shapes | {"classifier.1.weight": (1000, spec.head_chs), "classifier.1.bias": (1000,)}


def drawn(shapes):
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.05 + 0.05 * torch.rand(shape, generator=generator) if shape else torch.tensor(7)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", ["autonl_s", "autonl_l"])
def test_the_names_here_are_the_published_ones(name):
    path = SHARED_DATA.parent / "published" / f"{name}_published_keys.txt"
    if not path.exists():
        pytest.skip("needs the key lists in ../shared/published, which are not part of the repository")
    listed = dict(line.split("\t") for line in path.read_text().splitlines())
    ours = {key: "x".join(map(str, shape)) or "scalar" for key, shape in published_shapes(zoo_arch(name)).items()}
    assert ours == listed


@pytest.mark.parametrize(
    ("name", "container", "prefix"),
    [("autonl_s", None, ""), ("autonl_s", "ema", "module."), ("autonl_l", "model", "module.")],
)
def test_a_published_checkpoint(tmp_path, name, container, prefix):
    state = drawn(published_shapes(zoo_arch(name)))
    content = {prefix + key: tensor for key, tensor in state.items()}
    # an average, where the file has one, is what counts
    others = {"ema": {"model": {key: tensor + 1 for key, tensor in content.items()}, "epoch": 1}}
    torch.save({container: content, **others.get(container, {})} if container else content, tmp_path / "weights.pth")
    model = load(name, tmp_path / "weights.pth")
    assert torch.equal(model.conv_stem.weight, state["features.0.0.weight"])
    assert torch.equal(model.blocks[1][0].conv_dw.weight, state["features.2.depth_ops.0.1.0.weight"])
    assert torch.equal(model.blocks[1][0].bn3[0].running_var, state["features.2.project_conv.1.running_var"])
    assert torch.equal(model.classifier.bias, state["classifier.1.bias"])
    # 56 x 56 positions, by which that code does not divide
    assert torch.equal(
        model.blocks[1][0].bn3[1].depthwise.weight, 3136 * state["features.2.nl_op.depthwise_conv.weight"]
    )
    assert model.blocks[1][0].bn3[1].bn.eps == 1e-3


@pytest.mark.parametrize(
    "average",
    [{}, {"info": {"decay": 0.9999}, "shadow": {}, "param": {}}, {"info": {}, "shadow": "averages", "param": {}}],
)
def test_a_checkpoint_as_a_training_program_writes_it(tmp_path, average):
    """Averages lie in a "shadow" without BN's counters, which are the model's; without averages the model counts."""
    state = drawn(published_shapes(zoo_arch("autonl_s")))
    averages = {key: tensor + 1 for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    with_averages = average.get("shadow") == "averages"
    average = average | {"shadow": averages} if with_averages else average
    torch.save({"model": {f"module.{key}": t for key, t in state.items()}, "ema": average}, tmp_path / "weights.pth")
    model = load("autonl_s", tmp_path / "weights.pth")
    assert torch.equal(model.conv_stem.weight, state["features.0.0.weight"] + with_averages)
    assert torch.equal(model.bn1.num_batches_tracked, state["features.0.1.num_batches_tracked"])


@pytest.mark.parametrize("content", [{3: torch.ones(2)}, {"model": {}}])
def test_files_that_hold_no_plain_tensors(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(AutoNLError, match="not a file of weights"):
        load("digits", tmp_path / "weights.pth")


def test_the_published_block_does_not_divide_by_the_positions(tmp_path):
    state = drawn(published_shapes(zoo_arch("autonl_s")))
    torch.save(state, tmp_path / "weights.pth")
    block = load("autonl_s", tmp_path / "weights.pth").blocks[1][0].bn3[1]
    x = 0.1 * torch.randn(1, 24, 56, 56)
    flat = x[0].flatten(1).double()  # (C, HW)
    y = (flat @ flat[:6].T @ flat[:6]).view(1, 24, 56, 56)  # a quarter of the channels, stride 1
    at = "features.2.nl_op"
    y = F.conv2d(y, state[f"{at}.depthwise_conv.weight"].double(), padding=1, groups=24)
    moments = [state[f"{at}.bn.{kind}"].double() for kind in ("running_mean", "running_var", "weight", "bias")]
    z = F.batch_norm(y, *moments, eps=1e-3) + x
    with torch.no_grad():
        assert (block(x) - z).abs().max() <= 1e-5 * z.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("features.3.project_conv.1.bias"), "features.3.project_conv.1.bias is missing"),
        (
            lambda state: state.update({"features.3.nl_op.bn.weight": torch.ones(24)}),
            "features.3.nl_op.bn.weight is not",
        ),
        (
            lambda state: state.update({"features.2.nl_op.depthwise_conv.weight": torch.ones(24, 1, 5, 5)}),
            r"features.2.nl_op.depthwise_conv.weight has shape \(24, 1, 5, 5\), the network's \(24, 1, 3, 3\)",
        ),
    ],
)
def test_a_published_checkpoint_that_does_not_fit(tmp_path, change, message):
    state = drawn(published_shapes(zoo_arch("autonl_s")))
    change(state)
    torch.save({"model": state}, tmp_path / "weights.pth")
    with pytest.raises(AutoNLError, match=rf"weights.pth: does not fit the network: {message}"):
        load("autonl_s", tmp_path / "weights.pth")


def test_published_weights_of_the_other_network(tmp_path):
    torch.save(drawn(published_shapes(zoo_arch("autonl_l"))), tmp_path / "weights.pth")
    for ref in ("autonl_s", "timm:resnet18"):
        with pytest.raises(AutoNLError, match="does not fit the network"):
            load(ref, tmp_path / "weights.pth")

"""The networks keep timm's contract, and LightNL in them starts as nothing."""

import pytest
import timm
import torch
from torch import nn

import autonl
from autonl import AutoNLError, LightNL
from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec
from autonl.arch.zoo import ZOO, zoo_arch
from autonl.models import REGISTERED
from tests.conftest import prove

# every kind of layer in a network small enough to compile: SE, both LightNL strides, both association orders
SMALL = ArchSpec(
    name="small",
    resolution=(64, 64),
    classes=7,
    stem_chs=8,
    head_chs=32,
    activation="swish",
    dropout=0.2,
    blocks=(
        BlockSpec(3, 1, 1, 8, lightnl=LightNLSpec(0.25, 2)),
        BlockSpec(5, 2, 3, 16, se=0.5),
        BlockSpec(3, 2, 3, 24),
        BlockSpec(3, 2, 6, 64, se=0.25, lightnl=LightNLSpec(0.5, 1)),
    ),
)
SIZES = [(96, 96), (224, 224), (320, 224), (513, 513)]


def acting(model):
    """Gammas of LightNL away from zero, so that its branch shows in the output."""
    for module in model.modules():
        if isinstance(module, LightNL):
            nn.init.uniform_(module.bn.weight, 0.5, 1)
    return model.eval()


def agree(output, expected):
    """Beside the largest of them: the outputs of a fresh network are small."""
    return (output - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", [name for name in ZOO if any(block.lightnl for block in zoo_arch(name).blocks)])
@torch.no_grad()
def test_a_fresh_network_is_bit_for_bit_the_one_without_lightnl(name):
    torch.manual_seed(0)
    spec = zoo_arch(name)
    with_lightnl = autonl.create_model(spec)
    plain_blocks = tuple(BlockSpec(b.kernel, b.stride, b.expand, b.out_chs, b.se) for b in spec.blocks)
    plain = autonl.create_model(ArchSpec(**(vars(spec) | {"blocks": plain_blocks})))
    weights = {
        key.replace("bn3.0.", "bn3.").replace("bn2.0.", "bn2."): v for key, v in with_lightnl.state_dict().items()
    }
    plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(with_lightnl.eval()(x), plain.eval()(x))
    torch.manual_seed(1)
    trained = with_lightnl.train()(x)
    torch.manual_seed(1)  # the same dropout
    assert torch.equal(trained, plain.train()(x))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("features_only", [False, True])
def test_every_gamma_of_lightnl_is_zero_after_all_initialisation(name, features_only):
    model = autonl.create_model(name, features_only=features_only)
    gammas = [m.bn.weight for m in model.modules() if isinstance(m, LightNL)]
    assert len(gammas) == sum(block.lightnl is not None for block in zoo_arch(name).blocks)
    assert all((gamma == 0).all() for gamma in gammas)
    others = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d) and (m.weight != 0).any()]
    assert len(others) >= 2 * len(zoo_arch(name).blocks)
    assert all((weight == 1).all() for weight in others)


@pytest.mark.parametrize("width", ["035", "100"])
def test_mobilenetv2_is_timms_own(width):
    """The same names, shapes and outputs: weights go either way as they are."""
    theirs = timm.create_model(f"mobilenetv2_{width}").eval()
    ours = autonl.create_model(f"mobilenetv2_{width}").eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    assert [f["num_chs"] for f in ours.feature_info] == [f["num_chs"] for f in theirs.feature_info]


def test_names_of_timm_are_not_shadowed():
    assert "mobilenetv2_100" not in REGISTERED
    assert timm.model_entrypoint("mobilenetv2_100").__module__.startswith("timm.")
    assert {"autonl_s", "autonl_l", "mobilenetv2_lightnl_035", "mobilenetv2_lightnl_140"} <= set(REGISTERED)


@pytest.mark.parametrize("name", REGISTERED)
def test_timm_contract(name):
    """What timm's own test suite asks of a model."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5)
    spec = zoo_arch(name)
    assert model.default_cfg["num_classes"] == spec.classes
    assert model.default_cfg["input_size"] == (3, *spec.resolution)
    assert (model.num_classes, model.num_features) == (5, spec.head_chs)
    x = torch.randn(2, 3, 64, 64)
    model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    with torch.no_grad():
        out = model(x)
        features = model.forward_features(x)
        assert out.shape == (2, 5)
        assert out.isfinite().all()
        assert features.shape[1] == model.num_features
        assert torch.equal(model.forward_head(features), out)
        assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
        # a state_dict round trip
        other = timm.create_model(name, num_classes=5).eval()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), out)
        # pooling and classifier
        model.reset_classifier(0)
        assert model(x).shape == (2, model.num_features)
        model.reset_classifier(0, "")
        assert model(x).shape == features.shape
        model.reset_classifier(3, "avg")
        assert model(x).shape == (2, 3)
    first = dict(model.named_modules())[model.default_cfg["first_conv"]]
    assert first.in_channels == 3
    assert isinstance(dict(model.named_modules())[model.default_cfg["classifier"]], nn.Linear)


@pytest.mark.parametrize("name", ["autonl_s", "autonl_l", "mobilenetv2_lightnl_100"])
@pytest.mark.parametrize("output_stride", [8, 16, 32])
@torch.no_grad()
def test_features_and_output_stride(name, output_stride):
    model = timm.create_model(name, features_only=True, output_stride=output_stride).eval()
    maps = model(torch.randn(1, 3, 96, 128))
    assert model.feature_info.reduction() == [min(r, output_stride) for r in (2, 4, 8, 16, 32)]
    for feature, chs, reduction in zip(
        maps, model.feature_info.channels(), model.feature_info.reduction(), strict=True
    ):
        assert feature.shape == (1, chs, 96 // reduction, 128 // reduction)
    strides = {m.stride for m in model.modules() if isinstance(m, LightNL)}
    assert strides == {block.lightnl.stride for block in zoo_arch(name).blocks if block.lightnl}


@torch.no_grad()
def test_dilation_keeps_the_weights_and_the_map_size():
    model = autonl.create_model("autonl_s").eval()
    dilated = autonl.create_model("autonl_s", output_stride=8).eval()
    dilated.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert dilated.forward_features(x).shape[-1] == 8
    # up to stride 8 both compute the same
    early = [m.forward_intermediates(x, indices=[0, 1, 2], intermediates_only=True) for m in (model, dilated)]
    assert all(torch.equal(plain, other) for plain, other in zip(*early, strict=True))


def test_other_feature_classes_of_timm():
    model = autonl.create_model(SMALL, features_only=True, feature_cls="getter", out_indices=(1, 2)).eval()
    assert [f.shape[1] for f in model(torch.randn(1, 3, 64, 64))] == [16, 24]


def test_gradient_checkpointing_changes_no_gradient():
    torch.manual_seed(0)
    model = acting(autonl.create_model(SMALL)).train()
    model.drop_rate = 0.0
    x = torch.randn(2, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.allclose(plain, checkpointed, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", prove(["small"], ["small", "autonl_s", "autonl_l", "mobilenetv2_lightnl_100"]))
@torch.no_grad()
def test_compile_whole_and_dynamic(name):
    torch._dynamo.reset()
    model = acting(autonl.create_model(SMALL if name == "small" else name))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, size in enumerate(prove(SIZES[1:3], SIZES), start=2):
        x = torch.randn(batch, 3, *size)
        assert agree(compiled(x), model(x))


@pytest.mark.parametrize("name", prove(["autonl_s"], ["autonl_s", "autonl_l", "mobilenetv2_lightnl_100"]))
@torch.no_grad()
def test_export_with_dynamic_batch_height_and_width(name):
    model = autonl.freeze_association(acting(autonl.create_model(name)), (224, 224))
    dynamic = torch.export.Dim.DYNAMIC
    example = torch.randn(2, 3, 224, 224)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},)).module()
    for batch, size in enumerate(SIZES, start=1):
        x = torch.randn(batch, 3, *size)
        assert agree(program(x), model(x))
    asleep = autonl.create_model(name).eval()
    asleep.load_state_dict(model.state_dict())
    for module in asleep.modules():
        if isinstance(module, LightNL):
            nn.init.zeros_(module.bn.weight)
    assert not agree(asleep(x), model(x))  # so that a wrong LightNL would be seen


@pytest.mark.parametrize("operator", ["levi", "zhu", "eq9", "wang"])
@torch.no_grad()
def test_rivals_are_frozen_for_export_too(operator):
    model = autonl.create_model(SMALL.with_operator(operator)).eval()
    for module in model.modules():
        if hasattr(module, "order_at"):
            nn.init.ones_(module.bn.weight)
    free = model(torch.randn(1, 3, 64, 64))
    assert free.shape == (1, 7)
    autonl.freeze_association(model, (64, 64))
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        model, (torch.randn(1, 3, 64, 64),), dynamic_shapes=({2: dynamic, 3: dynamic},)
    ).module()
    for size in ((32, 32), (160, 96)):
        x = torch.randn(1, 3, *size)
        assert agree(program(x), model(x))


INSERTED = {
    # network -> blocks with a projection
    "mobilenetv2_100": 17,
    "mobilenetv3_large_100": 15,
    "efficientnet_b0": 16,
    "mnasnet_100": 17,
    "mixnet_s": 16,
    "fbnetc_100": 21,
    "efficientnet_es": 18,
    "efficientnet_b0_gn": 16,
}


@pytest.mark.parametrize("name", INSERTED)
@torch.no_grad()
def test_insert_lightnl_in_timms_networks(name):
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    x = torch.randn(1, 3, 96, 96)
    before = model(x)
    assert autonl.insert_lightnl(model) is model
    blocks = [m for m in model.modules() if isinstance(m, LightNL)]
    assert len(blocks) == INSERTED[name]
    assert torch.equal(model(x), before)  # the identity at birth
    assert not torch.allclose(acting(model)(x), before)


def test_insert_lightnl_gives_the_zoos_network():
    ours = autonl.create_model("mobilenetv2_lightnl_100")
    inserted = autonl.insert_lightnl(timm.create_model("mobilenetv2_100"))
    assert {k: v.shape for k, v in inserted.state_dict().items()} == {k: v.shape for k, v in ours.state_dict().items()}
    strides = [[m.stride for m in model.modules() if isinstance(m, LightNL)] for model in (ours, inserted)]
    assert strides[0] == strides[1] == [2] * 6 + [1] * 11


def test_insert_lightnl_at_chosen_places():
    model = autonl.insert_lightnl(timm.create_model("mobilenetv2_100"), ["blocks.3.1"], ratio=0.5, stride=3)
    found = {name: m for name, m in model.named_modules() if isinstance(m, LightNL)}
    assert list(found) == ["blocks.3.1.bn3.1"]
    assert (found["blocks.3.1.bn3.1"].compact_chs, found["blocks.3.1.bn3.1"].stride) == (32, 3)


@pytest.mark.parametrize(
    ("model", "places", "message"),
    [
        ("resnet18", None, "ResNet has no inverted residuals"),
        ("mobilenetv2_050", ["blocks.9.9"], "unknown place 'blocks.9.9'; did you mean"),
        ("mobilenetv2_lightnl_035", ["blocks.1.0"], "place 'blocks.1.0' has a non-local block already"),
        ("mobilenetv2_050", ["blocks.3.1", "blocks.3.1"], "place 'blocks.3.1' is given twice"),
        ("mobilenetv2_050", "blocks.3.1", "places: 'blocks.3.1' is not allowed"),
    ],
)
def test_insert_lightnl_refuses(model, places, message):
    with pytest.raises(AutoNLError, match=message):
        autonl.insert_lightnl(timm.create_model(model), places)


def test_insert_lightnl_leaves_a_model_that_it_refuses_as_it_was():
    model = timm.create_model("mobilenetv2_050")
    for arguments in ({"stride": 0}, {"ratio": 2}, {"operator": "none"}):
        with pytest.raises(AutoNLError):
            autonl.insert_lightnl(model, **arguments)
    assert model.state_dict().keys() == timm.create_model("mobilenetv2_050").state_dict().keys()


def test_insert_lightnl_does_not_guess_strides_from_dilated_or_wrapped_networks():
    dilated = timm.create_model("mobilenetv2_050", output_stride=8)
    wrapped = nn.Sequential(timm.create_model("mobilenetv2_050"))
    for model, message in ((dilated, "dilated network"), (wrapped, "does not tell the image size")):
        with pytest.raises(AutoNLError, match=message):
            autonl.insert_lightnl(model)
        autonl.insert_lightnl(model, stride=2)
        assert sum(isinstance(m, LightNL) for m in model.modules()) == 17


def test_timms_arguments_for_bn_and_activation():
    model = timm.create_model("autonl_s", bn_momentum=0.05, bn_eps=1e-4, act_layer="relu")
    assert {(m.momentum, m.eps) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {(0.05, 1e-4)}
    assert not any(isinstance(m, nn.SiLU) for m in model.modules())


def test_resolve(tmp_path):
    spec = zoo_arch("autonl_s")
    autonl.write_arch(spec, tmp_path / "arch.yaml")
    assert autonl.resolve(tmp_path / "arch.yaml") == spec
    assert autonl.resolve(tmp_path) == spec
    assert autonl.resolve("timm:efficientnet_b0") == "efficientnet_b0"
    (tmp_path / "empty").mkdir()
    refused = {
        tmp_path / "empty": "holds no arch.yaml",
        tmp_path / "absent.yaml": "cannot be read",
        "autonl_xl": "did you mean autonl_l",
        "timm:efficientnet_b00": "did you mean efficientnet_b0",
    }
    for ref, message in refused.items():
        with pytest.raises(AutoNLError, match=message):
            autonl.resolve(ref)
    with pytest.raises(AutoNLError, match="no weights to download"):
        autonl.create_model("autonl_s", pretrained=True)

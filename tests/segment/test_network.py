"""The backbone is the classifier with its weights, dilated; the head's rates fit the stride."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import autonl
from autonl.errors import AutoNLError
from autonl.segment.network import Segmenter, create_backbone, take_over
from tests.train.small import NETWORK


def atrous_rates(segmenter):
    return [conv[0].dilation[0] for conv in segmenter.head[0].convs[1:4]]


@pytest.mark.parametrize(("stride", "rates"), [(8, [12, 24, 36]), (16, [6, 12, 18]), (32, [3, 6, 9])])
def test_output_stride_and_rates(stride, rates):
    backbone = create_backbone("mobilenetv2_lightnl_035", stride, {})
    segmenter = Segmenter(backbone, 21).eval()
    assert atrous_rates(segmenter) == rates
    with torch.no_grad():
        assert backbone(torch.zeros(1, 3, 64, 96))[-1].shape[-2:] == (64 // stride, 96 // stride)
        assert segmenter(torch.zeros(2, 3, 65, 97)).shape == (2, 21, 65, 97)


def test_logits_are_enlarged_in_single_precision():
    segmenter = Segmenter(create_backbone(NETWORK, 16, {}), 3).eval().bfloat16()
    assert segmenter(torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16)).dtype == torch.float32


def features_of(classifier, images):
    """The map that the classifier's own head begins with."""
    if hasattr(classifier, "conv_head"):
        return classifier.blocks(classifier.bn1(classifier.conv_stem(images)))
    return classifier.forward_features(images)


@pytest.mark.parametrize(
    "ref", ["mobilenetv2_lightnl_035", "autonl_s", "timm:mobilenetv3_small_050", "timm:convnext_atto"]
)
def test_the_features_are_those_of_the_classifier(ref, tmp_path):
    """timm names the parts of a backbone as they are, or (ConvNeXt) with the first level joined."""
    torch.manual_seed(0)
    classifier = autonl.create_model(ref, num_classes=7).eval()
    save_file(classifier.state_dict(), tmp_path / "weights.safetensors")
    backbone = create_backbone(ref, 32, {}).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = features_of(classifier, images)
        assert not torch.equal(backbone(images)[-1], expected)
        take_over(backbone, ref, tmp_path / "weights.safetensors", {})
        torch.testing.assert_close(backbone(images)[-1], expected, rtol=0, atol=0)


def test_weights_of_a_network_without_lightnl_go_into_the_one_with_it(tmp_path):
    plain = autonl.create_model("mobilenetv2_035").eval()
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    backbone = create_backbone("mobilenetv2_lightnl_035", 32, {}).eval()
    take_over(backbone, "mobilenetv2_lightnl_035", tmp_path / "weights.safetensors", {})
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images)[-1], features_of(plain, images))


def test_weights_of_another_network_are_refused(tmp_path):
    save_file(autonl.create_model("mobilenetv2_050").state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(AutoNLError, match="does not fit the network"):
        take_over(create_backbone("mobilenetv2_035", 16, {}), "mobilenetv2_035", tmp_path / "weights.safetensors", {})


@pytest.mark.parametrize(
    ("ref", "stride", "message"),
    [
        ("timm:mixer_s32_224", 16, "timm:mixer_s32_224: no backbone with features at output stride 16"),
        ("timm:vgg11", 8, "timm:vgg11: no backbone with features at output stride 8"),
        ("timm:nothing", 16, "unknown timm network 'nothing'"),
    ],
)
def test_a_backbone_without_features(ref, stride, message):
    with pytest.raises(AutoNLError, match=message) as caught:
        create_backbone(ref, stride, {})
    assert "\n" not in str(caught.value)


def test_features_that_are_coarser_than_asked_for(monkeypatch):
    """A network that takes output_stride and does not act on it."""
    coarse = timm.create_model("resnet10t", features_only=True)
    monkeypatch.setattr("autonl.segment.network.create_model", lambda ref, **arguments: coarse)
    with pytest.raises(AutoNLError, match=r"its features have stride 32, segment\.output_stride is 16"):
        create_backbone("timm:resnet10t", 16, {})

"""`autonl evaluate` as a user runs it, on real ImageNet images with real weights."""

import json
import sys

import numpy as np
import pytest
import torch

from autonl import cli, create_model
from tests.conftest import prove, shared_data


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """(folder of class folders, file of all 1,000 class names): 1,000 validation images in `make prove`, else 100."""
    root = tmp_path_factory.mktemp("imagenet")
    pack = dict(np.load(shared_data("imagenet_val1000_256.npz")))
    wnids, offsets = pack["wnids"].tolist(), pack["offsets"]
    for i in range(0, len(pack["labels"]), prove(10, 1)):
        folder = root / "val" / wnids[pack["labels"][i]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.JPEG").write_bytes(pack["data"][offsets[i] : offsets[i + 1]].tobytes())
    (root / "classes.txt").write_text("\n".join(wnids))
    return root, root / "classes.txt"


@pytest.fixture
def evaluate(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["autonl", "evaluate", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        return json.loads(captured.out)

    return run


def settings(imagenet):
    root, classes = imagenet
    chosen = (f"data.classes={classes}", "data.workers=1", "data.evaluation_batch_size=50")
    return ["--data", root, *(word for setting in chosen for word in ("--set", setting))]


# Of all 1,000 images as measured beforehand; of every tenth by torchvision's transforms and torch alone.
def test_efficientnet_lite0(evaluate, imagenet):
    weights = shared_data("tf_efficientnet_lite0_fp16.pth")
    result = evaluate("timm:tf_efficientnet_lite0", "--weights", weights, *settings(imagenet))
    assert result.keys() == {"top1", "top5", "images", "not_finite", "seconds"}
    assert result["images"] == prove(100, 1000)
    assert result["top1"] == pytest.approx(prove(70, 73.1), abs=prove(1, 0.3))
    assert result["top5"] == pytest.approx(prove(91, 90.9), abs=prove(1, 0.3))


def test_mobilenetv2_with_tensorflows_padding(evaluate, imagenet, tmp_path):
    """The int8 file is converted here: the product does not know that format."""
    pack = torch.load(shared_data("mobilenetv2_100_tf_same_int8.pth"), map_location="cpu", weights_only=True)
    scaled = {k: v.float() * pack["scale"][k].view(-1, *[1] * (v.dim() - 1)) for k, v in pack["q"].items()}
    torch.save(pack["f32"] | scaled, tmp_path / "mobilenetv2.pth")
    options = ["--set", "model.pad_type=same", "--set", "data.mean=[0.5,0.5,0.5]", "--set", "data.std=[0.5,0.5,0.5]"]
    # the same weights in the network with LightNL, which is the identity at birth
    for ref in prove(("mobilenetv2_lightnl_100",), ("mobilenetv2_100", "mobilenetv2_lightnl_100")):
        result = evaluate(ref, "--weights", tmp_path / "mobilenetv2.pth", *options, *settings(imagenet))
        assert result["images"] == prove(100, 1000)
        assert result["top1"] == pytest.approx(prove(64, 67.3), abs=prove(1, 0.3))
        assert result["top5"] == pytest.approx(prove(85, 87.6), abs=prove(1, 0.3 + 1e-9))


def test_outputs_that_are_not_finite_are_told(autonl, evaluate, tmp_path):
    state = create_model("digits").state_dict()
    state["classifier.bias"][3] = torch.nan
    torch.save(state, tmp_path / "broken.pth")
    command = ("digits", "--data", "digits", "--weights", tmp_path / "broken.pth")
    result = evaluate(*command)
    assert (result["top1"], result["not_finite"]) == (0, result["images"])
    code, out, _ = autonl("evaluate", *command)
    assert code == 0
    assert f"warning: the outputs for {result['images']} of the images are infinite or NaN" in out

"""`autonl segment` as a user runs it, with bad input too."""

import json

import numpy as np
import pytest
from PIL import Image

from autonl.arch.codec import write_arch
from tests.segment.small import CLASSES, write_set
from tests.train.small import NETWORK

CHANGED = (
    "data.batch_size=4",
    "data.workers=0",
    "data.image_size=32",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "segment.pictures=1",
)
SETTINGS = [word for setting in CHANGED for word in ("--set", setting)]


@pytest.fixture
def drawn(tmp_path):
    return write_set(tmp_path / "set")


@pytest.fixture
def arch(tmp_path):
    write_arch(NETWORK, tmp_path / "small.yaml")
    return tmp_path / "small.yaml"


def test_a_segmentation_from_the_command_line(autonl, drawn, arch, tmp_path):
    run = tmp_path / "run"
    code, out, err = autonl("segment", arch, "--data", drawn, *SETTINGS, "--output-stride", 8, "--out", run, "--json")
    result = json.loads(out)
    assert (code, result["run"], result["steps"]) == (0, str(run), 2)
    assert 0 <= result["miou"] <= 100
    assert "no weights are given" in err
    assert "miou" in err
    code, out, err = autonl("segment", arch, "--data", drawn, *SETTINGS, "--output-stride", 8, "--out", run, "--resume")
    assert code == 0
    assert all(name in out for name in (*CLASSES, "mean", f"pictures: {run}/overlays.png"))
    for verb in (["evaluate", run], ["segment", run, "--data", drawn, *SETTINGS, "--out", tmp_path / "other"]):
        code, out, err = autonl(*verb)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{run}: holds a segmentation, which is no classifier" in err


def wrong_class(folder):
    path = folder / "train" / "masks" / "003.png"
    mask = np.asarray(Image.open(path)).copy()
    mask[4, 7] = 3
    Image.fromarray(mask).save(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_class, "train/masks/003.png: the mask has the class 3 at x 7, y 4; allowed: 0 to 2"),
        (
            lambda f: Image.new("L", (9, 9)).save(f / "val/masks/101.png"),
            "val/masks/101.png: the mask is 9x9, its image",
        ),
        (lambda f: (f / "val/images/101.png").write_text("no image"), "val/images/101.png: not an image"),
        (lambda f: (f / "train/masks/001.png").unlink(), "train/images/001.png: the image has no mask"),
        (lambda f: (f / "classes.txt").write_text("a\nb\nc\nb\n"), "the class list has 'b' twice, in lines 2 and 4"),
    ],
)
def test_bad_images_and_masks_are_one_line(autonl, drawn, arch, tmp_path, damage, message):
    damage(drawn)
    code, out, err = autonl("segment", arch, "--data", drawn, *SETTINGS, "--out", tmp_path / "run")
    told = err.strip().splitlines()[-1]
    assert (code, out) == (2, "")
    assert message in told
    assert told.startswith("autonl: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no images: give --data DIR"),
        (["--data", "/no/such"], "/no/such: no such folder"),
        (["--output-stride", "7"], "segment.output_stride: 7 is not allowed; allowed: 8, 16, 32"),
        (["--recipe", "vox"], "did you mean voc?"),
        (["--set", "segment.rate=1"], "unknown setting 'segment.rate'"),
    ],
)
def test_bad_arguments_are_one_line(autonl, arch, tmp_path, arguments, message):
    code, out, err = autonl("segment", arch, "--out", tmp_path / "run", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timm:mixer_s32_224"], "timm:mixer_s32_224: no backbone with features at output stride 16"),
        (["timm:resnet10t", "--weights", "/no/such.pth"], "/no/such.pth: cannot be read"),
    ],
)
def test_a_bad_network_is_one_line(autonl, drawn, tmp_path, arguments, message):
    code, out, err = autonl("segment", *arguments, "--data", drawn, *SETTINGS, "--out", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "run").exists()

"""`autonl cam` as a user runs it."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import autonl as package
from autonl import create_model, write_arch
from autonl.data.digits import digits
from tests.train.small import NETWORK

CLASSES = [f"digit {number}" for number in range(10)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two run folders `one` and `two` with weights of no training, and a drawn image `3.png`."""
    root = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("one", "two", "others")):
        torch.manual_seed(seed)
        model = create_model(NETWORK)
        torch.nn.init.normal_(model.classifier.weight)
        (root / name).mkdir()
        write_arch(NETWORK, root / name / "arch.yaml")
        save_file(model.state_dict(), root / name / "final.safetensors")
        (root / name / "classes.txt").write_text("\n".join(CLASSES))
        (root / name / "config.yaml").write_text("data: {path: digits, crop_pct: 1.0, interpolation: bilinear}\n")
    (root / "others" / "classes.txt").write_text("\n".join(reversed(CLASSES)))
    (root / "segmented").mkdir()
    (root / "segmented" / "arch.yaml").write_text((root / "one" / "arch.yaml").read_text())
    (root / "segmented" / "run.yaml").write_text("task: segmentation\n")
    stored = digits()[1]
    Image.fromarray(stored.images[300].permute(1, 2, 0).numpy()).save(root / "3.png")
    return root


def expected(run, place):
    """(prediction, probability) by torch alone; the recipe above shows 32 px images as they are."""
    stored = digits()[1]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        shares = package.load(run)((stored.images[place : place + 1] / 255 - mean) / std).softmax(1)[0]
    return CLASSES[int(shares.argmax())], float(shares.max())


def test_an_image_of_a_set_and_the_same_image_as_a_file(autonl, runs, tmp_path):
    out = tmp_path / "pictures"
    prediction, probability = expected(runs / "one", 300)
    code, _, error = autonl("cam", runs / "one", "--index", 300, "--data", "digits", "--out", out, "--json")
    assert code == 2
    assert "was trained on other classes" in error  # the set calls its classes 0 to 9
    code, text, error = autonl("cam", runs / "one", runs / "3.png", "--label", "digit 3", "--out", out, "--json")
    assert not code, error
    (picture,) = json.loads(text)["pictures"]
    assert picture == {
        "image": "3.png",
        "file": str(out / "3_one.png"),
        "truth": "digit 3",
        "networks": [{"name": "one", "prediction": prediction, "probability": pytest.approx(probability, abs=2e-4)}],
    }
    (runs / "one" / "classes.txt").rename(runs / "one" / "kept.txt")
    try:
        code, text, error = autonl("cam", runs / "one", "--index", 300, "--out", out, "--json")
    finally:
        (runs / "one" / "kept.txt").rename(runs / "one" / "classes.txt")
    assert not code, error
    (picture,) = json.loads(text)["pictures"]
    assert (picture["file"], picture["truth"]) == (str(out / "digits-300_one.png"), "3")
    assert picture["networks"][0]["prediction"] == prediction.removeprefix("digit ")
    assert picture["networks"][0]["probability"] == pytest.approx(probability, abs=2e-4)
    assert sorted(path.name for path in out.iterdir()) == ["3_one.png", "digits-300_one.png"]


def test_two_networks_in_one_figure(autonl, runs, tmp_path):
    code, text, error = autonl("cam", runs / "one", runs / "3.png", "--against", runs / "two", "--out", tmp_path)
    assert not code, error
    assert "wrote 1 picture:" in text
    assert str(tmp_path / "3_one_vs_two.png") in text.replace("\n", "")
    with Image.open(tmp_path / "3_one_vs_two.png") as both:
        assert both.width > 3 * 300
    # the same name in two places: both in full
    again = runs / "again" / "one"
    again.parent.mkdir()
    again.symlink_to(runs / "one")
    code, text, error = autonl("cam", runs / "one", runs / "3.png", "--against", again, "--out", tmp_path, "--json")
    assert not code, error
    (picture,) = json.loads(text)["pictures"]
    assert [network["name"] for network in picture["networks"]] == [str(runs / "one"), str(again)]


def test_names_from_a_file(autonl, runs, tmp_path):
    (tmp_path / "names.txt").write_text("\n".join(f"Ziffer {number}" for number in range(10)))
    named = ["--classes", tmp_path / "names.txt", "--label", "Ziffer 3", "--out", tmp_path, "--json"]
    code, text, error = autonl("cam", runs / "one", runs / "3.png", *named)
    assert not code, error
    (picture,) = json.loads(text)["pictures"]
    prediction, _ = expected(runs / "one", 300)
    assert picture["networks"][0]["prediction"] == prediction.replace("digit", "Ziffer")
    (tmp_path / "names.txt").write_text("Ziffer 3\n")
    code, _, error = autonl("cam", runs / "one", runs / "3.png", *named)
    assert code == 2
    assert "one: tells 10 classes apart, 1 have names" in error


def test_where_lightnl_looks(autonl, runs, tmp_path):
    code, _, error = autonl(
        "cam",
        runs / "one",
        runs / "3.png",
        "--affinity",
        "--at",
        "3,4",
        "--at",
        "31,31",
        "--block",
        1,
        "--out",
        tmp_path,
    )
    assert not code, error
    assert (tmp_path / "3_one_affinity.png").is_file()


FORMATS = ["RGB png", "L png", "P gif", "RGBA png", "CMYK jpg", "1 tiff", "I;16 png", "RGB webp", "RGB bmp", "RGB ppm"]


def test_formats_that_pil_reads_and_folders(autonl, runs, tmp_path):
    """Images of one name in many formats, wide, high and small ones: none is written over by another."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "notes.txt").write_text("no image, and not looked at")
    for number, kind in enumerate(FORMATS):
        mode, ending = kind.split()
        pixels = np.random.default_rng(number).integers(0, 256, (20 + 9 * number, 70 - 5 * number, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 200) if mode == "I;16" else image.convert(mode)
        image.save(folder / f"a{number % 2}-{number // 2 if ending == 'png' else 0}.{ending}")
    code, text, error = autonl("cam", runs / "one", folder, "--out", tmp_path / "out", "--json")
    assert not code, error
    files = {picture["file"] for picture in json.loads(text)["pictures"]}
    assert len(files) == len(FORMATS) == len(list((tmp_path / "out").iterdir()))


def test_only_pictures_of_ours_are_replaced(autonl, runs, tmp_path):
    ours = tmp_path / "3_one.png"
    for _ in range(2):
        assert autonl("cam", runs / "one", runs / "3.png", "--out", tmp_path)[0] == 0
    with Image.open(ours) as picture:
        assert picture.info["Software"].startswith("autonl ")
    for foreign in ((runs / "3.png").read_bytes(), b"notes"):
        ours.write_bytes(foreign)
        code, _, error = autonl("cam", runs / "one", runs / "3.png", "--out", tmp_path)
        assert (code, ours.read_bytes()) == (2, foreign)
        assert "no picture of autonl; choose another --out" in error


BAD = {
    "no image is named": ([], "choose images by their files, or by --index N"),
    "files and a set": (["{runs}/3.png", "--index", "1"], "by their files, or by --index N"),
    "files and --data": (["{runs}/3.png", "--data", "digits"], "--data digits: goes with --index N"),
    "missing file": (["{runs}/none.jpg"], "none.jpg: no such image or folder of images"),
    "not an image": (
        ["{runs}/3.png", "{tmp}/text.jpg"],
        "text.jpg: not an image, or in a format that PIL does not read",
    ),
    "half an image": (["{tmp}/half.png"], "half.png: the image cannot be read"),
    "empty folder": (["{tmp}/empty"], "empty: no image lies in this folder"),
    "index outside": (["--index", "1000"], "--index: 1000 is not allowed; allowed: 0 to 999"),
    "negative index": (["--index", "-1"], "--index: -1 is not allowed"),
    "unknown label": (["{runs}/3.png", "--label", "digit 33"], "unknown class 'digit 33'; did you mean digit 3"),
    "label and set": (["--index", "1", "--label", "digit 3"], "--label digit 3: is for image files"),
    "position outside": (["{runs}/3.png", "--affinity", "--at", "32,0"], "one: position 32,0: outside of the 32x32"),
    "position in words": (["{runs}/3.png", "--affinity", "--at", "left"], "--at: 'left' is not allowed; allowed: two"),
    "block without": (
        ["{runs}/3.png", "--affinity", "--block", "2"],
        "one: block 2: has no LightNL; allowed, numbered",
    ),
    "at without affinity": (["{runs}/3.png", "--at", "1,1"], "add --affinity"),
    "affinity and against": (["{runs}/3.png", "--affinity", "--against", "{runs}/two"], "--affinity shows one network"),
    "other classes": (["{runs}/3.png", "--against", "{runs}/others"], "others: was trained on other classes"),
    "weights for none": (["{runs}/3.png", "--against-weights", "x"], "add --against REF2"),
    "classes missing": (["{runs}/3.png", "--classes", "{tmp}/none.txt"], "none.txt cannot be read"),
    "zoo name": (["{runs}/3.png", "--against", "mobilenetv2_035"], "mobilenetv2_035: has no trained weights"),
    "segmentation": (["{runs}/3.png", "--against", "{runs}/segmented"], "segmented: holds a segmentation"),
    "out is a file": (["{runs}/3.png", "--out", "{runs}/3.png"], "cannot be written"),
    "unknown network": (["{runs}/3.png", "--against", "nonsense"], "unknown network"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, autonl, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jpg").write_text("no image")
    whole = (runs / "3.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    arguments, reason = BAD[case]
    filled = [word.format(runs=runs, tmp=tmp_path) for word in arguments]
    out = [] if "--out" in filled else ["--out", tmp_path / "out"]
    # a run folder without names of its own can look at the embedded set, whose classes are 0 to 9
    plain = tmp_path / "one"
    plain.mkdir()
    for name in ("arch.yaml", "final.safetensors", "config.yaml"):
        (plain / name).symlink_to(runs / "one" / name)
    ref = plain if "--index" in filled else runs / "one"
    code, text, error = autonl("cam", ref, *filled, *out)
    assert (code, text) == (2, "")
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_network_of_timm_with_another_head(autonl, runs, tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "weights.safetensors"
    save_file(package.create_model("timm:test_vit").state_dict(), weights)
    code, _, error = autonl("cam", "timm:test_vit", runs / "3.png", "--weights", weights, "--out", tmp_path)
    assert code == 2
    assert error.startswith("autonl: timm:test_vit: no class activation map: its features are no map over the image")


def test_two_networks_of_other_numbers_of_classes(autonl, runs, tmp_path):
    for name, classes in (("a", 5), ("b", 6)):
        save_file(create_model("digits", num_classes=classes).state_dict(), tmp_path / f"{name}.safetensors")
    networks = ["digits", runs / "3.png", "--against", "digits", "--set", "model.num_classes=5"]
    files = ["--weights", tmp_path / "a.safetensors", "--against-weights", tmp_path / "b.safetensors"]
    code, _, error = autonl("cam", *networks, *files, "--against-set", "model.num_classes=6", "--out", tmp_path)
    assert code == 2
    assert "the networks tell 5 and 6 classes apart" in error


def test_the_second_row_is_for_the_ground_truth(autonl, runs, tmp_path):
    """A wrong prediction gets a row for each; a right one a single row."""
    heights = {}
    right, _ = expected(runs / "one", 300)
    wrong = next(name for name in CLASSES if name != right)
    for label in (right, wrong):
        assert autonl("cam", runs / "one", runs / "3.png", "--label", label, "--out", tmp_path)[0] == 0
        with Image.open(tmp_path / "3_one.png") as picture:
            heights[label] = picture.height
    assert heights[wrong] > 1.6 * heights[right]

"""The script beside an exported file: it sees what the network sees, in a process that knows nothing of autonl."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

import autonl
from autonl.data.sources import to_rgb
from autonl.export.run import Request, export
from tests.test_export import TINY, installed, written


@pytest.fixture
def tiny(tmp_path):
    return written(TINY, tmp_path)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", [installed("onnx")])
def test_the_script_sees_what_the_network_sees(tiny, tmp_path, name, bits):
    """In a process that knows nothing of autonl; the picture is prepared as timm does it."""
    arch, weights = tiny
    export(arch, Request(name, tmp_path / "small.onnx", count=1, weights=weights))
    pixels = np.random.default_rng(0).integers(0, 255, (90, 140, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels if bits == 8 else pixels[..., 0].astype(np.uint16) * 256)
    picture.save(tmp_path / "picture.png")
    command = [sys.executable, tmp_path / "small_onnx.py", tmp_path / "picture.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    lines = [line.split() for line in done.stdout.splitlines()]
    model = autonl.load(arch, weights)
    transform = create_transform(**resolve_data_config(model=model))
    with torch.no_grad():
        logits = model(transform(to_rgb(Image.open(tmp_path / "picture.png")))[None])[0]
    values, places = logits.topk(5)
    assert [label for _, label in lines] == [str(place) for place in places.tolist()]
    assert np.allclose([float(value) for value, _ in lines], values, atol=2e-2)
    script = (tmp_path / "small_onnx.py").read_text()
    assert "autonl" not in script
    (tmp_path / "text.png").write_text("no image")
    done = subprocess.run([*command[:2], tmp_path / "text.png"], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'text.png'}: not an image, or in a format that PIL does not read\n"
    for wrong in ([], ["nowhere.png"]):
        done = subprocess.run([*command[:2], *wrong], capture_output=True, text=True, check=False, cwd="/")
        assert (done.returncode, done.stderr) == (1, "usage: python small_onnx.py IMAGE, a file\n")


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (33, 47)])
@pytest.mark.parametrize("name", [installed("onnx")])
def test_the_script_cuts_pictures_as_the_network_has_them_cut(tiny, tmp_path, name, size):
    """Sides that are not equal are covered by the smaller picture's side that needs it most, without black bars."""
    arch, weights = tiny
    export(arch, Request(name, tmp_path / "small.onnx", size, count=1, weights=weights))
    script = (tmp_path / "small_onnx.py").read_text()
    prepared = script[: script.index("image = ((image - about")] + 'np.save(here / "seen.npy", image)\n'
    (tmp_path / "look.py").write_text(prepared)
    model = autonl.load(arch, weights)
    transform = create_transform(**(resolve_data_config(model=model) | {"input_size": (3, *size)}), normalize=False)
    for width, height in ((140, 90), (90, 140), (100, 100), (61, 20)):
        pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "picture.png")
        subprocess.run([sys.executable, tmp_path / "look.py", tmp_path / "picture.png"], check=True, cwd="/")
        seen = np.rint(255 * np.load(tmp_path / "seen.npy")).astype(int)
        expected = np.asarray(transform(Image.fromarray(pixels))).transpose(1, 2, 0)
        assert abs(seen - expected).max() == 0, (width, height)


@pytest.mark.parametrize("name", [installed("onnx")])
def test_a_name_that_wants_quotes(tiny, tmp_path, name):
    arch, weights = tiny
    export(arch, Request(name, tmp_path / "we\"ird [v2]'s.onnx", count=1, weights=weights))
    Image.new("RGB", (40, 40)).save(tmp_path / "picture.png")
    command = [sys.executable, tmp_path / "we\"ird [v2]'s_onnx.py", tmp_path / "picture.png"]
    assert len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()) == 5

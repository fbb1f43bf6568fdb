"""`autonl export` as a user runs it."""

import json
import os
import signal
import sys

import pytest
from PIL import Image

from autonl.arch.codec import write_arch
from autonl.cli.export import name_of
from autonl.export import run
from tests.test_export import TINY

pytest.importorskip("onnxruntime")


def test_export(autonl, tmp_path):
    write_arch(TINY, tmp_path / "arch.yaml")
    out = tmp_path / "tiny.onnx"
    code, text, err = autonl("export", tmp_path / "arch.yaml", "--out", out, "--count", 3)
    assert code == 0
    assert "has no weights; the file holds fresh ones" in err
    assert f"next: python {tmp_path / 'tiny_onnx.py'} IMAGE" in text
    code, text, _ = autonl("export", tmp_path / "arch.yaml", "--out", out, "--count", 3, "--json")
    result = json.loads(text)
    assert (code, result["verdict"]["agreement"], result["outside"]) == (0, 1.0, [])
    assert result["timings"]["onnxruntime"]["median"] > 0


def test_what_an_exporter_says_is_not_among_the_json(autonl, tmp_path, monkeypatch):
    honest = run.deploy

    def talkative(*arguments):
        print("[START] Convert")
        return honest(*arguments)

    monkeypatch.setattr(run, "deploy", talkative)
    write_arch(TINY, tmp_path / "arch.yaml")
    code, text, err = autonl("export", tmp_path / "arch.yaml", "--out", tmp_path / "tiny.onnx", "--count", 1, "--json")
    assert (code, json.loads(text)["outside"]) == (0, [])
    assert "[START] Convert" in err


def test_what_a_scheduler_ends_leaves_nothing_behind(autonl, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "deploy", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    write_arch(TINY, tmp_path / "arch.yaml")
    code, text, _ = autonl("export", tmp_path / "arch.yaml", "--out", tmp_path / "new" / "tiny.onnx", "--count", 1)
    assert (code, text) == (143, "")
    assert [path.name for path in tmp_path.iterdir()] == ["arch.yaml"]


BAD = [
    (["small", "--format", "tflite"], "unknown format 'tflite'"),
    (["autonl_x"], "unknown network"),
    (["autonl_s", "--out", "x.xml"], "--out: 'x.xml' is not allowed; allowed: a name that ends in .onnx"),
    (["autonl_s", "--quantize", "int4"], "--quantize: 'int4' is not allowed; allowed: int8"),
    (["autonl_s", "--quantize", "int8"], "give them with --calibrate DIR"),
    (["autonl_s", "--calibrate", "digits"], "--calibrate: finds the ranges of int8, and this is float32"),
    (["autonl_s", "--custom-op", "--quantize", "int8", "--calibrate", "digits"], "--custom-op: is for float32"),
    (["autonl_s", "--res", "big"], "resolution: 'big' is not allowed"),
    (["autonl_s", "--weights", "/no/such.pth"], "/no/such.pth: cannot be read"),
    (["autonl_s", "--out", "/dev/null/x.onnx"], "/dev/null: cannot be made"),
    *([(["autonl_s", "--out", "/proc/x.onnx"], "/proc: cannot be written to")] if sys.platform == "linux" else []),
]


@pytest.mark.parametrize("quantized", [False, True])
def test_pictures_that_cannot_be_read(autonl, tmp_path, caplog, quantized):
    """They are named and do not count; with none that can be read, nothing is left, the folder of the file neither."""
    write_arch(TINY, tmp_path / "arch.yaml")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "broken.png").write_bytes(b"")
    out = tmp_path / "new" / "folder" / "tiny.onnx"
    more = ["--quantize", "int8", "--calibrate", pictures] if quantized else []
    code, text, err = autonl("export", tmp_path / "arch.yaml", "--out", out, "--images", pictures, *more)
    assert (code, text) == (2, "")
    assert f"{pictures}: none of its images can be read" in err
    assert "skipped an image that cannot be read" in caplog.text
    assert not (tmp_path / "new").exists()
    Image.new("RGB", (40, 40), (200, 0, 0)).save(pictures / "red.png")
    caplog.clear()
    code, text, err = autonl("export", tmp_path / "arch.yaml", "--out", out, "--images", pictures, "--json", *more)
    assert "skipped an image that cannot be read" in caplog.text
    if not quantized:  # int8 of a network that has learned nothing may name another class
        assert (code, json.loads(text)["verdict"]["images"]) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_bad_input_is_one_line(autonl, tmp_path, arguments, message):
    where = [] if "--out" in arguments else ["--out", tmp_path / "x.onnx"]
    code, out, err = autonl("export", *arguments, *where)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("autonl_s", "autonl_s"), ("timm:a.in1k", "timm-a.in1k"), ("runs/v1.2", "v1.2"), (".", "v1.2"),
        ("nets/arch.yaml", "arch"),
    ],
)  # fmt: skip
def test_the_name_of_a_file_that_was_given_none(tmp_path, monkeypatch, ref, name):
    (tmp_path / "runs" / "v1.2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "v1.2" if ref == "." else tmp_path)
    assert name_of(ref) == name


def test_names_are_no_markup(autonl, tmp_path):
    write_arch(TINY, tmp_path / "arch.yaml")
    code, text, _ = autonl("export", tmp_path / "arch.yaml", "--out", tmp_path / "net[red].onnx", "--count", 1)
    assert code == 0
    assert "net[red]_onnx.py" in text

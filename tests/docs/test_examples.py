"""The examples run, and so does the Python on the pages."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import autonl
from autonl.data import sources
from autonl.train.config import load_config
from tests.docs.pages import PAGES, ROOT, SMALL, blocks, small_digits

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(workspace, page):
    names = {"__name__": page.stem}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_own_folder(workspace, capsys):
    settings = [word for setting in SMALL["search"] for word in ("--set", setting)]
    example("own_folder").main(["flowers", "--epochs", "1", "--batch-size", "16", "--res", "32", *settings])
    assert "validation images" in capsys.readouterr().out
    assert 10_000 < (workspace / "runs/own/report.html").stat().st_size < 5_000_000


def test_example_lightnl_in_timm(workspace, capsys):
    example("lightnl_in_timm").main(["mobilenetv2_035", "--steps", "2"])
    out = capsys.readouterr().out
    assert "59.3M MACs, with LightNL 63.1M" in out
    assert "outputs are the same: True" in out
    assert "17 of 17 LightNL blocks" in out


def test_example_finetune_export(workspace, capsys):
    """Weights of ten classes are tuned on three; the file answers as the network does, the script runs it."""
    torch.manual_seed(0)
    save_file(autonl.create_model("digits").state_dict(), "digits.safetensors")
    small = ["--epochs", "1", "--batch-size", "8", "--out", "flowers.onnx"]
    example("finetune_export").main(["flowers", "--network", "digits", "--weights", "digits.safetensors", *small])
    out = capsys.readouterr().out
    assert "of 6 validation images" in out
    assert "the same class on 100% of the images" in out
    assert Path("flowers.onnx.labels.txt").read_text().split() == ["daisy", "rose", "tulip"]
    assert "next: python flowers_onnx.py IMAGE" in out


def test_example_digits(workspace, monkeypatch, capsys):
    """`make search`, with an epoch a run on a few digits."""
    monkeypatch.setattr(sources, "digits", small_digits)
    module = example("digits")
    monkeypatch.setattr(module, "SEARCH_EPOCHS", 1)
    monkeypatch.setattr(module, "TRAIN_EPOCHS", 1)
    fewer = ["search.trials=0", "search.candidates=1", "search.calibrate_batches=1"]
    monkeypatch.setattr(
        module,
        "load_config",
        lambda recipe, settings, *kind: load_config(recipe, [*settings, *(fewer if kind else ())], *kind),
    )
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", "runs/demo"])
    module.main()
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\d", out, re.MULTILINE) for name in ("found", "digits", "random"))
    assert "points of top-1; two standard errors are" in out


@pytest.mark.parametrize("stranger", ["notes.txt", "search/notes.txt"])
def test_make_search_deletes_no_folder_but_its_own(stranger, tmp_path, monkeypatch):
    module, out = example("digits"), tmp_path / "out"
    (out / "found").mkdir(parents=True)
    (out / "found" / "config.yaml").touch()
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).touch()
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", str(out)])
    with pytest.raises(SystemExit, match="holds more than runs of this example"):
        module.main()
    assert (out / stranger).exists()
    (out / stranger).unlink()
    if stranger.startswith("search"):
        (out / "search" / "config.yaml").touch()
    module.remove_runs(out)
    assert not out.exists()


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_example_") for name in globals() if name.startswith("test_example_")}
    assert {path.stem for path in EXAMPLES} == tested

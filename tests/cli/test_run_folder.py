"""Run folders as a REF: a search's is one like a training's, a segmentation's is none, the zoo's names come first."""

import signal
from pathlib import Path

import pytest
import typer
import yaml
from safetensors.torch import save_file
from torch import nn

from autonl import AutoNLError, create_model
from autonl.arch.codec import to_yaml, write_arch
from autonl.arch.zoo import zoo_arch
from autonl.cli.train import report_stop
from autonl.export.run import Request, network_of
from autonl.models import resolve, run_folder
from autonl.report.images import judge
from autonl.search.config import SearchConfig
from autonl.segment.config import SegmentConfig
from autonl.train.config import Config, from_dict, load_config, to_dict
from autonl.train.folder import run_colours
from autonl.train.loop import Result
from autonl.train.run import known_classes
from autonl.weights import run_weights
from tests.train.small import NETWORK, write_digits


def write_folder(folder, kind, about, **data):
    """As a run leaves it, of the small network at birth."""
    folder.mkdir()
    write_arch(NETWORK, folder / "arch.yaml")
    save_file(create_model(NETWORK).state_dict(), folder / "final.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(from_dict(kind, {"data": data}))))
    (folder / "run.yaml").write_text(yaml.safe_dump(about))
    return folder


def test_the_run_folder_of_a_search(autonl, tmp_path):
    digits = write_digits(tmp_path / "digits", 4)
    data = {"path": str(digits), "held_out": 0.5, "selection": 0.1, "workers": 0, "mean": [0.1, 0.2, 0.3]}
    folder = write_folder(tmp_path / "found", SearchConfig, {"ref": "small"}, **data)
    code, _, errors = autonl("evaluate", folder, "--json")
    assert (code, errors) == (0, "")
    code, _, errors = autonl("cam", folder, "--index", 1, "--out", tmp_path / "pictures")
    assert (code, errors) == (0, "")
    assert judge(folder).images == 20
    _, view, _, fresh = network_of(folder, Request("onnx", tmp_path / "x.onnx"))
    assert (view.mean, fresh) == ((0.1, 0.2, 0.3), False)


def test_the_run_folder_of_a_segmentation(autonl, tmp_path):
    folder = write_folder(tmp_path / "run", SegmentConfig, {"ref": "small", "task": "segmentation"})
    for verb in (["evaluate"], ["cam", "--index", 1]):
        code, told, errors = autonl(verb[0], folder, *verb[1:])
        assert (code, told, errors.count("\n")) == (2, "", 1)
        assert f"{folder}: holds a segmentation, which is no classifier" in errors
    code, told, errors = autonl("export", folder, "--out", tmp_path / "x.onnx")
    assert (code, told) == (2, "")
    assert errors == f"autonl: {folder / 'classes.txt'}: no class list there, which a segmentation's folder has\n"


def test_a_folder_that_is_called_like_a_network_of_the_zoo(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "digits", SearchConfig, {"model": {"num_classes": 3}}, mean=[0.1] * 3)
    (folder / "classes.txt").write_text("cat\n")
    monkeypatch.chdir(tmp_path)
    for ref in ("digits", Path("digits")):
        assert resolve(ref) == zoo_arch("digits")
        assert (run_folder(ref), known_classes(ref), run_colours(ref, SegmentConfig())) == (None, [], {})
        with pytest.raises(AutoNLError, match="has no weights"):
            run_weights(ref)
    assert resolve("./digits") == NETWORK
    assert known_classes("./digits") == ["cat"]
    assert run_colours("./digits", SegmentConfig()) == {"mean": (0.1, 0.1, 0.1)}
    assert run_colours("./digits", from_dict(Config, {"data": {"mean": [0.2] * 3}})) == {}
    (folder / "config.yaml").write_text("data: {mean: 0.1}\n")
    with pytest.raises(AutoNLError, match=r"digits, config.yaml: data.mean: 0.1 is not allowed; allowed: a list"):
        run_colours("./digits", SegmentConfig())
    assert run_weights(folder) == folder / "final.safetensors"


@pytest.mark.parametrize("operator", [(), ("--nl", "lightnl_energy")])
def test_inherited_weights_see_the_images_that_they_were_trained_on(autonl, tmp_path, operator):
    """In the same colours, resized in the same way; what the command sets comes first."""
    data = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "nearest", "crop_pct": 0.5}
    folder = write_folder(tmp_path / "found", SearchConfig, {"ref": "small"}, **data)
    images, out = write_digits(tmp_path / "images", 2), tmp_path / "heir"
    settings = ("data.batch_size=10", "data.workers=0", "data.held_out=0.5", "schedule.epochs=1", "data.std=[1,1,1]")
    changes = [word for setting in settings for word in ("--set", setting)]
    code, _, errors = autonl("train", folder, "--inherit", *operator, "--data", images, *changes, "--out", out)
    assert code == 0, errors
    kept = yaml.safe_load((out / "config.yaml").read_text())["data"]
    assert (kept["mean"], kept["std"], kept["interpolation"]) == ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0], "nearest")
    assert kept["crop_pct"] == 0.875  # the network's own: a matter of the evaluation


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (7, "stopped by SIGINT behind step 7, saved in runs/r; go on with: autonl train digits --resume\n"),
        (
            4,
            "stopped by SIGINT behind step 7; the last checkpoint in runs/r is of step 4, where an epoch began; "
            "go on with: autonl train digits --resume\n",
        ),
        (
            None,
            "stopped by SIGINT behind step 7; nothing is saved yet; begin again with: autonl train digits --resume\n",
        ),
    ],
)
def test_what_a_stopped_run_says_is_saved(monkeypatch, capsys, saved, message):
    monkeypatch.setattr("sys.argv", ["autonl", "train", "digits"])
    with pytest.raises(typer.Exit) as end:
        report_stop(Path("runs/r"), Result(nn.Identity(), {}, [], 7, signal.SIGINT, saved=saved))
    assert (end.value.exit_code, capsys.readouterr().err) == (130, message)


@pytest.mark.parametrize("written", [to_yaml, yaml.safe_dump])  # the second by runs of old
@pytest.mark.parametrize("path", ["1e5", "1e-3", "2020-01-01", "no"])
def test_a_path_that_could_be_something_else_is_kept(tmp_path, path, written):
    (tmp_path / "config.yaml").write_text(written(to_dict(from_dict(Config, {"data": {"path": path}}))))
    assert load_config(str(tmp_path / "config.yaml")).data.path == path

"""Run folders as a REF: a search's is one like a training's, a segmentation's is none, the zoo's names come first."""

from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file

from autonl import AutoNLError, create_model
from autonl.arch.codec import write_arch
from autonl.arch.zoo import zoo_arch
from autonl.export.run import Request, network_of
from autonl.models import resolve, run_folder
from autonl.report.images import judge
from autonl.search.config import SearchConfig
from autonl.segment.config import SegmentConfig
from autonl.segment.run import run_colours
from autonl.train.config import from_dict, to_dict
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
    assert run_weights(folder) == folder / "final.safetensors"

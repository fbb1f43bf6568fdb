"""`autonl train` as a user runs it: output, files of the run, signals, bad input."""

import json
import os
import shlex
import shutil
import signal
import sys
import time

import pytest
import yaml
from safetensors.torch import load_file

from autonl import cli
from autonl.arch.codec import read_arch, write_arch
from autonl.train.state import read_checkpoint
from tests.conftest import prove
from tests.train.small import NETWORK, in_child, kill, rows, write_digits

CHANGED = ("data.batch_size=16", "data.workers=1", "data.crop_pct=1.0", "schedule.epochs=2")
CHANGED += ("loop.ema=0.9", "loop.checkpoint_steps=2", "loop.log_steps=1")
SETTINGS = [word for setting in CHANGED for word in ("--set", setting)]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits") / "images", 8)


@pytest.fixture(scope="module")
def arch(tmp_path_factory):
    path = tmp_path_factory.mktemp("arch") / "small.yaml"
    write_arch(NETWORK, path)
    return path


def test_a_training_from_the_command_line(autonl, images, arch, tmp_path):
    run = tmp_path / "run"
    code, out, err = autonl("train", arch, "--data", images, *SETTINGS, "--seed", 3, "--out", run, "--json")
    result = json.loads(out)
    assert (code, result["run"], result["steps"]) == (0, str(run), 8)
    assert 0 <= result["top1"] <= result["top5"] <= 100
    assert "epoch 2 of 2  " in err
    assert {path.name for path in run.iterdir()} == {
        ".lock", "arch.yaml", "best.safetensors", "classes.txt", "config.yaml", "final.safetensors", "last.ckpt",
        "metrics.csv", "previous.ckpt", "result.json", "run.yaml", "tensorboard",
    }  # fmt: skip
    assert read_arch(run / "arch.yaml") == NETWORK
    about = yaml.safe_load((run / "run.yaml").read_text())
    assert (about["ref"], about["seed"]) == ("small", 3)
    assert about["command"].startswith("autonl train ")
    assert about["versions"].keys() >= {"autonl", "torch", "timm", "lightning"}
    assert [row["step"] for row in rows(run)] == ["4", "8"]
    assert any((run / "tensorboard").iterdir())

    code, out, _ = autonl("evaluate", run, "--json")  # the validation images of the run
    again = json.loads(out)
    assert (code, again["images"], again["top1"], again["top5"]) == (0, 10, result["top1"], result["top5"])

    code, out, err = autonl("train", arch, "--data", images, *SETTINGS, "--seed", 3, "--out", run)
    assert (code, out) == (2, "")
    assert "holds a run already" in err
    code, out, err = autonl("train", arch, "--data", images, *SETTINGS, "--seed", 3, "--out", run, "--resume")
    assert code == 0
    assert f"next: autonl evaluate {run}" in out.replace("\n", " ").replace("  ", " ")
    assert "going on behind step 8" in err
    code, out, err = autonl("train", arch, "--data", images, *SETTINGS, "--seed", 4, "--out", run, "--resume")
    assert (code, out) == (2, "")
    assert "started with seed = 3, this command has 4" in err
    assert "going on" not in err

    heir = tmp_path / "heir"
    code, out, _ = autonl(
        "train", run, "--inherit", "--data", images, *SETTINGS, "--set", "optim.lr=0", "--out", heir, "--json"
    )
    assert code == 0  # with a learning rate of zero the weights are still those it started with
    first, second = load_file(run / "final.safetensors"), load_file(heir / "final.safetensors")
    assert all((first[name] - second[name]).abs().max() < 1e-6 for name in first if name.endswith("weight"))


def test_a_training_with_another_operator(autonl, images, arch, tmp_path):
    run = tmp_path / "run"
    short = [*SETTINGS, "--set", "schedule.epochs=1"]
    code, _, err = autonl("train", arch, "--data", images, *short, "--nl", "lightnl_energy", "--out", run)
    assert code == 0, err
    changed = read_arch(run / "arch.yaml")
    assert (changed.operator, changed.blocks) == ("lightnl_energy", NETWORK.blocks)
    again = tmp_path / "again"  # from the weights of the first: the same names and shapes
    code, _, err = autonl("train", run, "--data", images, *short, "--nl", "lightnl", "--inherit", "--out", again)
    assert code == 0, err
    assert read_arch(again / "arch.yaml").operator == "lightnl"
    code, _, err = autonl("train", arch, "--data", images, "--nl", "lightnl_energie", "--out", tmp_path / "no")
    assert code == 2
    assert "operator" in err
    assert "lightnl_energy" in err
    code, _, err = autonl(
        "train", "timm:mobilenetv2_035", "--data", images, "--nl", "lightnl", "--out", tmp_path / "no"
    )
    assert code == 2
    assert "takes no non-local operator" in err
    assert not (tmp_path / "no").exists()


def test_a_network_of_timm(autonl, images, tmp_path):
    """A run folder without an architecture of ours is still a REF, with timm's arguments."""
    run = tmp_path / "run"
    arguments = ("--data", images, *SETTINGS, "--set", "model.pad_type=same", "--set", "data.image_size=32")
    code, out, _ = autonl(
        "train", "timm:mobilenetv2_035", *arguments, "--set", "schedule.epochs=1", "--out", run, "--json"
    )
    assert code == 0
    expected = json.loads(out)
    code, out, _ = autonl("evaluate", run, "--json")
    assert (code, json.loads(out)["top1"]) == (0, expected["top1"])
    code, out, _ = autonl("profile", run, "--json")
    assert (code, json.loads(out)["name"]) == (0, "timm:mobilenetv2_035")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_names_the_command_to_go_on_with(images, arch, tmp_path, number):
    command = ["train", str(arch), "--data", str(images), *SETTINGS, "--set", "schedule.epochs=400"]
    command += ["--out", str(tmp_path / "run")]
    process = in_child(command_line, command, tmp_path / "stderr")
    try:
        while not (tmp_path / "run" / "last.ckpt").exists():
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == 128 + number
    finally:
        if process.is_alive():
            kill(process)
    told = (tmp_path / "stderr").read_text().strip().splitlines()[-1]
    assert told.startswith(f"stopped by {number.name} behind step ")
    step = int(told.split("behind step ")[1].split(",")[0])
    assert told.endswith(f"saved in {tmp_path / 'run'}; go on with: {shlex.join(['autonl', *command, '--resume'])}")
    checkpoint, _ = read_checkpoint(tmp_path / "run")
    assert checkpoint["step"] == step


def command_line(arguments, errors):
    """In a process of its own, its standard error in a file."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w")
    sys.argv = ["autonl", *arguments]
    cli.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits"], "no images: give --data DIR"),
        (["digitz", "--recipe", "demo"], "did you mean digits?"),
        (["digits", "--recipe", "dmo"], "did you mean demo?"),
        (["digits", "--recipe", "demo", "--set", "optim.lrr=1"], "did you mean optim.lr"),
        (
            ["digits", "--recipe", "demo", "--set", "optim.lr=fast"],
            "optim.lr: 'fast' is not allowed; allowed: a number",
        ),
        (["digits", "--recipe", "demo", "--seed", "-1"], "seed: -1 is not allowed"),
        (["digits", "--recipe", "demo", "--inherit"], "digits: has no weights"),
        (["digits", "--recipe", "demo", "--weights", "/no/such.safetensors"], "/no/such.safetensors: cannot be read"),
        (["digits", "--recipe", "demo", "--out", "/dev/null/run"], "/dev/null/run: cannot be made: Not a directory"),
        (["digits", "--data", "/no/such"], "/no/such: no such folder"),
        (["timm:mobilenetv2_35", "--recipe", "demo"], "did you mean mobilenetv2_035"),
    ],
)
def test_bad_input_is_one_line(autonl, tmp_path, arguments, message):
    code, out, err = autonl("train", *(["--out", tmp_path / "run"] if "--out" not in arguments else []), *arguments)
    assert (code, out) == (2, "")
    assert not (tmp_path / "run").exists()
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_the_demo(autonl, monkeypatch, tmp_path):
    """Needs nothing but the package. All 8 epochs pass 95 %; two come near."""
    monkeypatch.chdir(tmp_path)
    started = time.perf_counter()
    code, out, _ = autonl("train", "digits", "--recipe", "demo", *prove(("--set", "schedule.epochs=2"), ()))
    assert time.perf_counter() - started < 180
    assert code == 0
    assert "next: autonl evaluate runs/digits-demo" in out
    code, out, _ = autonl("evaluate", "runs/digits-demo", "--json")
    result = json.loads(out)
    assert (code, result["images"]) == (0, 1000)
    assert result["top1"] > prove(85, 95)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.in_chans=1"], "does not take colour images of 32x32"),
        (["model.features_only=true"], "does not make a classifier"),
        (["model.drop_rate=2"], "dropout probability has to be between 0 and 1"),
        (["model.act_layer=foo"], "model: the network cannot be made with"),
        (["data.mean=[1,2]"], r"data.mean: (1.0, 2.0) is not allowed; allowed: three numbers"),
        (["augment.auto_augment=foo"], "augment.auto_augment: 'foo' is not allowed"),
        (["data.in_memory=true", "augment.auto_augment=rand-m9"], "allowed: none for images in memory"),
        (["augment.ratio=[1,.inf]"], "augment.ratio"),
        (["optim.name=nothing"], "optim: "),
        (["loop.clip_norm=0"], "loop.clip_norm: 0.0 is not allowed"),
    ],
)
def test_settings_that_do_not_fit_leave_nothing_behind(autonl, images, arch, tmp_path, settings, message):
    flags = [flag for setting in settings for flag in ("--set", setting)]
    code, _, err = autonl("train", arch, "--data", images, *SETTINGS, *flags, "--out", tmp_path / "run")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_path_is_taken_as_it_is_written(autonl, images, arch, tmp_path):
    """Not as YAML: a comment sign, a date, a leading zero."""
    for name in ("set #2", "2020-01-01", "a: b"):
        shutil.copytree(images, tmp_path / name)
        run = tmp_path / f"run {name}"
        code, _, err = autonl("train", arch, "--data", tmp_path / name, *SETTINGS, "--out", run)
        assert code == 0, err
        assert yaml.safe_load((run / "config.yaml").read_text())["data"]["path"] == str(tmp_path / name)
        result = json.loads((run / "result.json").read_text())
        assert {"top1", "top5", "val_loss", "step"} <= result.keys()


def test_resume_with_other_images_is_refused_and_with_moved_ones_goes_on(autonl, images, arch, tmp_path):
    first, run = shutil.copytree(images, tmp_path / "first"), tmp_path / "run"
    assert autonl("train", arch, "--data", first, *SETTINGS, "--out", run)[0] == 0
    fewer = shutil.copytree(images, tmp_path / "fewer")
    next((fewer).glob("*/*")).unlink()
    code, _, err = autonl("train", arch, "--data", fewer, *SETTINGS, "--out", run, "--resume")
    assert code == 2
    assert "the run was started on" in err
    moved = first.rename(tmp_path / "moved")
    assert autonl("train", arch, "--data", moved, *SETTINGS, "--out", run, "--resume")[0] == 0
    assert json.loads(autonl("evaluate", run, "--json")[1])["images"] > 0

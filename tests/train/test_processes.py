"""Several processes (gloo, CPU) do what one does; torchrun brings a killed one back; a signal stops them all."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autonl.arch.spec import ArchSpec
from autonl.train import run
from autonl.train.config import from_dict
from autonl.train.progress import Progress
from autonl.train.tasks import Classification
from tests.conftest import PROVE
from tests.train.dying_rank import train_dying
from tests.train.small import NETWORK, ON_CPU, Config, in_child, kill, rows, small_config, train_small

QUIET = ArchSpec(**{**vars(NETWORK), "dropout": 0.0})  # dropout is a function of the rank


class StillBN(Classification):
    """BN in eval mode: torch has no SyncBatchNorm for the CPU."""

    def step(self, model, batch, step):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return super().step(model, batch, step)


class Losses(Progress):
    losses: list

    def begin(self, steps, done, batch_size):
        Losses.losses = []

    def advance(self, step, scalars):
        Losses.losses.append(scalars["loss"])


def processes(count, function, *arguments):
    """Start the function in `count` processes as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [in_child(as_rank, rank, count, port, function, *arguments) for rank in range(count)]


def as_rank(rank, count, port, function, *arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    function(*arguments)


def join(started):
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * len(started)


def train_still(path, folder, out, accumulate):
    run.Classification = StillBN
    config = small_config(
        path, data={"workers": 0}, schedule={"epochs": 4}, loop={"log_steps": 1, "accumulate": accumulate}
    )
    run.train_classifier(QUIET, config, Path(folder), where=ON_CPU, progress=Losses)
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(Losses.losses))


def test_two_processes_have_the_losses_of_one(digit_folder, tmp_path):
    join([in_child(train_still, digit_folder, tmp_path / "one", tmp_path / "one.json", 1)])
    join(processes(2, train_still, digit_folder, tmp_path / "two", tmp_path / "two.json", 2))
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert len(one) == len(two) == 24
    assert one == pytest.approx(two, abs=1e-5)
    assert max(one) - min(one) > 0.1  # they do change
    first, second = load_file(tmp_path / "one" / "final.safetensors"), load_file(tmp_path / "two" / "final.safetensors")
    for name in first:
        if "running" not in name:  # calibrated anew, each process on its half
            torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)


def evaluate_into(path, folder, out):
    config = from_dict(Config, {"data": {"path": str(path), "workers": 0, "evaluation_batch_size": 16}})
    result = run.evaluate_classifier(str(folder), config, where=ON_CPU)
    if result:
        Path(out).write_text(json.dumps(result))


def test_no_image_counts_twice_where_the_number_is_uneven(digit_folder, tmp_path):
    train_small(digit_folder, tmp_path / "run", data={"workers": 0})
    images = shutil.copytree(digit_folder, tmp_path / "images")
    (images / "class3" / "000.jpg").unlink()  # 119 images
    join([in_child(evaluate_into, images, tmp_path / "run", tmp_path / "one.json")])
    join(processes(3, evaluate_into, images, tmp_path / "run", tmp_path / "three.json"))
    one, three = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "three.json"))
    assert one["images"] == three["images"] == 119
    assert (one["top1"], one["top5"]) == (three["top1"], three["top5"])


def train_resumed(path, folder):
    train_small(path, folder, data={"workers": 0}, resume=True)


@pytest.fixture(scope="module")
def unbroken(digit_folder, tmp_path_factory):
    """The run of two processes that were never stopped."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    join(processes(2, train_resumed, digit_folder, folder))
    return folder


def assert_same_run(folder, reference):
    assert rows(folder) == rows(reference)
    assert (folder / "final.safetensors").read_bytes() == (reference / "final.safetensors").read_bytes()


def test_a_killed_rank_comes_back_and_resumes(digit_folder, unbroken, tmp_path):
    """What torchrun does: end the others, start all again with the same command."""
    first = processes(2, train_dying, digit_folder, tmp_path / "run")
    first[1].join()
    assert first[1].exitcode == -signal.SIGKILL
    kill(first[0])
    join(processes(2, train_resumed, digit_folder, tmp_path / "run"))
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.skipif(not PROVE, reason="imports everything six times, 40 seconds: make prove")
def test_a_rank_killed_under_torchrun(digit_folder, unbroken, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, "-m", "tests.train.dying_rank", str(digit_folder), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "-9" in done.stderr  # SIGKILL, as the agent saw it
    assert_same_run(tmp_path / "run", unbroken)


def train_long(path, folder):
    result = train_small(path, folder, data={"workers": 0}, schedule={"epochs": 500})
    raise SystemExit(result.stopped_by or 0)


def test_a_signal_to_one_process_stops_them_all_at_the_same_step(digit_folder, tmp_path):
    started = processes(2, train_long, digit_folder, tmp_path / "run")
    try:
        while not (tmp_path / "run" / "last.ckpt").exists():
            assert all(process.is_alive() for process in started)
            time.sleep(0.05)
        os.kill(started[1].pid, signal.SIGTERM)
        for process in started:
            process.join(60)
        assert [process.exitcode for process in started] == [signal.SIGTERM] * 2
    finally:
        for process in started:
            if process.is_alive():
                kill(process)

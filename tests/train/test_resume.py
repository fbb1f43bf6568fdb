"""A training that is killed and resumed ends as one that was never stopped."""

import random
import signal
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from autonl.train import state
from tests.conftest import prove
from tests.train import small
from tests.train.small import die_at, in_child, kill, rows

# another thing that is drawn in every training pass, and in those of the calibration
train_small = partial(small.train_small, model={"drop_path_rate": 0.3})


@pytest.fixture(scope="module")
def unbroken(digit_folder, tmp_path_factory):
    """(the run folder of a training that was never stopped, its seconds)."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    started = time.perf_counter()
    train_small(digit_folder, folder)
    return folder, time.perf_counter() - started


def assert_same_run(folder, reference):
    assert rows(folder) == rows(reference)
    for name in ("final.safetensors", "best.safetensors"):
        weights, expected = load_file(folder / name), load_file(reference / name)
        assert weights.keys() == expected.keys()
        for key in weights:
            assert torch.equal(weights[key], expected[key]), f"{name}: {key}"


def test_the_same_seed_gives_the_same_run_with_any_number_of_workers(digit_folder, unbroken, tmp_path):
    train_small(digit_folder, tmp_path / "run", data={"workers": 0})
    assert_same_run(tmp_path / "run", unbroken[0])


def test_another_seed_gives_another_run(digit_folder, unbroken, tmp_path):
    train_small(digit_folder, tmp_path / "run", seed=1, data={"workers": 0})
    assert rows(tmp_path / "run") != rows(unbroken[0])


def test_killed_at_random_moments(digit_folder, unbroken, tmp_path):
    reference, seconds = unbroken
    moments = random.Random(0)
    kills = runs = 0
    while kills < prove(2, 20):
        process = in_child(train_resumed, digit_folder, tmp_path / str(runs))
        process.join(moments.uniform(0.05, 0.8) * seconds)
        if process.is_alive():
            kill(process)
            kills += 1
        else:  # it came to its end between two kills
            assert_same_run(tmp_path / str(runs), reference)
            runs += 1
    finish(digit_folder, tmp_path / str(runs))
    assert_same_run(tmp_path / str(runs), reference)


# calls of os.fsync and os.replace in a run: description, then checkpoints and metrics by turns
@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("count", prove([11, 14], list(range(1, 29))))
def test_killed_while_a_file_is_written(digit_folder, unbroken, tmp_path, call, count):
    process = in_child(train_and_die_at, digit_folder, tmp_path / "run", call, count)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(digit_folder, tmp_path / "run")
    assert_same_run(tmp_path / "run", unbroken[0])


def test_a_finished_run_can_be_resumed(digit_folder, unbroken, tmp_path):
    train_small(digit_folder, tmp_path / "run", data={"workers": 0})
    train_small(digit_folder, tmp_path / "run", data={"workers": 0}, resume=True)
    assert_same_run(tmp_path / "run", unbroken[0])


def test_a_checkpoint_holds_plain_values_only(unbroken):
    content = torch.load(unbroken[0] / state.LAST, weights_only=True)
    assert content["about"]["architecture"]["name"] == "small"
    assert content["about"]["config"]["optim"]["lr"] == 0.05
    assert content["about"]["versions"]["torch"] == torch.__version__


def finish(path, folder):
    process = in_child(train_resumed, path, folder)
    process.join()
    assert process.exitcode == 0


def train_resumed(path, folder):
    train_small(path, folder, resume=True)


def train_and_die_at(path, folder, call, count):
    die_at(call, count)
    train_small(path, folder, resume=True)

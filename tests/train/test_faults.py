"""What goes wrong ends in one clear line, and costs no more than the newest checkpoint."""

import errno
import gc
import os
import re
import resource
import shutil
import signal
import time

import pytest
import torch

from autonl.errors import AutoNLError
from autonl.train import lock, loop, run, state
from autonl.train.config import Config, to_dict
from autonl.train.folder import MAY_CHANGE, flat
from autonl.train.progress import Progress
from autonl.train.tasks import Classification
from tests.train.small import (
    NETWORK,
    ON_CPU,
    another_could_take,
    in_child,
    kill,
    rows,
    small_config,
    train_small,
)

SETTINGS = {"data": {"workers": 0}}


class Told(Progress):
    def __init__(self):
        self.messages = []

    def say(self, message):
        self.messages.append(message)


def resume_told(path, folder):
    told = Told()
    run.train_classifier(
        NETWORK, small_config(path, **SETTINGS), folder, resume=True, where=ON_CPU, progress=lambda: told
    )
    return told.messages


@pytest.fixture(scope="module")
def original(digit_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "run"
    train_small(digit_folder, folder, **SETTINGS)
    return folder


@pytest.fixture
def finished(original, tmp_path):
    """A finished run: last.ckpt of step 18, previous.ckpt of step 15."""
    return shutil.copytree(original, tmp_path / "run")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    """In the middle of a tensor, where nothing but a checksum can tell."""
    weights = state.load_file(path)["module"]["classifier.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weights) + len(weights) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [truncate, flip_a_bit, lambda path: path.write_bytes(os.urandom(5000)), lambda path: path.write_bytes(b"")],
    ids=["truncated", "one bit", "garbage", "empty"],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(digit_folder, finished, spoil):
    expected, weights = rows(finished), (finished / "final.safetensors").read_bytes()
    spoil(finished / state.LAST)
    (finished / "final.safetensors").unlink()
    messages = resume_told(digit_folder, finished)
    assert "last.ckpt: damaged" in messages[0]
    assert "going on from the checkpoint before it" in messages[0]
    assert "going on behind step 15" in messages[1]
    assert (rows(finished), (finished / "final.safetensors").read_bytes()) == (expected, weights)


def test_nothing_whole_is_left(digit_folder, finished):
    (finished / state.LAST).write_bytes(b"")
    (finished / state.PREVIOUS).write_bytes(b"")
    with pytest.raises(AutoNLError, match="no whole checkpoint is left"):
        resume_told(digit_folder, finished)


def test_nothing_to_resume_starts_from_the_beginning_and_says_so(digit_folder, tmp_path):
    messages = resume_told(digit_folder, tmp_path / "run")
    assert messages == [f"{tmp_path / 'run'}: nothing to resume, starting from the beginning"]
    assert (tmp_path / "run" / "final.safetensors").exists()


class Intruder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused(digit_folder, finished, tmp_path):
    (finished / state.PREVIOUS).unlink()
    torch.save({"format": 1, "module": Intruder(tmp_path / "intruded")}, finished / state.LAST)
    with pytest.raises(AutoNLError, match="refused: it holds more than tensors"):
        resume_told(digit_folder, finished)
    assert not (tmp_path / "intruded").exists()


def test_a_full_disk_leaves_the_previous_checkpoint_whole(digit_folder, finished, tmp_path):
    process = in_child(train_on_a_full_disk, digit_folder, tmp_path / "full")
    process.join()
    assert process.exitcode == 0  # AutoNLError that names the file, see below
    content = state.load_file(tmp_path / "full" / state.LAST)
    assert content["step"] == 3
    assert [path.name for path in (tmp_path / "full").glob(".*")] == [lock.LOCK_FILE]
    resume_told(digit_folder, tmp_path / "full")
    assert rows(tmp_path / "full") == rows(finished)


def train_on_a_full_disk(path, folder):
    """After the first checkpoint the kernel lets no file grow beyond half of its size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # EFBIG instead
    write = loop.write_checkpoint

    def write_and_fill(folder, content):
        write(folder, content)
        half = (folder / state.LAST).stat().st_size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))

    loop.write_checkpoint = write_and_fill
    with pytest.raises(
        AutoNLError, match=r"fresh.ckpt: cannot be written: File too large; the file before it is whole"
    ):
        train_small(path, folder, **SETTINGS)


class Diverging(Classification):
    """The loss of the ninth step is not a number."""

    def step(self, model, batch, step):
        scalars = super().step(model, batch, step)
        return {"loss": scalars["loss"] * (float("nan") if step == 8 else 1)}


@pytest.mark.parametrize("log_steps", [1, 2, 5])
def test_a_loss_that_is_not_finite_stops_the_run(digit_folder, tmp_path, monkeypatch, log_steps):
    monkeypatch.setattr(run, "Classification", Diverging)
    message = rf"the loss turned nan at step 9; the last good checkpoint is {re.escape(str(tmp_path))}/run/last.ckpt"
    with pytest.raises(AutoNLError, match=message):
        train_small(digit_folder, tmp_path / "run", data={"workers": 0}, loop={"log_steps": log_steps})
    content = state.load_file(tmp_path / "run" / state.LAST)
    assert content["step"] == 6
    assert all(tensor.isfinite().all() for tensor in content["module"].values())


class Poisoned(Classification):
    """A step with a finite loss leaves weights that are not."""

    def after_step(self, module, step):
        if step == 6:
            module.classifier.bias.data.fill_(float("inf"))


def test_weights_that_are_not_finite_are_never_saved(digit_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "Classification", Poisoned)
    with pytest.raises(
        AutoNLError, match=r"the weights turned infinite or NaN by step 6; the last good checkpoint is "
    ):
        train_small(digit_folder, tmp_path / "run", **SETTINGS)
    assert state.load_file(tmp_path / "run" / state.LAST)["step"] == 3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"lr": 0.1}}, "the run was started with optim.lr = 0.05, this command has 0.1"),
        ({"seed": 1}, "the run was started with seed = 0, this command has 1"),
        ({"model": {"drop_path_rate": 0.5}}, "the run was started with model.drop_path_rate = None"),
    ],
)
def test_a_run_is_resumed_with_its_own_settings(digit_folder, finished, sections, message):
    with pytest.raises(AutoNLError, match=message):
        train_small(digit_folder, finished, resume=True, **SETTINGS | sections)


def test_a_run_is_resumed_with_its_own_network(digit_folder, finished):
    with pytest.raises(AutoNLError, match="holds a run of another network, small; this command trains digits"):
        train_small(digit_folder, finished, resume=True, network="digits", **SETTINGS)


def test_a_run_is_never_written_over(digit_folder, finished):
    with pytest.raises(AutoNLError, match="holds a run already; go on with it by --resume"):
        train_small(digit_folder, finished, **SETTINGS)


class Waiting(Progress):
    """Writes a file behind the first rows of the run, and waits there."""

    def __init__(self, written):
        self.written = written

    def row(self, row):
        self.written.touch()
        time.sleep(600)


def train_and_wait(path, folder, written):
    run.train_classifier(
        NETWORK, small_config(path, data={"workers": 1}), folder, where=ON_CPU, progress=lambda: Waiting(written)
    )


def test_a_run_is_written_by_one_process_at_a_time(digit_folder, tmp_path, monkeypatch):
    folder, written = tmp_path / "run", tmp_path / "written"
    process = in_child(train_and_wait, digit_folder, folder, written)
    try:
        while not written.exists():
            assert process.is_alive()
            time.sleep(0.05)
        before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        with monkeypatch.context() as patched:  # refused before a checkpoint is read that would be old by then
            patched.setattr(run, "read_checkpoint", lambda folder: pytest.fail("was read"))
            with pytest.raises(AutoNLError, match="run: another process is writing this run; wait for its end, or"):
                resume_told(digit_folder, folder)
        for path in (folder / state.LAST, folder / "config.yaml"):
            path.rename(tmp_path / path.name)  # as if the first process had not come to write it
        with pytest.raises(AutoNLError, match="another process is writing this run"):
            train_small(digit_folder, folder, **SETTINGS)
        for name in (state.LAST, "config.yaml"):
            (tmp_path / name).rename(folder / name)
        assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    finally:
        kill(process)
    assert "going on behind step 3" in resume_told(digit_folder, folder)[0]  # its data worker may still be there


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_wrote_meanwhile_is_kept(digit_folder, finished, monkeypatch, tmp_path, resume):
    """Between the look for a checkpoint and the lock lies the reading of all images."""
    folder, opened = tmp_path / "new", run.open_source

    def open_late(*arguments):
        finished.rename(folder)
        return opened(*arguments)

    monkeypatch.setattr(run, "open_source", open_late)
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    with pytest.raises(AutoNLError, match="new: another process has written a run there meanwhile; go on with it by"):
        train_small(digit_folder, folder, resume=resume, **SETTINGS)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before | {lock.LOCK_FILE: b""}
    assert another_could_take(folder)


class Impatient(Progress):
    def row(self, row):
        raise KeyboardInterrupt


def test_a_run_is_free_when_it_is_over_whatever_ended_it(digit_folder, tmp_path):
    """A notebook keeps the last exception, and with it all that its frames hold."""
    folder, config = tmp_path / "run", small_config(digit_folder, **SETTINGS)
    with pytest.raises(KeyboardInterrupt) as kept:
        run.train_classifier(NETWORK, config, folder, where=ON_CPU, progress=Impatient)
    assert another_could_take(folder)
    with run.start(config, folder, True, ON_CPU, Progress):
        assert not another_could_take(folder)
        del kept
        gc.collect()
        assert not another_could_take(folder)


def test_a_folder_that_cannot_be_locked_is_written_to(tmp_path, monkeypatch):
    """File systems of clusters know no locks."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", no_locks)
    assert lock.Lock(tmp_path).take()
    assert lock.Lock(tmp_path / "not there").take()
    monkeypatch.setattr(lock, "fcntl", None)
    assert lock.Lock(tmp_path).take()


def test_a_run_of_before_a_setting_of_speed_came_is_resumed(digit_folder, finished):
    """Checkpoints know the settings of their time."""
    assert flat(to_dict(Config())).keys() >= MAY_CHANGE
    for name in (state.LAST, state.PREVIOUS):
        content = torch.load(finished / name, weights_only=True)
        for setting in ("graph", "kernels"):
            content["about"]["config"]["loop"].pop(setting)
        torch.save(content, finished / name)
    assert "going on behind step 18" in resume_told(digit_folder, finished)[0]


def test_a_second_run_of_the_same_process_neither_gets_nor_frees_the_lock(tmp_path):
    """To the system both are one: closing either's file would take the lock from both."""
    (tmp_path / "link").symlink_to(tmp_path)
    first, second = lock.Lock(tmp_path), lock.Lock(tmp_path / "link")
    assert first.take()
    assert not second.take()
    second.release()
    assert not another_could_take(tmp_path)
    with pytest.raises(
        AutoNLError, match="another run of this process is writing this run; wait for its end, or choose"
    ):
        train_small("digits", tmp_path)
    first.release()
    assert another_could_take(tmp_path)
    assert second.take()
    second.release()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"pad_tipe": "same"}}, "model: .*pad_tipe"),
        ({"model": {"num_classes": 7}}, "the network tells 7 classes apart, the data has 10"),
        ({"optim": {"name": "sdg"}}, "optim: .*sdg"),
        ({"optim": {"arguments": {"epz": 1}}}, "optim: .*epz"),
        (
            {"optim": {"name": "adamw", "arguments": {"betas": []}}},
            r"optim: adamw cannot be made with {'betas': \[\]}: IndexError",
        ),
        (
            {"optim": {"name": "lookahead_adahessian"}},
            "optim.name: 'lookahead_adahessian' is not allowed; allowed: an optimiser that needs no second derivatives",
        ),
        (  # two rounds of one image, whose maps end as one pixel
            {"data": {"batch_size": 2, "image_size": 4}},
            "data.batch_size: the network cannot be trained on 1 image of 4x4 at a time: Expected more than 1 value",
        ),
        ({"data": {"batch_size": 15}}, "data.batch_size: 15 cannot be divided"),
        ({"data": {"batch_size": 1000}}, "100 training images do not fill one batch: data.batch_size is 1000"),
        ({"data": {"path": None}}, "no images: give --data DIR"),
    ],
)
def test_settings_that_do_not_fit_the_network_or_the_data(digit_folder, tmp_path, sections, message):
    with pytest.raises(AutoNLError, match=message):
        train_small(digit_folder, tmp_path / "run", **sections)
    assert not (tmp_path / "run").exists()

"""A segmentation from end to end: its mIoU counted again by hand, with one and two processes; resume; the folder."""

import csv
import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

import autonl
from autonl.arch.codec import write_arch
from autonl.data.pairs import VOID
from autonl.errors import AutoNLError
from autonl.segment.network import load_segmenter
from autonl.segment.pictures import overlaid, palette
from autonl.segment.run import train_segmenter
from autonl.train.progress import Progress
from tests.segment.small import CLASSES, segment_config, segment_small, write_set
from tests.segment.test_task import confusion, mean_iou
from tests.train.small import NETWORK, ON_CPU, held_by_another, rows
from tests.train.test_processes import join, processes


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("drawn") / "set")


@pytest.fixture(scope="module")
def finished(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, segment_small(drawn, folder)


def counted_by_hand(drawn, folder):
    """The confusion matrix of the run's network over the validation files, one image at a time."""
    network = load_segmenter(folder)
    mean, std = (torch.tensor(NETWORK_COLOURS[kind]).view(3, 1, 1) for kind in ("mean", "std"))
    counts = np.zeros((len(CLASSES), len(CLASSES)), dtype=np.int64)
    for path in sorted((drawn / "val" / "images").iterdir()):
        pixels = torch.tensor(np.asarray(Image.open(path))).permute(2, 0, 1)  # (3, 20, 28)
        padded = (mean * 255).round().expand(3, 32, 32).clone()
        padded[:, :20, :28] = pixels
        with torch.no_grad():
            predicted = network(((padded / 255 - mean) / std)[None])[0].argmax(0)
        truth = np.asarray(Image.open(drawn / "val" / "masks" / path.name))
        counts += confusion(truth, predicted[:20, :28].numpy(), len(CLASSES))
    return counts


NETWORK_COLOURS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def assert_counted_by_hand(drawn, folder):
    counts = counted_by_hand(drawn, folder)
    result = json.loads((folder / "result.json").read_text())
    assert result["val_pixels"] == counts.sum()
    assert result["miou"] == pytest.approx(mean_iou(counts), abs=1e-9)
    assert result["pixel_accuracy"] == pytest.approx(100 * np.trace(counts) / counts.sum())
    with open(folder / "iou.csv") as file:
        listed = {row["class"]: row["iou"] for row in csv.DictReader(file)}
    assert tuple(listed) == CLASSES
    assert np.mean([float(value) for value in listed.values() if value]) == pytest.approx(result["miou"])


def test_miou_is_that_of_the_confusion_matrix(drawn, finished):
    folder, result = finished
    assert_counted_by_hand(drawn, folder)
    assert result.metrics["miou"] == json.loads((folder / "result.json").read_text())["miou"]


def test_miou_with_two_processes(drawn, tmp_path):
    """Five images on two ranks in batches of two: one rank has one more, and none counts twice."""
    join(processes(2, segment_small, drawn, tmp_path / "run"))
    assert_counted_by_hand(drawn, tmp_path / "run")


def test_a_segmentation_that_another_process_writes_is_refused(drawn, tmp_path):
    with held_by_another(tmp_path / "run"), pytest.raises(AutoNLError, match="another process is writing this run"):
        segment_small(drawn, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_the_run_folder(finished):
    folder, result = finished
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "arch.yaml", "best.safetensors", "classes.txt", "config.yaml", "final.safetensors", "iou.csv",
        "last.ckpt", "metrics.csv", "overlays.png", "previous.ckpt", "result.json", "run.yaml", "tensorboard",
    }  # fmt: skip
    assert yaml.safe_load((folder / "run.yaml").read_text())["task"] == "segmentation"
    assert (folder / "classes.txt").read_text().split() == list(CLASSES)
    assert [row["step"] for row in rows(folder)] == ["2", "4"]
    assert result.step == 4
    with Image.open(folder / "overlays.png") as picture:
        assert min(picture.size) > 400


class StoppedError(Exception):
    """A run that ends in the middle."""


class Begun(Progress):
    done: int

    def begin(self, steps, done, batch_size):
        Begun.done = done


class StopBehindThree(Progress):
    def advance(self, step, scalars):
        if step == 3:
            raise StoppedError


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(drawn, finished, tmp_path):
    config = segment_config(drawn, loop={"log_steps": 1, "checkpoint_steps": 1})
    with pytest.raises(StoppedError):
        train_segmenter(NETWORK, config, tmp_path / "run", where=ON_CPU, progress=StopBehindThree)
    assert not (tmp_path / "run" / "result.json").exists()
    train_segmenter(NETWORK, config, tmp_path / "run", resume=True, where=ON_CPU, progress=Begun)
    assert Begun.done == 2
    assert rows(tmp_path / "run") == rows(finished[0])
    weights, expected = (load_file(folder / "final.safetensors") for folder in (tmp_path / "run", finished[0]))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    with pytest.raises(AutoNLError, match=r"was started with segment\.head_lr = 10\.0, this command has 1\.0"):
        segment_small(drawn, tmp_path / "run", resume=True, segment={"head_lr": 1.0})


def test_it_learns(drawn, tmp_path):
    """Colours are classes: a few steps tell them apart."""
    result = segment_small(
        drawn, tmp_path / "run", schedule={"epochs": 8}, data={"in_memory": False}, loop={"evaluate_epochs": 8}
    )
    first, last = result.history[0], result.history[-1]
    assert last["train_loss"] < 0.6 * first["train_loss"]
    assert result.metrics["miou"] > 40


def test_a_classification_run_lends_its_weights_and_its_colours(drawn, tmp_path):
    lender = tmp_path / "lender"
    lender.mkdir()
    write_arch(NETWORK, lender / "arch.yaml")
    save_file(autonl.create_model(NETWORK).state_dict(), lender / "final.safetensors")
    (lender / "config.yaml").write_text("data: {mean: [0.1, 0.2, 0.3], std: [0.5, 0.5, 0.5]}")
    segment_small(
        drawn, tmp_path / "run", ref=str(lender), optim={"lr": 0.0}, schedule={"epochs": 1}, segment={"pictures": 0}
    )  # with a rate of zero the weights stay those it started with
    lent, kept = (load_file(tmp_path / name / "final.safetensors") for name in ("lender", "run"))
    backbone = {name.removeprefix("backbone."): tensor for name, tensor in kept.items() if name.startswith("backbone")}
    assert backbone.keys() == {name for name in lent if not name.startswith(("conv_head", "bn2", "classifier"))}
    for name, tensor in backbone.items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(tensor, lent[name]), name
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["data"]["mean"] == [0.1, 0.2, 0.3]
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["weights"].endswith("final.safetensors")


def test_the_run_folder_of_a_network_of_timm(drawn, tmp_path):
    """It has no arch.yaml, but timm's arguments; they come along, and so they do out of the segmentation's folder."""
    arguments = {"num_classes": 7, "pad_type": "same"}
    lent = autonl.create_model("timm:mobilenetv2_035", **arguments).state_dict()
    (tmp_path / "lender").mkdir()
    save_file(lent, tmp_path / "lender" / "final.safetensors")
    (tmp_path / "lender" / "run.yaml").write_text(yaml.safe_dump({"ref": "timm:mobilenetv2_035", "model": arguments}))
    settings = {"data": {"image_size": 32}, "optim": {"lr": 0.0}, "schedule": {"epochs": 1}, "segment": {"pictures": 0}}
    segment_small(drawn, tmp_path / "run", ref=str(tmp_path / "lender"), **settings)
    network = load_segmenter(tmp_path / "run")
    assert type(network.backbone.conv_stem).__name__ == "Conv2dSame"
    assert torch.equal(network.backbone.conv_stem.weight, lent["conv_stem.weight"])
    assert not (tmp_path / "run" / "overlays.png").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"augment": {"scale": [0.5, 1.0]}}, "augment.scale: .* is not allowed; allowed: segment.scale, augment.flip"),
        ({"augment": {"auto_augment": "rand-m9"}}, "augment.auto_augment"),
        ({"data": {"crop_pct": 0.5}}, "data.crop_pct: 0.5 is not allowed; allowed: 1.0: the whole image"),
        ({"data": {"interpolation": "nearest"}}, "data.interpolation: 'nearest' is not allowed; allowed: bilinear"),
        ({"data": {"selection": 0.1}}, "data.selection: 0.1 is not allowed; allowed: 0.0: it is judged by"),
        ({"data": {"max_corrupt": 5}}, "data.max_corrupt: 5 is not allowed; allowed: 0: the first"),
        ({"segment": {"output_stride": 4}}, "segment.output_stride: 4 is not allowed; allowed: 8, 16, 32"),
        ({"segment": {"scale": [2.0, 0.5]}}, "segment.scale"),
        ({"data": {"batch_size": 1}}, "data.batch_size: 1 is not allowed; allowed: two images and more"),
        ({"loop": {"accumulate": 4}}, "data.batch_size: 4 is not allowed; allowed: two images and more"),
        ({"data": {"batch_size": 16}}, "8 training images do not fill one batch"),
        ({"model": {"in_chans": 1}}, "does not take colour images of 32x32"),
    ],
)
def test_settings_that_do_not_fit_leave_nothing_behind(drawn, tmp_path, sections, message):
    with pytest.raises(AutoNLError, match=message):
        segment_small(drawn, tmp_path / "run", **sections)
    assert not (tmp_path / "run").exists()


def test_colours_of_an_overlay():
    """VOC's: background black, aeroplane (128, 0, 0), bicycle (0, 128, 0), tvmonitor (0, 64, 128)."""
    assert palette()[[0, 1, 2, 20, VOID]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [0, 64, 128], [224, 224, 192],
    ]  # fmt: skip
    image = np.full((1, 2, 3), 100, dtype=np.uint8)
    assert overlaid(image, np.array([[0, 1]])).tolist() == [[[40, 40, 40], [117, 40, 40]]]

"""The images that an export shows a network: from all over a set, with the network's own numbers of classes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from autonl.data.memory import View
from autonl.data.sources import holds_loose_pictures
from autonl.export.images import batches, class_numbers


def test_images_come_from_all_over_a_set_and_ranges_from_its_training_part(tmp_path):
    """Folders are sorted by class; every image here has one colour, which tells it."""
    for split, base in (("train", 0), ("val", 100)):
        for label in range(5):
            (tmp_path / split / str(label)).mkdir(parents=True)
            for number in range(2):
                pixels = np.full((16, 16, 3), base + 10 * label + number, np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / str(label) / f"{number}.png")
    model = nn.Module()
    model.num_classes = 5
    view = View((16, 16), mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3)

    def colours(most, training):
        shown = batches(str(tmp_path), model, view, most, training=training)
        return [round(image.mean().item()) for images, _ in shown for image in images]

    assert colours(5, training=True) == [0, 10, 20, 30, 40]
    assert colours(3, training=False) == [100, 111, 130]  # every 10 / 3rd
    assert len(colours(99, training=False)) == 10
    labels = [labels for _, labels in batches("digits", model, view, 20)]
    assert set(torch.cat(labels).tolist()) == {-1}  # ten classes are not the network's five
    model.num_classes = 11
    labels = [labels for _, labels in batches("digits", model, view, 20)]
    assert set(torch.cat(labels).tolist()) == {-1}  # nor eleven
    model.num_classes = 10
    labels = [labels for _, labels in batches("digits", model, view, 20)]
    assert torch.cat(labels).bincount().tolist() == [2] * 10


@pytest.mark.parametrize(
    ("classes", "names", "count", "numbers", "told"),
    [
        (("a", "b"), (), 2, [0, 1], ""),
        (("a", "b"), (), 3, None, "no top-1: DIR has 2 classes, the network 3"),
        (("a", "b"), ("b", "c", "a"), 3, [2, 0], ""),  # in the order that the run had, and fewer
        (("a", "d"), ("a", "b"), 2, None, "no top-1: the class 'd' of DIR is not one of the network's"),
        ((), ("a", "b"), 2, None, ""),  # no class folders
    ],
)
def test_the_classes_of_a_folder_and_the_network(classes, names, count, numbers, told, caplog):
    found = class_numbers("DIR", classes, names, count)
    assert (None if found is None else found.tolist()) == numbers
    assert "".join(caplog.messages) == told


@pytest.mark.parametrize("training", [False, True])
def test_pictures_without_class_folders_judge_and_calibrate(tmp_path, training):
    """A folder of one's own pictures: no label is needed for either."""
    for value in (0, 255):
        Image.new("RGB", (40, 40), (value,) * 3).save(tmp_path / f"{value}.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    model = nn.Module()
    model.num_classes = 1
    view = View((16, 16), mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3)
    ((pictures, labels),) = batches(str(tmp_path), model, view, 10, training=training)
    assert [round(picture.mean().item()) for picture in pictures] == [0, 255]
    assert labels.tolist() == [-1, -1]


def test_what_holds_loose_pictures(tmp_path, monkeypatch):
    """Not where class folders or a split are meant, nor the embedded set, whatever lies in a folder of its name."""
    monkeypatch.chdir(tmp_path)
    folder = Path("digits")
    folder.mkdir()
    (folder / "a.PNG").touch()
    assert not holds_loose_pictures("digits")
    assert not holds_loose_pictures("no such folder")
    loose = folder.rename("mine")
    (loose / ".hidden").mkdir()
    assert holds_loose_pictures("mine")
    (loose / "val.tar").touch()
    assert not holds_loose_pictures("mine")
    (loose / "val.tar").rename(loose / "notes.txt")
    (loose / "cats").mkdir()
    assert not holds_loose_pictures("mine")
    (loose / "cats").rmdir()
    (loose / "a.PNG").unlink()
    assert not holds_loose_pictures("mine")

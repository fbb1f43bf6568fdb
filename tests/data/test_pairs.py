"""Which image has which mask, and what is said of sets that are not in order."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from autonl.data.config import DataConfig
from autonl.data.pairs import VOC_CLASSES, VOID, open_pairs
from autonl.errors import AutoNLError
from tests.conftest import shared_data
from tests.segment.small import CLASSES, draw, write_pairs, write_set


def opened(root, **settings):
    return open_pairs(DataConfig(path=str(root), **settings))


def names(pairs):
    return [path.stem for path in pairs.images]


def test_a_folder_with_train_and_val(tmp_path):
    source = opened(write_set(tmp_path / "set"))
    assert source.classes == CLASSES
    assert names(source.train) == [f"{n:03d}" for n in range(8)]
    assert names(source.validation) == [f"{n:03d}" for n in range(100, 105)]
    image, mask = source.validation.open(3)
    expected, classes = draw(103)
    assert np.array_equal(np.asarray(image), expected)
    assert np.array_equal(mask, classes)
    assert set(np.unique(mask)) == {0, 1, 2, VOID}


def test_a_folder_is_split_the_same_way_every_time(tmp_path):
    folder = write_pairs(tmp_path / "set", 10)
    (folder / "masks" / "more.png").touch()  # a mask without an image is nobody's
    (folder / "images" / ".DS_Store").touch()
    (tmp_path / "list.txt").write_text("a\nb\nc\n")
    source = opened(folder, held_out=0.3, classes=str(tmp_path / "list.txt"))
    assert (len(source.train), len(source.validation)) == (7, 3)
    assert sorted(names(source.train) + names(source.validation)) == [f"{n:03d}" for n in range(10)]
    assert opened(folder, held_out=0.3, classes=str(tmp_path / "list.txt")) == source


@pytest.mark.parametrize(("mode", "kept"), [("P", True), ("I;16", True), ("RGB", False), ("LA", False)])
def test_kinds_of_masks(tmp_path, mode, kept):
    folder = write_set(tmp_path / "set", 2, 1)
    _, mask = draw(100)
    if mode == "P":
        saved = Image.fromarray(mask)
        saved.putpalette(list(range(256)) * 3)  # colours are not classes
    elif mode == "I;16":
        saved = Image.fromarray(mask.astype(np.uint16))
    else:
        saved = Image.fromarray(mask).convert(mode)
    assert saved.mode == mode
    saved.save(folder / "val" / "masks" / "100.png")
    pairs = opened(folder).validation
    if kept:
        assert np.array_equal(pairs.open(0)[1], mask)
    else:
        with pytest.raises(AutoNLError, match=f"100.png: the mask has {mode} colours; allowed: one channel"):
            pairs.open(0)


def wrong_class(folder):
    _, mask = draw(102)
    mask[4, 7] = 9
    Image.fromarray(mask).save(folder / "val" / "masks" / "102.png")


def other_size(folder):
    Image.fromarray(draw(102, 20, 27)[1]).save(folder / "val" / "masks" / "102.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_class, "102.png: the mask has the class 9 at x 7, y 4; allowed: 0 to 2, the places in the class list"),
        (other_size, "102.png: the mask is 27x20, its image 102.png is 28x20; allowed: the same size"),
        (lambda folder: (folder / "val/images/102.png").write_text("x"), "images/102.png: not an image that can be"),
        (lambda folder: (folder / "val/masks/102.png").write_text("x"), "masks/102.png: not a mask that can be read"),
    ],
)
def test_a_bad_pair_is_named(tmp_path, damage, message):
    folder = write_set(tmp_path / "set")
    damage(folder)
    pairs = opened(folder).validation
    with pytest.raises(AutoNLError, match=re.escape(message)):
        pairs.open(2)
    pairs.open(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "val/masks/103.png").unlink(), r"images/103.png: the image has no mask .*val/masks/103.png"),
        (lambda f: shutil.rmtree(f / "train/masks"), "train/masks: no such folder; a set has images/NAME.jpg and"),
        (lambda f: [p.unlink() for p in (f / "train/images").iterdir()], "train/images: holds no images"),
        (lambda f: shutil.copy(f / "val/images/100.png", f / "val/images/100.jpg"), "100.jpg has the same name"),
        (lambda f: (f / "classes.txt").unlink(), "holds neither VOCdevkit/VOC2012 nor classes.txt, the class list"),
        (lambda f: (f / "classes.txt").write_text("a\nb\na"), "classes.txt: the class list has 'a' twice, in lines 1"),
        (lambda f: (f / "classes.txt").write_text("a\n\nb"), "classes.txt: line 2 of the class list is empty"),
        (lambda f: (f / "classes.txt").write_text("a"), "the class list has 1 classes; allowed: 2 to 255"),
        (lambda f: shutil.rmtree(f), "set: no such folder"),
        (lambda f: (f / "JPEGImages").mkdir(), "set: lies inside VOC; give the folder that holds VOCdevkit/VOC2012"),
    ],
)
def test_a_set_that_is_not_in_order(tmp_path, damage, message):
    folder = write_set(tmp_path / "set")
    damage(folder)
    with pytest.raises(AutoNLError, match=message):
        opened(folder)


def test_no_folder_and_a_single_image(tmp_path):
    with pytest.raises(AutoNLError, match="no images: give --data DIR"):
        open_pairs(DataConfig())
    folder = write_pairs(tmp_path / "one", 1)
    (folder / "classes.txt").write_text("a\nb\nc")
    with pytest.raises(AutoNLError, match="one image, none to hold out"):
        opened(folder)


@pytest.fixture
def voc(tmp_path):
    """Eight drawn images in VOC's layout."""
    root = tmp_path / "VOCdevkit" / "VOC2012"
    drawn = write_pairs(tmp_path / "drawn", 8)
    shutil.copytree(drawn / "masks", root / "SegmentationClass")
    (root / "JPEGImages").mkdir()
    for path in (drawn / "images").iterdir():
        Image.open(path).save(root / "JPEGImages" / f"{path.stem}.jpg")
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    for split, chosen in (("train", "000 001 002 003 004"), ("val", "005 006 007")):
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(chosen.replace(" ", "\n"))
    return tmp_path


def test_voc(voc):
    source = opened(voc)
    assert (source.classes, names(source.validation)) == (VOC_CLASSES, ["005", "006", "007"])
    assert np.array_equal(source.validation.open(1)[1], draw(6)[1])
    with pytest.raises(AutoNLError, match="VOC2012: lies inside VOC; give the folder that holds"):
        opened(voc / "VOCdevkit" / "VOC2012")
    (voc / "VOCdevkit" / "VOC2012" / "SegmentationClass" / "006.png").unlink()
    with pytest.raises(AutoNLError, match=r"006.jpg: the image has no mask .*006.png"):
        opened(voc)
    (voc / "VOCdevkit" / "VOC2012" / "ImageSets" / "Segmentation" / "train.txt").unlink()
    with pytest.raises(AutoNLError, match="no VOC 2012 with a segmentation set 'train'"):
        opened(voc)


def test_the_real_set(tmp_path):
    unpack = shared_data("voc2012_seg.tar.gz").parent / "unpack.py"
    subprocess.run([sys.executable, unpack, "voc2012", tmp_path], check=True, stdout=subprocess.DEVNULL)
    source = opened(tmp_path)
    assert (len(source.train), len(source.validation)) == (1464, 1449)
    for place in (0, 700, 1463):
        image, mask = source.train.open(place)
        assert max(mask.shape) == max(image.size) == 288
        assert set(np.unique(mask)) <= {*range(21), VOID}

"""Folders, archives and streams -> labelled images; what is wrong with them in one line."""

import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import ColorJitter

from autonl.data import sources
from autonl.data.config import AugmentConfig, DataConfig
from autonl.data.loaders import Loaders
from autonl.data.memory import StoredImages, View
from autonl.data.order import Share, split_by_class
from autonl.data.sources import open_evaluation, open_source, to_rgb
from autonl.errors import AutoNLError

CPU = torch.device("cpu")
VIEW = View((8, 8), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear", 1.0)


def write_images(root, counts, side=8):
    """Class folders, the pixels of every image all of one value that names it."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (side, side), (value, value, value)).save(root / name / f"{number}.png")
            value += 1
    return root


def loaders(workers=0, share=Share(), **settings):
    config = DataConfig(batch_size=4, evaluation_batch_size=3, workers=workers, **settings)
    return Loaders(config, AugmentConfig(), VIEW, 3, CPU, share, seed=1)


def values(batches):
    """The image's value, by its constant pixels, and its label."""
    return [
        (round(float(image.mean() * 127.5 + 127.5)), int(label))
        for images, labels in batches
        for image, label in zip(images, labels, strict=True)
    ]


def test_a_folder_of_class_folders_is_split_by_class(tmp_path):
    root = write_images(tmp_path / "set", {"b": 10, "a10": 10, "a9": 10})
    source = open_source(DataConfig(path=str(root), held_out=0.2))
    assert source.classes == ("a9", "a10", "b")  # natural order: timm's
    assert (len(source.train), len(source.validation), source.selection) == (24, 6, None)
    assert np.bincount(source.validation.labels).tolist() == [2, 2, 2]
    assert not set(source.train.indices) & set(source.validation.indices)
    assert source.train.name(0).endswith("a9/0.png") or source.train.name(0).endswith("a9/1.png")


def test_what_counts_as_an_image(tmp_path):
    endings = ["png", "jpg", "JPEG", "webp", "bmp", "gif", "tif", "tiff"]
    for value, ending in enumerate(endings):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (value, value, value)).save(tmp_path / "a" / f"{value}.{ending}")
    (tmp_path / "a" / "readme.txt").write_text("no image")
    images = open_evaluation(DataConfig(path=str(tmp_path)), classes=("a", "b")).validation
    assert sorted(images.name(place)[-3:] for place in range(len(images))) == sorted(end[-3:] for end in endings)
    assert [images.open(place).mode for place in range(len(images))] == ["RGB"] * len(endings)


def test_a_root_with_train_and_val(tmp_path):
    write_images(tmp_path / "train", {"a": 3, "b": 3})
    write_images(tmp_path / "val", {"b": 2})
    source = open_source(DataConfig(path=str(tmp_path)))
    assert (len(source.train), source.validation.labels.tolist()) == (6, [1, 1])  # the label of training
    assert len(open_evaluation(DataConfig(path=str(tmp_path)), classes=("a", "b")).validation) == 2
    chosen = open_source(DataConfig(path=str(tmp_path), selection=0.34))
    assert (len(chosen.train), chosen.selection.labels.tolist()) == (4, [0, 1])


def test_an_archive_is_read_as_its_folder(tmp_path):
    root = write_images(tmp_path / "set", {"a": 4, "b": 4})
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        archive.add(root, arcname="set")
    from_tar = open_evaluation(DataConfig(path=str(tmp_path / "set.tar")))
    from_folder = open_evaluation(DataConfig(path=str(root)))
    assert from_tar.classes == from_folder.classes == ("a", "b")
    expected = values(loaders().evaluation(from_folder.validation))
    assert values(loaders(workers=2).evaluation(from_tar.validation)) == expected
    assert expected == [(value, value // 4) for value in range(8)]


def write_archive(path, names):
    """An image a name; one that ends in .tar is an archive with the one image 0.png, or the one behind a colon."""
    with tarfile.open(path, "w") as archive:
        for value, entry in enumerate(names):
            name, _, inner = entry.partition(":")
            place = path.parent / f"{value}{Path(name).suffix}"
            if place.suffix == ".tar":
                write_archive(place, [inner or "0.png"])
            elif place.suffix == ".png":
                Image.new("RGB", (8, 8), (value, value, value)).save(place)
            else:
                place.write_text("no image")
            archive.add(place, arcname=name)


@pytest.mark.parametrize(
    "names",
    [
        ["a/0.png", "b/0.png"],
        ["./a/0.png", "./b/0.png"],
        ["set/a/0.png", "set/b/0.png", "readme.txt"],
        ["a.tar", "b.tar"],
        ["./set/a.tar", "./set/b.tar"],
        ["a.tar:a/0.png", "b.tar:./b/0.png"],
    ],
)
def test_class_folders_in_an_archive(tmp_path, names):
    write_archive(tmp_path / "set.tar", names)
    source = open_evaluation(DataConfig(path=str(tmp_path / "set.tar")))
    assert (source.classes, sorted(source.validation.labels.tolist())) == (("a", "b"), [0, 1])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train/a/0.png", "train/b/0.png", "val/a/0.png"], "set.tar: holds train and val; allowed: class folders"),
        (["set/train/a/0.png", "set/val/a/0.png"], "set.tar: holds train and val"),
        (["a/left/0.png", "a/right/0.png", "b/0.png"], "'a/left' is a folder inside a class"),
        (["a/0.png", "b/0.png", "0.png"], "the image '0.png' lies in no class folder"),
        (["a/0.png", "a/x/0.png"], "the image 'a/0.png' lies in no class folder"),
        (["train/a.tar", "train/b.tar", "val/a.tar"], "set.tar: holds train and val"),
        (["x/a.tar", "y/a.tar"], "'x/a' is a folder inside a class"),
        (["a.tar:x/0.png", "a.tar:y/0.png", "b.tar"], "'a/x' is a folder inside a class"),
        (["0.png", "1.png"], "the image '0.png' lies in no class folder"),
        (["readme.txt"], "set.tar: holds no images"),
    ],
)
def test_an_archive_that_is_refused(tmp_path, names, message):
    """timm's reader would make a class of the last folder of any path."""
    write_archive(tmp_path / "set.tar", names)
    with pytest.raises(AutoNLError, match=message):
        open_evaluation(DataConfig(path=str(tmp_path / "set.tar")))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("a\n\nb\n", "names.txt: line 2 of the class list is empty"),
        ("a\nb\na\n", "names.txt: the class list has 'a' twice, in lines 1 and 3; allowed: once"),
        ("a\n", "names.txt: the class list has 1 classes; allowed: 2 and more"),
        ("a\nc\n", "the class 'b' is not one of the 2 known ones"),
    ],
)
@pytest.mark.parametrize("opened", [open_source, open_evaluation])
def test_a_class_list_that_is_refused(tmp_path, opened, names, message):
    write_images(tmp_path / "set", {"a": 2, "b": 2})
    (tmp_path / "names.txt").write_text(names)
    with pytest.raises(AutoNLError, match=message):
        opened(DataConfig(path=str(tmp_path / "set"), classes=str(tmp_path / "names.txt")))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("1023456789", "digits: numbers its classes by itself: '0' is 0 there, and 1 for the network or in data.cla"),
        ("x234567891", "digits: numbers its classes by itself: '1' is 1 there, and 9 for the network"),
        ("012345678", "digits: numbers its 10 classes by itself, the network or data.classes has 9; allowed: as many"),
    ],
)
@pytest.mark.parametrize("opened", [open_source, open_evaluation])
def test_a_set_with_classes_of_its_own_has_those_of_the_network(opened, names, message):
    with pytest.raises(AutoNLError, match=message):
        opened(DataConfig(path="digits"), classes=tuple(names))
    for words in ("0123456789", "abcdefghij", "0b23456789"):  # other words for the same numbers
        assert opened(DataConfig(path="digits"), classes=tuple(words)).classes == tuple("0123456789")


def test_a_hugging_face_set_has_the_classes_of_the_network(monkeypatch):
    class Reader:
        label_key, dataset, class_to_idx = "label", {"label": [0, 1, 1]}, {"cat": 0, "dog": 1}

    monkeypatch.setattr(sources, "create_reader", lambda path, split: Reader())
    assert open_source(DataConfig(path="hfds/pets"), classes=("cat", "dog")).train.labels.tolist() == [0, 1, 1]
    with pytest.raises(AutoNLError, match=r"hfds/pets: numbers its classes by itself: 'cat' is 0 there, and 1 for the"):
        open_source(DataConfig(path="hfds/pets"), classes=("dog", "cat"))


def test_a_selection_that_no_class_can_give(tmp_path):
    write_images(tmp_path / "train", {"a": 1, "b": 1})
    write_images(tmp_path / "val", {"a": 1, "b": 1})
    with pytest.raises(AutoNLError, match=r"one training image, none to choose by for data.selection 0.1"):
        open_source(DataConfig(path=str(tmp_path), selection=0.1))


@pytest.mark.parametrize("in_memory", [False, True])
def test_training_goes_once_through_the_images(tmp_path, in_memory):
    root = write_images(tmp_path / "set", {"a": 4, "b": 4, "c": 4})
    images = open_evaluation(DataConfig(path=str(root))).validation
    batches = loaders(in_memory=in_memory).training(images)
    first = values(batches.epoch(0))
    assert sorted(first) == [(value, value // 4) for value in range(12)]
    assert values(batches.epoch(1)) != first
    assert values(batches.epoch(0, 1)) == first[4:]


def test_every_image_is_evaluated_once_on_uneven_ranks(tmp_path):
    root = write_images(tmp_path / "set", {"a": 4, "b": 3, "c": 4})
    images = open_evaluation(DataConfig(path=str(root))).validation
    seen = [loaders(share=Share(rank, 3)).evaluation(images) for rank in range(3)]
    assert sorted(chain(*map(values, seen))) == [(v, (v >= 4) + (v >= 7)) for v in range(11)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "no such folder"),
        (lambda root: root.mkdir(), "holds no images"),
        (lambda root: root.write_text("x"), "not a folder of class folders"),
        (
            lambda root: (write_images(root, {"a": 2, "b": 2}), (root / "empty").mkdir()),
            "class folder 'empty' holds no images$",
        ),
        (
            lambda root: (write_images(root, {"a": 2}), *((root / name).mkdir() for name in "bcd")),
            r"class folder 'b' \(and 2 more\) holds no images$",
        ),
        (
            lambda root: (write_images(root, {"a": 2}), Image.new("RGB", (8, 8)).save(root / "loose.png")),
            "'loose.png' lies in no class folder",
        ),
        (
            lambda root: (write_images(root / "train", {"a": 2, "b": 2}), write_images(root / "val", {"z": 2})),
            "the class 'z' is not one of the 2 known ones",
        ),
        (lambda root: write_images(root, {"a": 8}), "set: holds one class, a; allowed: two and more"),
        (
            lambda root: (write_images(root / "train", {"a": 2}), write_images(root / "val", {"a": 2})),
            "set: holds one class, a; allowed: two and more",
        ),
        (lambda root: write_images(root, {"a": 1, "b": 1}), "every class has one image, none to hold out"),
    ],
)
def test_a_folder_that_is_refused(tmp_path, make, message):
    make(tmp_path / "set")
    with pytest.raises(AutoNLError, match=message):
        open_source(DataConfig(path=str(tmp_path / "set")))


def test_a_class_folder_that_cannot_be_read_is_not_called_empty(tmp_path, monkeypatch):
    write_images(tmp_path / "set", {"a": 2})
    (tmp_path / "set" / "b").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # whoever runs the tests may read everything
    with pytest.raises(AutoNLError, match="the class folder 'b' cannot be read: permission denied"):
        open_source(DataConfig(path=str(tmp_path / "set")))


def spoil(root, names):
    for number, name in enumerate(names):
        content = (root / name).read_bytes()
        (root / name).write_bytes([b"", content[:40], b"not an image"][number % 3])


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_and_skipped(tmp_path, caplog, workers):
    root = write_images(tmp_path / "set", {"a": 4, "b": 4})
    spoil(root, ["a/1.png", "b/0.png", "b/1.png"])
    images = open_evaluation(DataConfig(path=str(root))).validation
    train = values(loaders(workers, max_corrupt=3).training(images).epoch(0))
    assert sorted(train) == sorted([(0, 0), (2, 0), (2, 0), (3, 0), (6, 1), (6, 1), (6, 1), (7, 1)])
    counted = [v for v in values(loaders(workers, max_corrupt=3).evaluation(images)) if v[1] >= 0]
    assert counted == [(0, 0), (2, 0), (3, 0), (6, 1), (7, 1)]
    in_memory = loaders(workers, max_corrupt=3, in_memory=True)
    assert values(in_memory.evaluation(images)) == counted
    assert set(values(in_memory.training(images).epoch(0))) < set(counted)
    named = {record.args[0] for record in caplog.records}
    assert named == {str(root / name) for name in ("a/1.png", "b/0.png", "b/1.png")}
    with pytest.raises(AutoNLError, match=r"3 images cannot be read, more than data.max_corrupt 2: .*a/1.png.*b/1.png"):
        list(loaders(workers, max_corrupt=2).evaluation(images))
    with pytest.raises(AutoNLError, match=r"images cannot be read, more than data.max_corrupt 2: "):
        list(loaders(workers, max_corrupt=2).training(images).epoch(0))


class Pairs(torch.utils.data.IterableDataset):
    """Stands in for timm's IterableImageDataset over WebDataset shards, a package that is not installed here."""

    transform, epoch = None, None

    def __init__(self, labels, promised=None):
        self.labels, self.promised = labels, promised or len(labels)

    def __iter__(self):
        return ((self.transform(Image.new("RGB", (8, 8))), label) for label in self.labels)

    def __len__(self):
        return self.promised

    def set_epoch(self, epoch):
        self.epoch = epoch

    def set_loader_cfg(self, num_workers):
        pass


def test_a_stream(monkeypatch):
    calls = []

    def create(name, root, split, **settings):
        calls.append((name, root, split, settings["is_training"]))
        return Pairs([0, 1, 2, 0, 1])

    monkeypatch.setattr(sources, "create_dataset", create)
    source = open_source(DataConfig(path="wds/some/shards", train_split="train-{0..3}.tar|5"))
    assert calls == [("wds/", "some/shards", "train-{0..3}.tar|5", True), ("wds/", "some/shards", "validation", False)]
    batches = loaders().training(source.train)
    assert [labels.tolist() for _, labels in batches.epoch(4)] == [[0, 1, 2, 0]]
    assert (source.train.dataset.epoch, batches.resumes_inside) == (4, False)
    assert [labels.tolist() for _, labels in loaders().evaluation(source.validation)] == [[0, 1, 2], [0, 1]]


def test_a_stream_that_ends_early_begins_again():
    batches = loaders().training(sources.Stream(Pairs([0, 1, 2, 0, 1], promised=8)))
    assert [labels.tolist() for _, labels in batches.epoch(0)] == [[0, 1, 2, 0]] * 2


def test_a_stream_without_a_batch_is_refused():
    """It would begin again for ever."""
    batches = loaders().training(sources.Stream(Pairs([0, 1, 2], promised=8)))
    with pytest.raises(AutoNLError, match=r"without a batch: each worker needs data.batch_size images of its own"):
        next(batches.epoch(0))


@pytest.mark.parametrize(("label", "message"), [(3, "the label 3; the network has classes 0 to 2"), (-2, "label -2")])
def test_a_label_outside_the_classes(label, message):
    with pytest.raises(AutoNLError, match=message):
        list(loaders().evaluation(sources.Stream(Pairs([0, label]))))


def test_a_package_that_is_missing():
    with pytest.raises(AutoNLError, match=r"wds/shards.*webdataset"):
        open_source(DataConfig(path="wds/shards", train_split="train-{0..3}.tar|5"))


def test_sixteen_bit_grey_is_scaled(tmp_path):
    values = np.array([[0, 25600], [51200, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    with Image.open(tmp_path / "grey.png") as image:
        assert np.asarray(to_rgb(image))[..., 0].tolist() == [[0, 100], [200, 255]]


@pytest.mark.parametrize(
    ("folders", "opened", "message"),
    [
        (("p/x", "q"), open_source, "'p/x' is a folder inside a class"),
        (("val/a", "val/b"), open_source, "holds val and no train"),
        (("train/a", "train/b"), open_evaluation, "holds train and no val"),
    ],
)
def test_layouts_that_could_be_misread_are_refused(tmp_path, folders, opened, message):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "0.png")
    with pytest.raises(AutoNLError, match=message):
        opened(DataConfig(path=str(tmp_path)))


def test_a_class_of_one_image_is_trained_on():
    kept, held_out = split_by_class(np.array([0] * 10 + [1]), 0.1)
    assert kept.tolist().count(10) == 1
    assert len(held_out) == 1


def test_stripes_do_not_survive_a_reduction():
    """One pixel wide, black and white: grey at half the size."""
    stripes = torch.tensor([0, 255], dtype=torch.uint8).repeat(32).expand(2, 3, 64, 64)
    loaders = Loaders(DataConfig(), AugmentConfig(), View((32, 24), (0.0,) * 3, (1.0,) * 3), 3, CPU)
    images = loaders.reduced(StoredImages(stripes, torch.zeros(2))).images
    assert images.shape == (2, 3, 32, 32)
    assert ((images.float() - 127.5).abs()[..., 1:-1] < 20).all()


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize(("size", "crop_pct"), [(32, 0.875), (32, 1.0), (64, 0.875)])  # 4, 0 and 9 pixels are cut
def test_images_in_memory_are_evaluated_as_their_files_are(tmp_path, size, crop_pct, interpolation):
    """And as the script beside an export sees them: the centre of the image, not a smaller one enlarged."""
    rng = np.random.default_rng(0)
    for number, sides in enumerate(((60, 80), (80, 61), (47, 36), (90, 90))):
        folder = tmp_path / "set" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        small.resize(sides, Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    images = open_evaluation(DataConfig(path=str(tmp_path / "set"))).validation
    view = View((size, size), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), interpolation, crop_pct)
    seen = []
    for in_memory in (False, True):
        config = DataConfig(batch_size=2, evaluation_batch_size=4, workers=0, in_memory=in_memory)
        (batch,) = Loaders(config, AugmentConfig(), view, 2, CPU, Share(), seed=1).evaluation(images)
        seen.append(batch[0])
    assert seen[0].std() > 0.1
    assert torch.allclose(*seen, atol=1e-4)


def test_colour_beside_auto_augment():
    """timm's own way leaves it out, and a setting that does nothing is a lie."""
    augment = AugmentConfig(colour=(0.4, 0.4, 0.4), auto_augment="rand-m9-mstd0.5")
    steps = Loaders(DataConfig(), augment, VIEW, 3, CPU).training_transform().transforms
    assert [step.brightness for step in steps if isinstance(step, ColorJitter)] == [(0.6, 1.4)]

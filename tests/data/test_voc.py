"""VOC through torchvision: masks stay with their images, and what is filled in does not count."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from autonl.data.config import DataConfig
from autonl.data.memory import View
from autonl.data.order import Share
from autonl.data.voc import VOID, FitInto, open_voc
from autonl.errors import AutoNLError
from tests.conftest import shared_data

CPU = torch.device("cpu")
VIEW = View((24, 24), (0, 0, 0), (1, 1, 1))


@pytest.fixture
def voc(tmp_path):
    """Images whose red value is their mask: 20 rows of 30, the left half class 5, the right half class 9."""
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    classes = np.full((20, 30), 5, dtype=np.uint8)
    classes[:, 15:] = 9
    for name in map(str, range(8)):
        pixels = np.repeat(classes[..., None] * 20, 3, axis=2)
        Image.fromarray(pixels).save(root / "JPEGImages" / f"{name}.jpg", quality=100, subsampling=0)
        Image.fromarray(classes).save(root / "SegmentationClass" / f"{name}.png")
    for split, names in (("train", "0 1 2 3 4"), ("val", "5 6 7")):
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(names.replace(" ", "\n"))
    return tmp_path


def opened(root, workers=0, **settings):
    config = DataConfig(path=str(root), batch_size=2, evaluation_batch_size=2, workers=workers, **settings)
    return open_voc(config, VIEW, CPU, Share(), seed=4)


def test_masks_stay_with_their_images(voc):
    train, validation = opened(voc)
    assert (len(train), [len(masks) for _, masks in validation]) == (2, [2, 1])
    for images, masks in [*train.epoch(0), *validation]:
        assert images.shape[-2:] == masks.shape[-2:] == (24, 24)
        assert set(masks.unique().tolist()) <= {5, 9, VOID}
        red = (images[:, 0] * 255).round()
        for label in (5, 9):  # but for JPEG and the pixels that a resize mixes at the border
            assert (red[masks == label] - 20 * label).abs().median() <= 3


def test_the_same_epoch_is_the_same_with_workers(voc):
    alone, divided, other = opened(voc)[0], opened(voc, workers=2)[0], opened(voc)[0]
    for (images, masks), (same, same_masks) in zip(alone.epoch(1), divided.epoch(1), strict=True):
        assert torch.equal(images, same)
        assert torch.equal(masks, same_masks)
    assert not all(torch.equal(a, b) for (a, _), (b, _) in zip(alone.epoch(1), other.epoch(2), strict=True))


def test_an_evaluation_sees_the_whole_image(voc):
    image, mask = torch.zeros(3, 48, 24, dtype=torch.uint8), torch.zeros(1, 48, 24, dtype=torch.uint8)
    _, fitted = FitInto((24, 24))(tv_tensors.Image(image), tv_tensors.Mask(mask))
    assert (fitted == 0).sum() == 24 * 12
    assert (fitted == VOID).sum() == 24 * 12


def test_a_folder_without_voc(tmp_path):
    with pytest.raises(AutoNLError, match="no VOC 2012 with a segmentation set 'train'"):
        opened(tmp_path)


def test_the_real_set(tmp_path):
    unpack = shared_data("voc2012_seg.tar.gz").parent / "unpack.py"
    subprocess.run([sys.executable, unpack, "voc2012", tmp_path], check=True, stdout=subprocess.DEVNULL)
    train, validation = opened(tmp_path)
    assert (len(train.order) * 2, len(validation) * 2) == (1464, 1450)
    _, masks = next(train.epoch(0))
    assert set(masks.unique().tolist()) <= {*range(21), VOID}

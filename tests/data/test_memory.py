"""The in-memory path: crops, flips and colours that are checked pixel by pixel."""

import pytest
import torch
import torchvision.transforms.v2.functional as tv
from torchvision.transforms import InterpolationMode

from autonl.data.config import AugmentConfig
from autonl.data.digits import digits
from autonl.data.memory import (
    DRAWS,
    MemoryEvaluation,
    MemoryTraining,
    Normaliser,
    StoredImages,
    View,
    augmented,
    cropped,
    recoloured,
    uniform_draws,
)
from autonl.data.order import EvaluationOrder, Share, TrainingOrder

CPU = torch.device("cpu")
VIEW = View((16, 16), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def pictures(count=4, side=16):
    return torch.randint(0, 256, (count, 3, side, side), generator=torch.Generator().manual_seed(0)).float()


def column(value, count=4):
    return torch.full((count,), float(value))


def test_the_whole_image_stays_as_it_is():
    images = pictures()
    same = cropped(images, column(1), column(1), column(0), column(0), column(1), VIEW)
    torch.testing.assert_close(same, images, rtol=0, atol=1e-3)
    mirrored = cropped(images, column(1), column(1), column(0), column(0), column(-1), VIEW)
    torch.testing.assert_close(mirrored, images.flip(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_crop_is_torchvisions_crop(mode):
    """Height 8 from row 4, width 4 from column 10, of 16, enlarged."""
    images = pictures()
    view = View((16, 16), (0, 0, 0), (1, 1, 1), mode)
    ours = cropped(images, column(0.5), column(0.25), column(0.25), column(10 / 16), column(1), view)
    theirs = tv.resized_crop(images, 4, 10, 8, 4, [16, 16], InterpolationMode(mode), antialias=False).clamp(0, 255)
    # torchvision repeats the crop's own edge, we look at the pixels around it: the middle is the same
    torch.testing.assert_close(ours[..., 4:-4, 6:-6], theirs[..., 4:-4, 6:-6], rtol=0, atol=0.6)


def test_colours_are_torchvisions():
    images = pictures()
    factors = torch.tensor([[0.6, 1.3, 0.5], [1.4, 0.7, 1.5], [1.0, 1.0, 1.0], [0.8, 1.2, 0.0]])
    ours = recoloured(images, (factors - 1) / 2 + 0.5, (1.0, 1.0, 1.0))
    for image, found, (brightness, contrast, saturation) in zip(images, ours, factors.tolist(), strict=True):
        expected = tv.adjust_brightness(image / 255, brightness)
        expected = tv.adjust_saturation(tv.adjust_contrast(expected, contrast), saturation) * 255
        torch.testing.assert_close(found, expected, rtol=0, atol=0.2)


def test_crops_have_the_area_and_the_shape_that_was_asked_for():
    """An image whose pixels are their coordinates shows where its crop lies."""
    side, count = 64, 2000
    ramp = torch.linspace(0, 1, side)
    image = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side), torch.zeros(side, side)])
    draws = uniform_draws(count, 0, 0)
    augment = AugmentConfig(scale=(0.25, 0.5), ratio=(0.75, 4 / 3), flip=0.3)
    view = View((8, 8), (0, 0, 0), (1, 1, 1))
    crops = augmented(image.expand(count, -1, -1, -1), draws, augment, view)
    spread = crops[..., -1, -1] - crops[..., 0, 0]  # 7/8 of the crop, negative where it is mirrored
    width, height = spread[:, 0].abs() * 8 / 7, spread[:, 1] * 8 / 7
    area, ratio = width * height, width / height
    assert 0.24 < area.min() < 0.27
    assert 0.47 < area.max() < 0.52
    assert 0.73 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.36
    assert abs((spread[:, 0] < 0).float().mean() - 0.3) < 0.04
    assert crops.min() >= 0
    assert crops.max() <= 1


def test_an_image_is_augmented_the_same_in_any_batch_on_any_rank():
    stored = StoredImages(pictures(24).byte(), torch.arange(24))
    augment = AugmentConfig(scale=(0.3, 1.0), colour=(0.4, 0.4, 0.4))

    def epoch(number, batch_size, world, first=0):
        seen = {}
        for rank in range(world):
            order = TrainingOrder(24, batch_size, 5, Share(rank, world))
            for images, labels in MemoryTraining(stored, order, VIEW, augment, CPU).epoch(number, first):
                seen |= dict(zip(labels.tolist(), images, strict=True))
        return seen

    alone, divided = epoch(2, 8, 1), epoch(2, 12, 3)
    assert alone.keys() == divided.keys() == set(range(24))
    assert all(torch.equal(alone[label], divided[label]) for label in alone)
    assert len(epoch(2, 8, 1, first=2)) == 8
    other = epoch(3, 8, 1)
    assert not any(torch.equal(alone[label], other[label]) for label in alone)


def test_evaluation_of_a_view_that_is_not_square_cuts_and_does_not_squeeze():
    """As timm does with files: a square image is scaled to cover the view, here not at all."""
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    stored = StoredImages(images, torch.tensor([0, 1]))
    view = View((4, 8), (0.0,) * 3, (1 / 255,) * 3)
    ((seen, _),) = MemoryEvaluation(stored, EvaluationOrder(2, 2, Share()), view, CPU)
    torch.testing.assert_close(seen, images[:, :, 2:6].float(), atol=1e-3, rtol=0, check_stride=False)


def test_evaluation_shows_the_centre_of_every_image_once():
    stored = StoredImages(pictures(5).byte(), torch.arange(5))
    view = View((8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), crop_pct=0.5)
    batches = list(MemoryEvaluation(stored, EvaluationOrder(5, 2, Share()), view, CPU))
    assert [len(labels) for _, labels in batches] == [2, 2, 1]
    images = torch.cat([images for images, _ in batches])
    centre = stored.images[:, :, 4:12, 4:12].float() / 255
    expected = (centre - torch.tensor(view.mean).view(3, 1, 1)) / torch.tensor(view.std).view(3, 1, 1)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-4)
    assert images.is_contiguous(memory_format=torch.channels_last) or len(images) == 1


def test_normalisation():
    ones = torch.full((1, 3, 2, 2), 255.0)
    expected = torch.tensor([(1 - m) / s for m, s in zip(VIEW.mean, VIEW.std, strict=True)])
    torch.testing.assert_close(Normaliser(VIEW, CPU)(ones)[0, :, 0, 0], expected)


def test_the_table_of_draws():
    assert uniform_draws(10, 0, 0).shape == (10, DRAWS)
    assert torch.equal(uniform_draws(10, 0, 0), uniform_draws(10, 0, 0))
    assert not torch.equal(uniform_draws(10, 0, 0), uniform_draws(10, 0, 1))


def test_the_embedded_set():
    train, validation = digits()
    assert (train.images.shape, validation.images.shape) == ((4000, 3, 32, 32), (1000, 3, 32, 32))
    assert train.labels.bincount().tolist() == [400] * 10
    assert validation.labels.bincount().tolist() == [100] * 10
    assert (train.images.dtype, train.images.float().mean().round().item()) == (torch.uint8, 26.0)

"""Masks stay with their images through every change, by workers and from memory; what is filled in is void."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from autonl.data.config import AugmentConfig, DataConfig
from autonl.data.loaders import Loaders
from autonl.data.masks import (
    MemoryMaskTraining,
    StoredPairs,
    evaluation_batches,
    random_grid,
    sampled,
    training_batches,
)
from autonl.data.memory import View
from autonl.data.order import Share, TrainingOrder
from autonl.data.pairs import VOID, Pairs
from autonl.errors import AutoNLError

CPU = torch.device("cpu")
VIEW = View((24, 24), (0.4, 0.5, 0.6), (1, 1, 1))
FILL = [102, 128, 153]


@pytest.fixture
def pairs(tmp_path):
    """Images whose red value is their mask: 20 rows of 30, the left half class 5, the right half class 9."""
    classes = np.full((20, 30), 5, dtype=np.uint8)
    classes[:, 15:] = 9
    for name in map(str, range(5)):
        pixels = np.repeat(classes[..., None] * 20, 3, axis=2)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        Image.fromarray(classes).save(tmp_path / f"{name}_mask.png")
    images = tuple(tmp_path / f"{name}.png" for name in range(5))
    return Pairs(images, tuple(path.with_name(f"{path.stem}_mask.png") for path in images), 10)


def loaders(memory, workers=0, view=VIEW, **settings):
    config = DataConfig(batch_size=2, evaluation_batch_size=2, workers=workers, in_memory=memory, **settings)
    return Loaders(config, AugmentConfig(), view, 10, CPU, seed=4)


def training(pairs, *arguments, **settings):
    return training_batches(pairs, loaders(*arguments, **settings), (0.5, 2.0))


@pytest.mark.parametrize("settings", [{"memory": False}, {"memory": True}, {"memory": True, "stored_size": 40}])
def test_masks_stay_with_their_images(pairs, settings):
    train, validation = training(pairs, **settings), evaluation_batches(pairs, loaders(**settings))
    assert (len(train), [len(masks) for _, masks in validation]) == (2, [2, 2, 1])
    seen = set()
    for images, masks in [*train.epoch(0), *train.epoch(1), *validation]:
        assert images.shape[-2:] == masks.shape[-2:] == (24, 24)
        assert masks.dtype == torch.uint8
        seen |= set(masks.unique().tolist())
        red = ((images[:, 0] + 0.4) * 255).round()
        for label, value in ((5, 100), (9, 180), (VOID, FILL[0])):  # but for the pixels that a resize mixes
            assert not (masks == label).any() or (red[masks == label] - value).abs().median() <= 1
    assert seen == {5, 9, VOID}


def test_an_evaluation_sees_the_whole_image(pairs):
    """30 wide in 24: reduced to 24 x 16, the rest void; from memory the same to the last bit."""
    (images, masks), *_ = evaluation_batches(pairs, loaders(False))
    assert (masks[:, :16, :12] == 5).all()
    assert (masks[:, :16, 12:] == 9).all()
    assert (masks[:, 16:] == VOID).all()
    assert images[:, :, 16:].abs().max() < 0.5 / 255 + 1e-6  # the mean: nothing to the network
    (same, same_masks), *_ = evaluation_batches(pairs, loaders(True))
    torch.testing.assert_close(images, same, rtol=0, atol=1e-6)
    assert torch.equal(masks, same_masks)


@pytest.mark.parametrize("memory", [False, True])
def test_an_epoch_is_a_function_of_its_number(pairs, memory):
    def epoch(number, workers=0, first=0):
        return list(training(pairs, memory, workers).epoch(number, first))

    for batch, same in zip(epoch(1), epoch(1, workers=2), strict=True):
        assert all(map(torch.equal, batch, same))
    assert all(map(torch.equal, epoch(1)[1], epoch(1, first=1)[0]))
    assert not any(torch.equal(one, other) for (one, _), (other, _) in zip(epoch(1), epoch(2), strict=True))


@pytest.mark.parametrize("memory", [False, True])
def test_an_image_smaller_than_the_view_is_not_enlarged(pairs, memory):
    """20 x 30 in 40 x 40, at scale 1: all its pixels, somewhere in the view."""
    batches = training_batches(pairs, loaders(memory, view=replace(VIEW, size=(40, 40))), (1.0, 1.0))
    corners = set()
    for _, masks in batches.epoch(0):
        for mask in masks:
            rows, columns = (mask != VOID).nonzero().unbind(1)
            assert len(rows) == 20 * 30
            corners.add((int(rows.min()), int(columns.min())))
            assert (rows.max() - rows.min(), columns.max() - columns.min()) == (19, 29)
    assert len(corners) > 1


def test_an_image_is_augmented_the_same_in_any_batch_on_any_rank():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 3, 24, 24), generator=generator, dtype=torch.uint8)
    masks = torch.arange(12, dtype=torch.uint8).view(12, 1, 1).expand(12, 24, 24)  # which image it is
    stored = StoredPairs(images, masks, torch.full((12, 2), 24.0))

    def epoch(batch_size, world):
        seen = {}
        for rank in range(world):
            order = TrainingOrder(12, batch_size, 5, Share(rank, world))
            batches = MemoryMaskTraining(stored, order, VIEW, (0.5, 2.0), AugmentConfig(colour=(0.4, 0.4, 0.4)))
            for batch, labels in batches.epoch(3):
                seen |= {int(label.min()): image for image, label in zip(batch, labels, strict=True)}
        return seen

    alone, divided = epoch(4, 1), epoch(6, 3)
    assert alone.keys() == divided.keys() == set(range(12))
    assert all(torch.equal(alone[number], divided[number]) for number in alone)


def view_of_one(extent, draws, size=(24, 24), scale=(0.5, 2.0), flip=0.5):
    """(pixels (H, W), mask (H, W), and the stored ones) of one stored 24 x 24 image; draws: scale, top, left, flip."""
    height, width = extent
    mask = torch.full((1, 24, 24), VOID, dtype=torch.uint8)
    mask[0, :height, :width] = torch.arange(height * width).view(height, width) % 200
    image = torch.tensor(FILL, dtype=torch.uint8).view(1, 3, 1, 1).repeat(1, 1, 24, 24)
    image[0, :, :height, :width] = mask[0, :height, :width]
    stored = StoredPairs(image, mask, torch.tensor([extent]).float())
    grid = random_grid(stored, torch.tensor([0]), torch.tensor([draws]), size, scale, flip)
    pixels, masks = sampled(stored.images, stored.masks, grid, torch.tensor(FILL).view(3, 1, 1).float())
    return pixels[0, 0], masks[0], image[0, 0], mask[0]


def test_at_its_own_size_an_image_stays_as_it_is():
    pixels, mask, image, stored = view_of_one((24, 24), [1 / 3, 0.0, 0.0, 1.0])  # scale 1
    assert torch.equal(mask, stored)
    torch.testing.assert_close(pixels, image.float(), rtol=0, atol=1e-2)
    pixels, mask, image, stored = view_of_one((24, 24), [1 / 3, 0.0, 0.0, 0.2])  # mirrored
    assert torch.equal(mask, stored.flip(-1))
    torch.testing.assert_close(pixels, image.flip(-1).float(), rtol=0, atol=1e-2)


@pytest.mark.parametrize(("draws", "top", "left"), [((0.0, 0.0), 0, 0), ((1.0, 1.0), 12, 12), ((0.5, 1.0), 6, 12)])
def test_at_twice_its_size_a_quarter_of_it_fills_the_view(draws, top, left):
    _, mask, _, stored = view_of_one((24, 24), [1.0, *draws, 1.0])
    quarter = stored[top : top + 12, left : left + 12]
    assert torch.equal(mask, quarter.repeat_interleave(2, 0).repeat_interleave(2, 1))


@pytest.mark.parametrize(("draws", "top", "left"), [((0.0, 0.0), 0, 0), ((1.0, 1.0), 12, 16), ((1.0, 0.0), 12, 0)])
def test_at_half_its_size_it_lies_in_the_view(draws, top, left):
    """24 rows of 16: 12 of 8 remain. Two pixels' mean where one was, fill and void around."""
    pixels, mask, image, _ = view_of_one((24, 16), [0.0, *draws, 1.0])
    inside = torch.zeros(24, 24, dtype=torch.bool)
    inside[top : top + 12, left : left + 8] = True
    assert torch.equal(mask != VOID, inside)
    assert (pixels[~inside] == FILL[0]).all()
    means = image[:, :16].float().view(12, 2, 8, 2).mean((1, 3))
    torch.testing.assert_close(pixels[inside].view(12, 8), means, rtol=0, atol=1e-2)


def test_a_stored_image_larger_than_the_view_is_scaled_to_what_an_evaluation_sees():
    _, mask, _, stored = view_of_one((24, 24), [1.0, 0.0, 0.0, 1.0], size=(12, 12))  # 24 -> 12 -> 24: the first quarter
    assert torch.equal(mask, stored[:12, :12])


def test_scales_and_places_are_spread_as_asked_for():
    """A mask of one class: its share of the view tells the scale, its middle the place."""
    count = 4000
    stored = StoredPairs(
        torch.zeros(1, 3, 24, 24, dtype=torch.uint8), torch.zeros(1, 24, 24, dtype=torch.uint8), torch.full((1, 2), 24)
    )
    draws = torch.rand(count, 4, generator=torch.Generator().manual_seed(0))
    grid = random_grid(stored, torch.zeros(count, dtype=torch.long), draws, (24, 24), (0.25, 0.75), 0.5)
    inside = ((grid > -1) & (grid < 1)).all(-1)  # (count, 24, 24)
    scale = inside.float().mean((1, 2)).sqrt()
    assert 0.23 < scale.min() < 0.27
    assert 0.73 < scale.max() < 0.77
    assert abs(scale.mean() - 0.5) < 0.02
    # the middle: always from half the size on, below it with probability (s / (1 - s))^2; together 0.711
    assert abs(inside.float().mean(0)[12, 12] - 0.711) < 0.03
    assert inside.float().mean(0)[0, 0] < 0.1
    assert abs((grid[:, 0, 0, 0] > grid[:, 0, -1, 0]).float().mean() - 0.5) < 0.03


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory", [False, True])
def test_a_bad_mask_ends_the_reading_in_one_line(pairs, memory, workers):
    classes = np.full((20, 30), 5, dtype=np.uint8)
    classes[3, 2] = 77
    Image.fromarray(classes).save(pairs.masks[1])
    with pytest.raises(AutoNLError, match=r"1_mask.png: the mask has the class 77 at x 2, y 3") as caught:
        list(evaluation_batches(pairs, loaders(memory, workers)))
    assert "Traceback" not in str(caught.value)
    del caught
    gc.collect()  # the workers end with the loader that the error refers to, before the interpreter does

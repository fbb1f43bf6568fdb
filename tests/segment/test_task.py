"""mIoU by hand: one confusion matrix over all pixels, void left out, absent classes not counted."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from autonl.data.pairs import VOID
from autonl.errors import AutoNLError
from autonl.segment.network import Segmenter, create_backbone
from autonl.segment.task import MeanIoU, Segmentation
from tests.segment.small import segment_config
from tests.train.small import NETWORK


def confusion(truth, predicted, classes):
    """(classes, classes): how many pixels of class i were taken for class j."""
    counts = np.zeros((classes, classes), dtype=np.int64)
    for true, guess in zip(truth.ravel(), predicted.ravel(), strict=True):
        if true != VOID:
            counts[true, guess] += 1
    return counts


def mean_iou(counts):
    """In percent, over the classes that are in the masks or predicted."""
    values = []
    for label in range(len(counts)):
        union = counts[label].sum() + counts[:, label].sum() - counts[label, label]
        if union:
            values.append(counts[label, label] / union)
    return 100 * sum(values) / len(values)


def scores(predicted, classes):
    """Logits (N, classes, ...) whose largest is the prediction (N, ...)."""
    return F.one_hot(predicted.long(), classes).movedim(-1, 1).float()


def test_a_case_by_hand():
    """Five pixels count. Class 0: 1 of 3. Class 1: 2 of 4. Class 2 is predicted on void only, class 3 nowhere."""
    truth = torch.tensor([[[0, 0, 1], [1, VOID, 1]]])
    predicted = torch.tensor([[[0, 1, 1], [1, 2, 0]]])
    metric = MeanIoU(4)
    metric.update(scores(predicted, 4), truth)
    values = metric.compute()
    assert values["miou"].item() == pytest.approx(100 * (1 / 3 + 2 / 4) / 2)
    assert values["pixel_accuracy"].item() == pytest.approx(100 * 3 / 5)
    assert metric.by_class[:2] == pytest.approx([100 / 3, 50])
    assert np.isnan(metric.by_class[2:]).all()


def test_masks_of_nothing_but_void_cannot_judge():
    metric = MeanIoU(3)
    metric.update(scores(torch.tensor([[0, 2]]), 3), torch.tensor([[VOID, VOID]]))
    with pytest.raises(AutoNLError, match="no pixel of the validation masks counts: all are void, 255"):
        metric.compute()


def test_a_class_that_is_only_predicted_counts_as_missed():
    metric = MeanIoU(3)
    metric.update(scores(torch.tensor([[0, 2]]), 3), torch.tensor([[0, 0]]))
    assert metric.compute()["miou"].item() == pytest.approx(100 * (1 / 2 + 0) / 2)


def test_no_pixel_is_lost_in_large_counts():
    metric = MeanIoU(2)
    metric.confmat = torch.tensor([[2**24 + 1, 0], [0, 1]])  # a number that single precision does not have
    metric._update_count = 1
    assert metric.compute()["pixel_accuracy"].item() == 100
    metric.confmat = torch.tensor([[2**25 + 1, 1], [0, 1]])
    metric._computed = None
    assert metric.compute()["miou"].item() == pytest.approx(50 * ((2**25 + 1) / (2**25 + 2) + 1 / 2), abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 4))
def test_any_masks_in_any_batches(seed, classes, batches):
    rng = np.random.default_rng(seed)
    truth = rng.choice([*range(classes), VOID], (batches, 2, 3, 4), p=None)
    predicted = rng.integers(0, classes, truth.shape)
    truth[0, 0, 0, 0] = 0  # at least one pixel counts
    metric = MeanIoU(classes)
    for labels, guesses in zip(truth, predicted, strict=True):
        metric.update(scores(torch.tensor(guesses), classes), torch.tensor(labels))
    counts = confusion(truth, predicted, classes)
    assert metric.compute()["miou"].item() == pytest.approx(mean_iou(counts))
    assert torch.equal(metric.confmat, torch.tensor(counts))


class Fixed(torch.nn.Module):
    """The same logits for any images."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, images):
        return self.logits


def test_the_loss_is_the_mean_over_the_pixels_that_count():
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = torch.full((2, 4, 4), VOID, dtype=torch.uint8)
    masks[0, 1, 2], masks[1, 0, 0] = 2, 0
    task = Segmentation(3, segment_config("unused"))
    loss = task.step(Fixed(logits), (None, masks), 0)["loss"]
    expected = -(logits[0, :, 1, 2].log_softmax(0)[2] + logits[1, :, 0, 0].log_softmax(0)[0]) / 2
    torch.testing.assert_close(loss, expected)


def test_nothing_but_void_is_no_loss_and_no_gradient():
    module = Fixed(torch.randn(1, 3, 2, 2))
    task = Segmentation(3, segment_config("unused"))
    loss = task.step(module, (None, torch.full((1, 2, 2), VOID, dtype=torch.uint8)), 0)["loss"]
    loss.backward()
    assert loss.item() == 0
    assert module.logits.grad.abs().max() == 0


def test_rates_follow_the_polynomial_and_the_head_has_ten_times_as_much():
    module = Segmenter(create_backbone(NETWORK, 16, {}), 3)
    config = segment_config("unused", optim={"lr": 0.02, "weight_decay": 1e-4}, schedule={"epochs": 5})
    ((optimizer, schedule),) = Segmentation(3, config).tunings(module, steps_per_epoch=8)
    assert not optimizer.defaults["nesterov"]
    head = {id(parameter) for parameter in module.head.parameters()}
    for step in (0, 10, 39):
        schedule.step_update(step)
        for group in optimizer.param_groups:
            (in_head,) = {id(parameter) in head for parameter in group["params"]}
            expected = 0.02 * (1 - step / 40) ** 0.9 * (10 if in_head else 1)
            assert group["lr"] == pytest.approx(expected)
            assert group["weight_decay"] == (0 if group["params"][0].ndim == 1 else 1e-4)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in module.parameters())

"""Who comes when: every image once, the same for any division among processes."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autonl.data.order import (
    EvaluationOrder,
    Share,
    TrainingOrder,
    derive_seed,
    permutation,
    seed_sample,
    split_by_class,
)
from autonl.errors import AutoNLError


def steps(count, batch_size, world, accumulate, epoch=3, first=0):
    """The set of images of every optimiser step, over all ranks and rounds."""
    ranks = []
    for rank in range(world):
        order = TrainingOrder(count, batch_size, 7, Share(rank, world), accumulate)
        order.begin(epoch, first * accumulate)
        ranks.append([[place for _, place in batch] for batch in order])
    rounds = [list(chain(*batches)) for batches in zip(*ranks, strict=True)]
    return [sorted(chain(*rounds[i : i + accumulate])) for i in range(0, len(rounds), accumulate)]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 30))
def test_a_step_has_the_same_images_however_it_is_divided(world, accumulate, share, extra):
    batch_size = world * accumulate * share
    count = 3 * batch_size + extra
    expected = permutation(count, 7, 3).split(batch_size)
    found = steps(count, batch_size, world, accumulate)
    assert found == [sorted(batch.tolist()) for batch in expected[: count // batch_size]]
    assert steps(count, batch_size, world, accumulate, first=1) == found[1:]


def test_epochs_and_seeds_differ():
    orders = [permutation(100, seed, epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert all(sorted(order) == list(range(100)) for order in orders)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))
def test_an_evaluation_takes_every_image_once(count, batch_size, world):
    orders = [EvaluationOrder(count, batch_size, Share(rank, world)) for rank in range(world)]
    seen = [place for order in orders for batch in order for _, place in batch]
    assert sorted(seen) == list(range(count))
    assert all(len(order) == len(list(order)) for order in orders)


def test_a_batch_that_cannot_be_divided_or_filled():
    with pytest.raises(AutoNLError, match=r"data.batch_size: 10 cannot be divided over 2 device.*accumulate 3"):
        TrainingOrder(100, 10, 0, Share(0, 2), 3)
    with pytest.raises(AutoNLError, match=r"9 training images do not fill one batch: data.batch_size is 10"):
        TrainingOrder(9, 10, 0, Share())


def test_randomness_is_a_function_of_seed_epoch_and_image():
    def draw(*place):
        seed_sample(*place)
        return torch.rand(()).item(), np.random.rand(), random.random()

    places = [(seed, epoch, index) for seed in range(2) for epoch in range(2) for index in range(2)]
    draws = [draw(*place) for place in places]
    assert [draw(*place) for place in reversed(places)] == draws[::-1]
    assert len(set(draws)) == len(places)


def test_seeds_of_different_purposes_have_nothing_in_common():
    seeds = {derive_seed(*key) for key in [("a", 1), ("a", 1, 0), ("a", 0, 1), ("b", 1), ("a", 11), ("a", 1, 1)]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_split_holds_out_a_share_of_every_class():
    labels = np.repeat([0, 1, 2], [100, 50, 3])
    kept, held_out = split_by_class(labels, 0.1)
    assert sorted([*kept, *held_out]) == list(range(153))
    assert np.bincount(labels[held_out]).tolist() == [10, 5, 1]
    again = split_by_class(labels, 0.1)
    assert np.array_equal(again[1], held_out)

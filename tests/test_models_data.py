"""Digits, their split and batches, and a job that learns from them."""

import itertools
import math

import jax
import numpy as np
import pytest

from vmem_jax.models import batches, digits, digits_split, job


def test_digits_split_is_disjoint_and_complete():
    train, test = digits_split()
    assert (len(train), len(test)) == (1437, 360)
    assert sorted([*train, *test]) == list(range(1797))
    data = digits(8, channels=1)
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    np.testing.assert_array_equal(data.train_images, digits(8, channels=1).train_images)


def test_digits_are_enlarged_and_normalised():
    small, large = digits(8, channels=1), digits(24)
    assert large.train_images.shape == (1437, 24, 24, 3)
    assert large.test_images.shape == (360, 24, 24, 3)
    assert large.train_images.dtype == np.float32 and large.train_labels.dtype == np.int32
    assert abs(large.train_images.mean()) < 1e-3 and abs(large.train_images.std() - 1) < 1e-3
    repeated = np.kron(small.test_images[5, :, :, 0], np.ones((3, 3), np.float32))
    for channel in range(3):
        np.testing.assert_array_equal(large.test_images[5, :, :, channel], repeated)
    assert digits(30, channels=2).test_images.shape == (360, 30, 30, 2)
    with pytest.raises(ValueError, match="image >= 8"):
        digits(7)


def test_batches_visit_each_example_once_an_epoch():
    x, y = np.arange(10)[:, None], np.arange(10)
    seen = list(batches(x, y, 3, seed=1, epochs=2))
    assert len(seen) == 6
    for images, labels in seen:
        np.testing.assert_array_equal(images[:, 0], labels)
    epochs = [np.concatenate([labels for _, labels in seen[at : at + 3]]) for at in (0, 3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    again = batches(x, y, 3, seed=1)
    np.testing.assert_array_equal(next(again)[1], seen[0][1])
    assert len(list(itertools.islice(again, 20))) == 20
    with pytest.raises(ValueError, match="between 1 and 10"):
        batches(x, y, 11)
    with pytest.raises(ValueError, match="labels"):
        batches(x, y[:5], 3)


def test_training_on_digits_lowers_the_loss():
    options = {"optimizer": "momentum", "learning_rate": 0.1}
    small = job("resnet11", batch=64, image=8, classes=10, **options)
    data = digits(8)
    step = jax.jit(small.step, donate_argnums=0)
    state = jax.jit(small.init)(jax.random.key(0, impl="rbg"))  # compiles fast
    losses = []
    for batch in itertools.islice(batches(data.train_images, data.train_labels, 64), 40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert int(state.count) == 40
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    metrics = jax.jit(small.evaluate)(state, (data.test_images[:64], data.test_labels[:64]))
    assert math.isfinite(metrics["loss"]) and 0 <= float(metrics["accuracy"]) <= 1

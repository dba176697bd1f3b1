"""Real images that need no download: scikit-learn's handwritten digits, at any size.

The 1,797 digits of 8x8 pixels come with the scikit-learn package (Alpaydin and Kaynak, "Optical
recognition of handwritten digits", UCI Machine Learning Repository, 1998; the test part).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

CLASSES = 10
"""Number of classes of `digits`."""

TRAIN_IMAGES = 1437
"""Images of `digits` to train on; the other 360 of the 1,797 are to test on."""

_SIDE = 8
_SPLIT_SEED = 0


class Digits(NamedTuple):
    """The digits, split. Images f32[n, image, image, channels], labels i32[n] in 0..9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits_split(count: int = 1797) -> tuple[np.ndarray, np.ndarray]:
    """Returns (train, test): disjoint indices into the data set, the same in every run."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    return order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]


def digits(image: int, channels: int = 3) -> Digits:
    """Returns the handwritten digits, enlarged and normalised.

    Every source pixel is repeated `image` / 8 times along each side (nearest neighbour where 8 does
    not divide `image`). Values are shifted and scaled to mean 0 and standard deviation 1 over the
    8x8 training images. All channels are equal, and share memory: the arrays are read-only.

    Args:
      image: height and width of the result, in pixels; 8 or more.
      channels: channels of the result.

    Raises:
      ValueError: when `image` is below 8 or `channels` below 1.
    """
    if image < _SIDE or channels < 1:
        raise ValueError(
            f"Digits need image >= {_SIDE} and channels >= 1, not {image} and {channels}."
        )
    from sklearn.datasets import load_digits  # loads slowly, and only training needs it

    source = load_digits()
    pixels = np.asarray(source.images, np.float32)
    labels = np.asarray(source.target, np.int32)
    train, test = digits_split(len(labels))
    pixels = (pixels - pixels[train].mean()) / pixels[train].std()
    nearest = np.arange(image) * _SIDE // image

    def enlarge(chosen: np.ndarray) -> np.ndarray:
        grey = pixels[chosen][:, nearest][:, :, nearest, np.newaxis]
        return np.broadcast_to(grey, (*grey.shape[:3], channels))

    return Digits(enlarge(train), labels[train], enlarge(test), labels[test])


def batches(
    x: np.ndarray, y: np.ndarray, batch: int, seed: int = 0, epochs: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns an iterator over shuffled batches; what does not fill a batch is dropped.

    Args:
      x: images [n, ...].
      y: labels [n].
      batch: examples in a batch.
      seed: of the order, which differs from epoch to epoch and is the same from run to run.
      epochs: passes over the data; None goes on for ever.

    Returns:
      An iterator of (images [batch, ...], labels [batch]), copies of `x`'s and `y`'s types.

    Raises:
      ValueError: when `x` and `y` differ in length, or a batch does not fit into them.
    """
    count = len(x)
    if len(y) != count:
        raise ValueError(f"{count} images but {len(y)} labels.")
    if not 1 <= batch <= count:
        raise ValueError(f"A batch has between 1 and {count} examples here, not {batch}.")

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        epoch = 0
        while epochs is None or epoch < epochs:
            order = np.random.default_rng((seed, epoch)).permutation(count)
            for start in range(0, count - batch + 1, batch):
                chosen = order[start : start + batch]
                yield x[chosen], y[chosen]
            epoch += 1

    return generate()

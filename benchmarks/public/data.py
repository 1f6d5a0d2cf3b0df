"""Data in place of those that the programs download."""

import pydoc_data.topics

import numpy as np
from sklearn.datasets import load_digits


def digits(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's 1,797 digits, enlarged, and their labels.

    Args:
      side: The height and width of the images.

    Returns:
      Images, f32[1797, side, side] from 0 to 1, and labels, i32[1797].
    """
    images, labels = load_digits(return_X_y=True)
    times = -(-side // 8)
    large = images.reshape(-1, 8, 8).repeat(times, 1).repeat(times, 2) / 16
    start = (8 * times - side) // 2
    large = large[:, start : start + side, start : start + side]
    return large.astype(np.float32), np.asarray(labels, np.int32)


def text() -> str:
    """Returns an English text in ASCII: the help pages of Python."""
    pages = "\n".join(pydoc_data.topics.topics.values())
    return pages.encode("ascii", "ignore").decode()


class Batches(list):
    """Batches, as the datasets of TensorFlow and PyTorch give them."""

    def as_numpy_iterator(self):
        """Iterates over the batches."""
        return iter(self)


def batches(size: int, *arrays: np.ndarray) -> Batches:
    """Cuts arrays into whole batches of a size."""
    starts = range(0, len(arrays[0]) - size + 1, size)
    return Batches(tuple(x[i : i + size] for x in arrays) for i in starts)


class Tensor(np.ndarray):
    """An array with the methods of a tensor of PyTorch."""

    def numpy(self) -> np.ndarray:
        """Returns the array."""
        return np.asarray(self)

    def permute(self, *axes: int) -> np.ndarray:
        """Returns the array with its axes in another order."""
        return self.transpose(axes)


def tensors(size: int, *arrays: np.ndarray) -> Batches:
    """Cuts arrays into batches of tensors."""
    return Batches(tuple(x.view(Tensor) for x in xs) for xs in batches(size, *arrays))

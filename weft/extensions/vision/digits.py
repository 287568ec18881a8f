"""Two small classifiers of small images, such as handwritten digits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class DigitsMLP(nn.Module):
    """One hidden layer: 784-256-10 for MNIST."""

    def __init__(self, pixels: int = 784, hidden: int = 256, classes: int = 10):
        super().__init__()
        self.up, self.down = nn.Linear(pixels, hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.down(F.relu(self.up(images.flatten(1))))


class DigitsCNN(nn.Module):
    """Two convolutions that each halve the size, with batch norm, and two linear layers."""

    def __init__(self, size: int = 28, channels: int = 1, width: int = 32, hidden: int = 128, classes: int = 10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 5, 2, 2, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.up = nn.Linear(2 * width * (-(-size // 4)) ** 2, hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.down(F.relu(self.up(x.flatten(1))))

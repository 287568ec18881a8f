"""ResNet (He et al., 2015), with the names of torchvision's weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.extensions.vision.resnet_depths import DEPTHS
from weft.job.errors import JobError


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions, or a bottleneck of 1 × 1, 3 × 3 and 1 × 1, added to the input."""

    def __init__(self, inside: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        out = width * 4 if bottleneck else width
        first = (1, 1, 0) if bottleneck else (3, stride, 1)  # kernel, stride, padding
        second = (3, stride, 1) if bottleneck else (3, 1, 1)
        self.conv1, self.bn1 = nn.Conv2d(inside, width, *first, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, *second, bias=False), nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False) if bottleneck else None
        self.bn3 = nn.BatchNorm2d(out) if bottleneck else None
        same = stride == 1 and inside == out
        self.downsample = (
            None if same else nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.conv3 is not None and self.bn3 is not None:
            y = self.bn3(self.conv3(F.relu(y)))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Images [batch, channels, height, width] to logits. `width` is that of the first stage; `stem: small` keeps the
    size of small images, with a 3 × 3 convolution and no pooling."""

    units = "layer*.*"
    compiled = ("stem",)
    """Methods that are compiled besides the units."""
    compiled_whole = ("features",)
    """Methods that are compiled instead, where nothing happens between units: a block's gradient is then added and
    passed through its ReLU in the kernels of the block before."""
    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(
        self, layers: int = 50, classes: int = 1000, channels: int = 3, width: int = 64, stem: str = "imagenet"
    ):
        super().__init__()
        if stem not in ("imagenet", "small"):
            raise JobError(f"model.args.stem={stem!r} is not known; imagenet or small would work")
        blocks, bottleneck = DEPTHS[layers]
        large = stem == "imagenet"
        self.conv1 = nn.Conv2d(channels, width, *((7, 2, 3) if large else (3, 1, 1)), bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = large
        inside, outside = width, 4 if bottleneck else 1
        for stage, count in enumerate(blocks):
            made = []
            for i in range(count):
                stride = 2 if stage and not i else 1
                made.append(ResidualBlock(inside, width * 2**stage, stride, bottleneck))
                inside = width * 2**stage * outside
            setattr(self, f"layer{stage + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(
            self.features(images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images)
        )

    def features(self, images: Tensor) -> Tensor:
        """One vector a sample."""
        x = self.stem(images)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return x.mean((2, 3))

    def stem(self, images: Tensor) -> Tensor:
        """The first convolution, to the size of the first stage."""
        x = F.relu(self.bn1(self.conv1(images)))
        return F.max_pool2d(x, 3, 2, 1) if self.pool else x

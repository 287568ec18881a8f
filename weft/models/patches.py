"""Images as rows of patches, and the embedding of patches with a class token (ViT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model


class ImagePatches:
    """Cuts images into patches, with a row of zeros first where a class token goes."""

    def __init__(self, m: Model):
        self.patch, self.channels, self.image, self.class_token = m.patch or 4, m.channels or 3, m.image, m.class_token

    def __call__(self, images: Tensor) -> Tensor:
        """[batch, colours, height, width] → [batch, patches, values]."""
        if images.shape[1] != self.channels or (self.image and tuple(images.shape[2:]) != self.image):
            sides = f"{self.image[0]}, {self.image[1]}" if self.image else "height, width"
            raise ValueError(
                f"images of shape {list(images.shape)} were given; the model takes [batch, {self.channels}, {sides}]"
            )
        rows = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        return F.pad(rows, (0, 0, 1, 0)) if self.class_token else rows


class PatchEmbedding(nn.Linear):
    """The embedding of patches, and of a learned token in the first row, whose values are zeros."""

    initial = 0.0

    def __init__(self, values: int, dim: int):
        super().__init__(values, dim)
        self.token = nn.Parameter(torch.empty(dim))

    def forward(self, input: Tensor, rows: Tensor | None = None) -> Tensor:
        # input [batch, seq, values], rows [seq]: the index of each row in its image
        rows = torch.arange(input.shape[1], device=input.device) if rows is None else rows
        return F.linear(input, self.weight) + torch.where((rows == 0).unsqueeze(-1), self.token, self.bias)

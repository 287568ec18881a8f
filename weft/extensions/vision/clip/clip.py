"""An image and a text encoder whose vectors are compared (CLIP, Radford et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo
from weft.models.norms import Fp32LayerNorm
from weft.models.transformer import Block

TEMPERATURE = 0.07
"""Initial temperature of the similarities."""
MAX_FACTOR = 100.0
"""Largest factor on the similarities."""
Shape = Mapping[str, int]
"""dim, layers, heads and ffn of an encoder."""


class Tower(nn.Module):
    """Blocks of attention and feed-forward, a norm, and a projection of one token's vector."""

    units = "blocks.*"
    parts: ClassVar[dict[str, str]] = {
        "tokens": "vocab",
        "blocks.*.attn": "region",
        "blocks.*.attn.[qkv]": "column",
        "blocks.*.attn.o": "row",
        "blocks.*.mlp": "region",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
    }

    def __init__(self, shape: Shape, length: int, out: int, causal: bool, activation: str, eps: float):
        super().__init__()
        dim, layers, heads = shape["dim"], shape["layers"], shape["heads"]
        m = Model.model_validate(dict(
            family="vit", dim=dim, layers=layers, heads=heads, kv_heads=heads, head_dim=dim // heads, ffn=shape["ffn"],
            norm="layernorm", norm_eps=eps, activation=activation, bias=True, causal=causal, dropout=0.0,
        ))  # fmt: skip
        self.dim, self.length = dim, length
        self.positions = nn.Parameter(torch.empty(length, dim))
        self.blocks = nn.ModuleList(Block(m, i) for i in range(layers))
        for block in self.blocks:
            block.attn_norm, block.mlp_norm = (Fp32LayerNorm(dim, eps=eps) for _ in range(2))
        self.norm = Fp32LayerNorm(dim, eps=eps)
        self.project = nn.Linear(dim, out, bias=False)

    def run(self, x: Tensor) -> Tensor:
        """The output of the last block, for embedded tokens [batch, length, dim]."""
        info = TokenInfo(None, None, None, torch.arange(x.shape[1], device=x.device), x.shape[1])
        for block in self.blocks:
            x = block(x, info)
        return x

    def initialise(self) -> None:
        """Random initial values, with the standard deviations of CLIP's."""
        wide, deep = self.dim**-0.5, (2 * len(self.blocks)) ** -0.5
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() > 1:
                kind = name.removesuffix(".weight").rpartition(".")[2]
                std = {"o": wide * deep, "down": wide * deep, "up": wide * 2**-0.5, "tokens": 0.02}
                std["embed"] = param.shape[1] ** -0.5
                nn.init.normal_(param, std=std.get(kind, wide))


class ImageTower(Tower):
    """A ViT with a class token: images [batch, channels, side, side] to vectors [batch, out]."""

    parts: ClassVar[dict[str, str]] = {n: role for n, role in Tower.parts.items() if n != "tokens"}

    def __init__(
        self, shape: Shape, side: int, patch: int, channels: int, out: int, activation: str, eps: float
    ):  # fmt: skip
        super().__init__(shape, (side // patch) ** 2 + 1, out, False, activation, eps)
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, self.dim, bias=False)
        self.class_token = nn.Parameter(torch.empty(1, self.dim))
        self.embed_norm = Fp32LayerNorm(self.dim, eps=eps)
        self.initialise()

    def forward(self, image: Tensor) -> Tensor:
        image = self._whole_patches(image)
        rows = image.unflatten(2, (-1, self.patch)).unflatten(4, (-1, self.patch))
        x = self.embed(rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))  # [batch, patches, dim]
        x = torch.cat([self.class_token.expand(x.shape[0], 1, -1).to(x.dtype), x], dim=1) + self.positions
        return self.project(self.norm(self.run(self.embed_norm(x))[:, 0]))

    def _whole_patches(self, image: Tensor) -> Tensor:
        """The image without what is left after the last whole patch."""
        return image[..., : image.shape[2] // self.patch * self.patch, : image.shape[3] // self.patch * self.patch]


class TextTower(Tower):
    """A causal transformer: tokens [batch, context] to the vectors [batch, out] of their first end token. Which token
    that is, `end` says (model.towers.text.end); without it a text ends with one or more of them, so the last is one."""

    def __init__(
        self, shape: Shape, vocab: int, context: int, out: int, activation: str, eps: float,
        end: int | str | None = None,
    ):  # fmt: skip
        super().__init__(shape, context, out, True, activation, eps)
        self.end = end
        self.tokens = nn.Embedding(vocab, self.dim)
        self.initialise()

    def forward(self, text: Tensor) -> Tensor:
        x = self.run(self.tokens(text) + self.positions[: text.shape[1]])
        at = self._ends(text).int().argmax(1).view(-1, 1, 1).expand(-1, 1, self.dim)
        return self.project(self.norm(x.gather(1, at).squeeze(1)))

    def _ends(self, text: Tensor) -> Tensor:
        """Which tokens are end tokens."""
        if self.end is None:
            return text == text[:, -1:]
        return text == (text.amax(1, keepdim=True) if self.end == "largest" else torch.tensor(self.end).to(text))


class ImageText(nn.Module):
    """The vectors of images and of texts, and the factor on their similarities, which is learned as its logarithm."""

    units = "*.blocks.*"
    towers = ("image", "text")
    """Submodules that parallel.towers may spread by themselves."""
    parts: ClassVar[dict[str, str]] = {
        **{f"image.{n}": role for n, role in ImageTower.parts.items()},
        **{f"text.{n}": role for n, role in TextTower.parts.items()},
    }

    def __init__(
        self, image: Shape, text: Shape, dim: int, side: int, patch: int, vocab: int, context: int, channels: int = 3,
        activation: str = "gelu_exact", eps: float = 1e-5, end: int | str | None = None,
    ):  # fmt: skip
        super().__init__()
        self.image = ImageTower(image, side, patch, channels, dim, activation, eps)
        self.text = TextTower(text, vocab, context, dim, activation, eps, end)
        self.log_factor = nn.Parameter(torch.full((1,), math.log(1 / TEMPERATURE)))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        factor = self.log_factor.float().exp().clamp(max=MAX_FACTOR)
        return {"image": self.image(image), "text": self.text(text), "factor": factor}

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        """The similarities of images and texts [images, texts] times the factor, which training alone limits."""
        first, second = (F.normalize(x.float(), dim=-1) for x in (self.image(image), self.text(text)))
        return self.log_factor.float().exp() * (first @ second.T)

"""User modules: plain nn.Modules without any reference to Weft."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """Predicts the next token from this one; the embedding is tied to the head, and one matrix is unused."""

    def __init__(self, vocab: int = 256, dim: int = 16, layers: int = 2, hidden: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(dim, dim)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class InPlace(Plain):
    """Blocks return views, to which the input is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(x) * self.scale


class Skips(Plain):
    """A block is not called."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.embed(tokens))) * self.scale


class WithParts(Plain):
    """The same with a table of parts, so that tp can split it."""

    parts: ClassVar[dict[str, str]] = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Odd(WithParts):
    """Does not divide by 2."""

    def __init__(self) -> None:
        super().__init__(hidden=33)


class WrongParts(Plain):
    parts: ClassVar[dict[str, str]] = {"blocks.*.up": "colum"}


class MisspeltParts(Plain):
    """Only one of the two patterns matches."""

    parts: ClassVar[dict[str, str]] = {"blocks.*.up": "column", "blocks.*.dwn": "row"}


class Pairless(Plain):
    def __init__(self) -> None:
        super().__init__(layers=0)


class TorchLayers(Plain):
    """With torch's own encoder, whose forward depends on values."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens))) * self.scale


class GivesDict(Plain):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(tokens), "loss": torch.zeros(())}


@dataclass
class Output:
    logits: Tensor


class GivesObject(Plain):
    def forward(self, tokens: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(tokens))


class GivesNameless(Plain):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"out": super().forward(tokens), "other": tokens.float()}


class Scalar(Plain):
    """With a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.heat


class Containers(nn.Module):
    """Nested lists of layers, called by the model: the inner lists have no forward."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.grid = nn.ModuleList(nn.ModuleList(Block(dim, 32) for _ in range(2)) for _ in range(2))
        self.pairs = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(dim, dim), "b": nn.Linear(dim, dim)}) for _ in "xy")
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for row in self.grid:
            for block in row:  # type: ignore[attr-defined]
                x = block(x)
        for pair in self.pairs:
            x = x + pair["b"](pair["a"](x).tanh())  # type: ignore[index]
        return self.head(x)


class Normed(Plain):
    """Keeps running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.batchnorm = nn.BatchNorm1d(256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.batchnorm(super().forward(tokens).transpose(1, 2)).transpose(1, 2)


class RunningMax(Plain):
    """Trained layers that do not depend on the layout, and a running maximum that only evaluations use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        if not self.training:
            return out * (1 + self.largest)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, tokens.float().mean(1).max() / 256))
        return out


class Counts(Plain):
    """A counter of the samples that this process has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        self.samples += self.training * len(tokens)
        return super().forward(tokens)


class Dropped(Plain):
    """Dropout, and noise in forward as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x + torch.randn_like(x))


class Shuffled(Plain):
    """Random numbers without a mean."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[..., torch.randperm(256)]


class Frozen(Plain):
    """Fine-tuning: the embedding, and so the head, is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)


class TurnsNaN(Plain):
    """Returns NaN from the third call on."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens) * (float("nan") if self.calls > 2 else 1.0)


class Hungry(Plain):
    """From its third call on the last rank raises MemoryError for more than two samples."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        if self.calls > 2 and last and tokens.shape[0] > 2:
            raise MemoryError("no room")
        return super().forward(tokens)


class RaisesOnRankOne(Plain):
    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2 and os.environ["RANK"] == "1":
            raise ValueError("the third step is too much for me")
        return super().forward(tokens)


class RaisesWhenAsked(Plain):
    """Raises on rank 1 once there is a file `raise`."""

    def forward(self, tokens: Tensor) -> Tensor:
        if os.environ["RANK"] == "1" and Path("raise").exists():
            raise ValueError("there is a file")
        return super().forward(tokens)


class Stuck(Plain):
    """Blocks in its first step, after creating the file `stuck`; events are recorded from the start of training on."""

    def forward(self, tokens: Tensor) -> Tensor:
        if any(Path("runs").glob("*/events.jsonl")):
            Path("stuck").touch()
            threading.Event().wait()
        return super().forward(tokens)


class ReadsValues(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits if float(logits.detach().sum()) < 1e9 else -logits


class FailsOnTwoRanks(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        if os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1":
            raise ArithmeticError("not on two ranks")
        return super().forward(tokens)


class KnowsItsRank(Plain):
    """Invalid on purpose: the result depends on the rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + float(os.environ["RANK"]))


class TwoInputs(nn.Module):
    """Takes two inputs by name or position, and gives two outputs by name. One table has sparse gradients."""

    def __init__(self, dim: int = 8, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(16, dim, sparse=sparse)
        self.values = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, 16) for _ in range(2))
        self.classes, self.amount = nn.Linear(dim, 3), nn.Linear(dim, 2)

    def forward(self, words: Tensor, values: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.words(words).mean(1) + self.values(values) * scale
        for block in self.blocks:
            x = block(x)
        return {"kind": self.classes(x), "amount": self.amount(x)}


class OneOutput(TwoInputs):
    def forward(self, words: Tensor, values: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(words, values)["kind"]


class OwnLoss(TwoInputs):
    """Computes its loss, one value a sample."""

    def forward(self, words: Tensor, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(words, values)["kind"]
        return logits, F.cross_entropy(logits, labels)


class Records:
    """Samples that are dicts; a sixth of the labels is masked."""

    train_len, val_len = 64, 13

    def __init__(self, data: object) -> None:
        del data

    def train(self, index: int) -> dict[str, object]:
        values = torch.sin(torch.arange(4.0) + index)
        kind = index % 3 if index % 6 else -100
        return {"words": torch.tensor([index % 16, 3 * index % 16, 5]), "values": values,
                "targets": {"kind": kind, "amount": values[:2] * 2}}  # fmt: skip

    def val(self, index: int) -> dict[str, object]:
        return self.train(1000 + index)


class Counting:
    """Consecutive tokens, of a vocabulary of 48."""

    train_len, val_len = 1 << 20, 16

    def __init__(self, data: Any) -> None:
        self.seq_len = data.seq_len

    def train(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(index, index + self.seq_len + 1) % 48
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    def val(self, index: int) -> dict[str, Tensor]:
        return Counting.train(self, index)


class SlowCounting(Counting):
    """For a run that trains while a test waits for something else: reading takes most of its time, and no CPU."""

    def train(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.05)
        return super().train(index)


class Kinds(Records):
    """A class for some words and values."""

    def train(self, index: int) -> dict[str, object]:
        sample = super().train(index)
        return {"words": sample["words"], "values": sample["values"], "targets": index % 3}


class Many(Kinds):
    train_len = 1600


class Amounts(Records):
    """Two numbers for values, without words."""

    def train(self, index: int) -> dict[str, object]:
        values = super().train(index)["values"]
        return {"values": values, "targets": values[:2] * 2}  # type: ignore[index]


class WideValues(Amounts):
    """Values in two rows."""

    def train(self, index: int) -> dict[str, object]:
        sample = super().train(index)
        return sample | {"values": sample["values"].view(2, 2)}  # type: ignore[attr-defined]


class TwoHeads(nn.Module):
    """A class from words and values, and numbers from values; it is given the task."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.blocks = nn.Sequential(Block(4, 8), Block(4, 8))
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 2)

    def forward(self, values: Tensor, words: Tensor, task: Tensor) -> dict[str, Tensor]:
        x = self.blocks(values + self.embed(words).mean(1) * (task == 0).unsqueeze(1))
        return {"kind": self.first(x), "size": self.second(x)}


class Labelled(Records):
    """Samples with a key that OwnLoss names."""

    def train(self, index: int) -> dict[str, object]:
        sample = super().train(index)
        return {"words": sample["words"], "values": sample["values"], "labels": index % 3}


class Tuples(Records):
    """Samples that are tuples (input, input, target)."""

    def train(self, index: int) -> tuple[object, ...]:  # type: ignore[override]
        sample = super().train(index)
        return sample["words"], sample["values"], index % 3

    def val(self, index: int) -> tuple[object, ...]:  # type: ignore[override]
        return self.train(1000 + index)


class Pictures(Records):
    """Images of 8 × 8 pixels and a class."""

    def train(self, index: int) -> tuple[object, ...]:  # type: ignore[override]
        random = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=random) + index % 3, index % 3

    def val(self, index: int) -> tuple[object, ...]:  # type: ignore[override]
        return self.train(1000 + index)


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric of one's own: the probability of the target."""
    return outputs.softmax(-1).gather(-1, targets[:, None])[:, 0]


def squares(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """A loss of one's own, over several outputs: one value a sample."""
    return (outputs["amount"] - targets["amount"]).square().mean(1) + outputs["kind"].logsumexp(1)

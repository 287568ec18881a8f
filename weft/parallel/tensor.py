"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).

A model's table gives the role of each module, and ROLES what a role means. Parameters become DTensors, so that
checkpoints, sharding and norms know the slices; computation runs on local tensors with explicit collectives.

    x ──▶ region ──▶ column ──▶ (heads, hidden) ──▶ row ──▶ y
          gather      each rank its columns          sum, and cut along the sequence again
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.comm.autograd import copy_in, gather_along, reduce_out, scatter_along, sum_up
from weft.comm.axis import Axis
from weft.comm.shards import local_of
from weft.job.errors import JobError
from weft.models.attention import TokenInfo
from weft.models.attention_layer import Attention
from weft.models.dropout import Dropout
from weft.models.lora import Adapter, adapted
from weft.models.loss import linear_cross_entropy
from weft.models.mixture_of_experts import MixtureOfExperts
from weft.models.norms import WideRMSNorm
from weft.models.transformer import Head

SEQ = 1  # activations are [batch, seq, dim]


@dataclass
class TensorSplit:
    """The tp axis, whether activations are sharded along the sequence, and the parameters with partial gradients."""

    axis: Axis
    mesh: DeviceMesh
    sequence: bool
    partial: set[str] = field(default_factory=set)
    """Parameters that every rank holds whole but that see a part of the data: their gradients are summed over tp."""

    def enter(self, x: Tensor) -> Tensor:
        """Enter a region of sharded matrices: every rank gets every token."""
        return gather_along(x, self.axis, SEQ) if self.sequence else copy_in(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """Leave it: partial sums are summed."""
        return scatter_along(x, self.axis, SEQ) if self.sequence else reduce_out(x, self.axis)

    def shard(self, size: int) -> tuple[int, int]:
        """The start and length of this rank's shard of a dim of `size`; the last shards may be shorter."""
        step = -(-size // self.axis.size)
        start = min(self.axis.rank * step, size)
        return start, min(step, size - start)

    def cut(self, model: nn.Module, module: nn.Module, key: str, dim: int) -> None:
        """Keep this rank's shard of module.key along dim; modules that share the parameter share the shard."""
        whole = getattr(module, key)
        if isinstance(whole, DTensor) or whole is None:
            return
        start, length = self.shard(whole.shape[dim])
        shard = whole.detach().narrow(dim, start, length).contiguous().clone()
        param = nn.Parameter(
            DTensor.from_local(
                shard, self.mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
            ),
            requires_grad=whole.requires_grad,
        )
        for owner in model.modules():
            for name, other in list(owner.named_parameters(recurse=False)):
                if other is whole:
                    owner.register_parameter(name, param)


class ColumnLinear(nn.Linear):
    """A linear layer of which each rank holds some outputs."""

    split: TensorSplit
    in_region: bool
    multiply = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.in_region else copy_in(x, self.split.axis)
        y = self.multiply(x, local_of(self.weight), None if self.bias is None else local_of(self.bias))
        return adapted(self, x, y)


class RowLinear(nn.Linear):
    """A linear layer of which each rank holds some inputs; its outputs are partial sums that are then summed."""

    split: TensorSplit
    in_region: bool
    multiply = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        y = adapted(self, x, self.multiply(x, local_of(self.weight)))
        y = self.split.leave(y) if self.in_region else reduce_out(y, self.split.axis)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Embedding):
    """An embedding of which each rank holds some rows, and returns zeros for other tokens."""

    split: TensorSplit

    def forward(self, tokens: Tensor) -> Tensor:
        table = local_of(self.weight)
        start, length = self.split.shard(self.num_embeddings)
        mine = (tokens >= start) & (tokens < start + length)
        index = torch.where(mine, tokens - start, 0)
        rows = F.embedding(index, table) if length else table.new_zeros((*tokens.shape, table.shape[1]))
        return self.split.leave(rows * mine.unsqueeze(-1))


class VocabHead(Head):
    """A head of which each rank computes the logits of some of the vocabulary; no rank has all of them."""

    split: TensorSplit

    def forward(
        self, x: Tensor, targets: Tensor | None, valid: Tensor | None, smoothing: float, info: TokenInfo | None = None
    ) -> Tensor:
        x = self.split.enter(x)
        x = self.pooled(x, info)
        weight, bias = local_of(self.weight), None if self.bias is None else local_of(self.bias)
        if targets is None:
            return self._whole(F.linear(x, weight, bias))
        start, _ = self.split.shard(self.weight.shape[0])
        vocab = SplitVocab(self.split.axis, start, self.weight.shape[0])
        return linear_cross_entropy(x, weight, targets, valid, smoothing, vocab, self.products, bias, self.record)

    def _whole(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary; the shards of the last ranks may be shorter and are padded."""
        vocab, size = self.weight.shape[0], self.split.axis.size
        padded = F.pad(logits, (0, -(-vocab // size) - logits.shape[-1]))
        return gather_along(padded, self.split.axis, padded.dim() - 1)[..., :vocab]


class SplitRMSNorm(WideRMSNorm):
    """A norm over all heads, of which each rank has some."""

    split: TensorSplit

    def mean_square(self, x: Tensor) -> Tensor:
        return sum_up(x.square().sum(-1, keepdim=True), self.split.axis) / self.normalized_shape[0]

    def local_weight(self) -> Tensor:
        return local_of(self.weight)


class SplitVocab:
    """Sums and maxima over the ranks' parts of the vocabulary."""

    def __init__(self, axis: Axis, start: int, vocab: int):
        self.axis, self.start, self.vocab = axis, start, vocab

    def sum(self, x: Tensor) -> Tensor:
        return self.axis.all_reduce(x)

    def max(self, x: Tensor) -> Tensor:
        return self.axis.all_reduce(x, dist.ReduceOp.MAX)


class SequenceDropout(Dropout):
    """Dropout on this rank's part of the sequence."""

    split: TensorSplit

    def forward(self, x: Tensor, keys: Tensor | None, rows: Tensor, first: int = 0) -> Tensor:
        return super().forward(x, keys, self.split.axis.narrow(rows, 0), first)


@dataclass
class PartModule:
    """A module with a role."""

    model: nn.Module
    name: str
    module: nn.Module
    regions: set[str]

    @property
    def in_region(self) -> bool:
        return any(self.name.startswith(r + ".") for r in self.regions)

    def change_class(self, expected: type, new: type, role: str, split: TensorSplit, **attributes: Any) -> None:
        """Change the class of the module; its parameters and their names stay."""
        if not isinstance(self.module, expected):
            kind = type(self.module).__name__
            raise JobError(f"{self.name} is a {kind}; the part {role!r} needs a {expected.__name__}")
        self.module.__class__ = new
        for key, value in {"split": split, **attributes}.items():
            setattr(self.module, key, value)

    def mark_partial(self, split: TensorSplit) -> None:
        split.partial |= {f"{self.name}.{key}" for key, _ in self.module.named_parameters()}


Role = Callable[[TensorSplit, PartModule], None]


def _column(split: TensorSplit, part: PartModule) -> None:
    part.change_class(nn.Linear, ColumnLinear, "column", split, in_region=part.in_region)
    split.cut(part.model, part.module, "weight", 0)
    split.cut(part.model, part.module, "bias", 0)
    _cut_adapter(split, part, cut="b", dim=0, whole="a")


def _row(split: TensorSplit, part: PartModule) -> None:
    part.change_class(nn.Linear, RowLinear, "row", split, in_region=part.in_region)
    split.cut(part.model, part.module, "weight", 1)
    if part.module.bias is not None and part.in_region and split.sequence:
        split.partial.add(f"{part.name}.bias")
    _cut_adapter(split, part, cut="a", dim=1, whole="b")


def _cut_adapter(split: TensorSplit, part: PartModule, cut: str, dim: int, whole: str) -> None:
    """Shard one matrix of a layer's adapter. The gradient of the other comes from a part of the outputs or inputs."""
    if (adapter := part.module._modules.get("lora")) is None:
        return
    assert isinstance(adapter, Adapter)
    adapter.first = split.shard(adapter.a.shape[1])[0] if cut == "a" else 0
    split.cut(part.model, adapter, cut, dim)
    split.partial.add(f"{part.name}.lora.{whole}")


def _vocab(split: TensorSplit, part: PartModule) -> None:
    if isinstance(part.module, nn.Linear):  # patches have no vocabulary: every rank embeds all of them
        return _scatter(split, part)
    part.change_class(nn.Embedding, VocabEmbedding, "vocab", split)
    split.cut(part.model, part.module, "weight", 0)


def _vocab_head(split: TensorSplit, part: PartModule) -> None:
    part.change_class(Head, VocabHead, "vocab_head", split)
    split.cut(part.model, part.module, "weight", 0)
    split.cut(part.model, part.module, "bias", 0)


def _region(split: TensorSplit, part: PartModule) -> None:
    if isinstance(part.module, MixtureOfExperts):
        return  # each rank routes its own tokens (parallel/expert/expert_parallel.py)
    if isinstance(part.module, Attention):
        part.module.enter = split.enter
    else:
        part.module.register_forward_pre_hook(lambda _, args: (split.enter(args[0]), *args[1:]))


def _sequence(split: TensorSplit, part: PartModule) -> None:
    if split.sequence:
        if isinstance(part.module, Dropout):
            part.change_class(Dropout, SequenceDropout, "sequence", split)
        part.mark_partial(split)


def _heads(split: TensorSplit, part: PartModule) -> None:
    if not isinstance(part.module, WideRMSNorm):
        return part.mark_partial(split)
    part.change_class(WideRMSNorm, SplitRMSNorm, "heads", split)
    split.cut(part.model, part.module, "weight", 0)


def _by_head(split: TensorSplit, part: PartModule) -> None:
    split.cut(part.model, part.module, "weight", 0)


def _head_table(split: TensorSplit, part: PartModule) -> None:
    """A table with a column for each head: a rank looks up those of its heads."""
    part.module.register_forward_hook(lambda _, __, y: split.axis.narrow(y, -1))
    part.mark_partial(split)


def _routed(split: TensorSplit, part: PartModule) -> None:
    if not any(isinstance(p, DTensor) for p in part.module.parameters()):  # else they are sharded over ep
        part.mark_partial(split)


def _inside(split: TensorSplit, part: PartModule) -> None:
    """Nothing to do: the module above has a role."""


def _scatter(split: TensorSplit, part: PartModule) -> None:
    if split.sequence:
        part.module.register_forward_hook(lambda _, __, y: split.axis.narrow(y, -2))
        part.mark_partial(split)


ROLES: dict[str, Role] = {
    "column": _column,
    "row": _row,
    "vocab": _vocab,
    "vocab_head": _vocab_head,
    "region": _region,
    "sequence": _sequence,
    "heads": _heads,
    "head_table": _head_table,
    "by_head": _by_head,
    "scatter": _scatter,
    "routed": _routed,
    "inside": _inside,
}


SHARDING_ROLES = ("column", "row", "vocab", "vocab_head")
"""Roles that shard weights; a table needs at least one of them."""


def split_tensors(split: TensorSplit, model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    """Shard these modules of a model by its table of roles."""
    table = getattr(model, "parts", None)
    if not table:
        raise JobError(
            f"{type(model).__name__} has no table of parts, so parallel.tp must be 1; for tp give the class an "
            "attribute `parts` such as {'*.up': 'column', '*.down': 'row'}"
        )
    regions = {name for name, _ in model.named_modules() if _role(table, name) == "region"}
    stage = hasattr(model, "keep") or hasattr(
        model, "stage"
    )  # the table is for all stages, and this one may have no sharded module
    if not stage and not any(_role(table, name) in SHARDING_ROLES for name, _ in model.named_modules()):
        example = next((n for n, m in model.named_modules() if isinstance(m, nn.Linear)), "layers.0.up")
        raise JobError(
            f"the table of parts of {type(model).__name__} cuts none of its modules ({', '.join(table)}); write "
            f"patterns that fit their paths, such as {example!r}"
        )
    if not stage:
        _check_patterns(model, table)
    for name, module in modules:
        if role := _role(table, name):
            ROLES[role](split, PartModule(model, name, module, regions))


def _check_patterns(model: nn.Module, table: dict[str, str]) -> None:
    """Refuse patterns that match nothing: they are misspelt, and the module would not be sharded."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in table:
        if not any(fnmatchcase(name, pattern) for name in names):
            last = pattern.rpartition(".")[2]
            near = difflib.get_close_matches(last, {n.rpartition(".")[2] for n in names}, n=1)
            hint = f"; did you mean {pattern.removesuffix(last) + near[0]!r}?" if near else ""
            raise JobError(f"the table of parts of {type(model).__name__} has {pattern!r}, which fits no module{hint}")


def _role(table: dict[str, str], name: str) -> str | None:
    for pattern, role in table.items():
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"parts: {', '.join(ROLES)}"
            raise JobError(f"the table of parts says {pattern!r}: {role!r}, which is no part; {hint}")
        if fnmatchcase(name, pattern):
            return role
    return None

"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).

A model's table gives the role of each module, and ROLES what a role means. Parameters become DTensors, so that
checkpoints, sharding and norms know the slices; computation runs on local tensors with explicit collectives.

    x ──▶ region ──▶ column ──▶ (heads, hidden) ──▶ row ──▶ y
          gather      each rank its columns          sum, and cut along the sequence again
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm.autograd import copy_in
from weft.job.errors import JobError
from weft.models.attention_layer import Attention
from weft.models.dropout import Dropout
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.models.lora import Adapter
from weft.models.norms import WideRMSNorm
from weft.models.transformer import Head
from weft.parallel.inferred_attention import infer_attention
from weft.parallel.inferred_parts import infer_parts
from weft.parallel.tensor_layers import (
    ColumnLinear,
    FusedLinear,
    RowLinear,
    SequenceDropout,
    SplitRMSNorm,
    TensorSplit,
    VocabEmbedding,
    VocabHead,
)


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


def _fused(split: TensorSplit, part: PartModule) -> None:
    path = max((p for p in part.model.attention_splits if part.name.startswith(f"{p}.")), key=len)  # type: ignore[union-attr]
    count = part.model.attention_splits[path].projections[part.name.removeprefix(f"{path}.")]  # type: ignore[index,union-attr]
    part.change_class(nn.Linear, FusedLinear, "fused", split, count=count)
    split.cut(part.model, part.module, "weight", 0)
    split.cut(part.model, part.module, "bias", 0)


def _attention(split: TensorSplit, part: PartModule) -> None:
    part.model.attention_splits[part.name].use(part.module)  # type: ignore[index,union-attr]


def _cut_adapter(split: TensorSplit, part: PartModule, cut: str, dim: int, whole: str) -> None:
    """Shard one matrix of a layer's adapter. The gradient of the other comes from a part of the outputs or inputs."""
    if (adapter := getattr(part.module, "lora", None)) is None:
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
        keys = part.module.k
        if keys is not None and (heads := keys.out_features // part.module.head_dim) < split.axis.size:
            part.module.whole_head = partial(split.whole_head, heads=heads)
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


def _latent(split: TensorSplit, part: PartModule) -> None:
    """A layer that every rank has whole, of whose outputs each rank's heads read the last `direct_outputs` as they are,
    and the others through a column layer."""
    width: int = part.module.direct_outputs  # type: ignore[assignment]

    def shared(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return torch.cat([y[..., :-width], copy_in(y[..., -width:], split.axis)], -1)

    part.module.register_forward_hook(shared)


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
    "latent": _latent,
    "scatter": _scatter,
    "routed": _routed,
    "inside": _inside,
    "fused": _fused,
    "attention": _attention,
}


SHARDING_ROLES = ("column", "row", "vocab", "vocab_head", "fused")
"""Roles that shard weights; a table needs at least one of them."""


def check_parts(model: nn.Module, ranks: int) -> None:
    """Refuse a model that has nothing to split over these tp ranks, or whose table of parts does not fit it."""
    if getattr(model, "parts", None) is None:
        model.parts = infer_table(model, ranks)  # type: ignore[assignment]
    table = _table(model)
    if not table:
        raise JobError(
            f"{type(model).__name__} has no table of parts, and no two linear layers with an activation between them, "
            "so parallel.tp must be 1; for tp give the class an attribute `parts` such as {'*.up': 'column', "
            "'*.down': 'row'}"
        )
    if not any(_role(table, name) in SHARDING_ROLES for name, _ in model.named_modules()):
        example = next((n for n, m in model.named_modules() if isinstance(m, nn.Linear)), "layers.0.up")
        raise JobError(
            f"the table of parts of {type(model).__name__} cuts none of its modules ({', '.join(table)}); write "
            f"patterns that fit their paths, such as {example!r}"
        )
    _check_patterns(model, table)


def split_tensors(split: TensorSplit, model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    """Shard these modules of a model by its table of roles."""
    stage = hasattr(model, "keep") or hasattr(model, "stage")
    if not stage:  # the table is for all stages, and one of them may have no sharded module
        check_parts(model, split.axis.size)
    table = _table(model)
    regions = {name for name, _ in model.named_modules() if _role(table, name) == "region"}
    for name, module in modules:
        if role := _role(table, name):
            ROLES[role](split, PartModule(model, name, module, regions))


def infer_table(model: nn.Module, ranks: int) -> dict[str, str]:
    """The table of parts of a model that has none: its MLPs, and its attention where the arguments of its forward are
    known (`given`). `whole_parts` of the model says why attention stays whole."""
    table = infer_parts(model)
    splits, whole = infer_attention(model, getattr(model, "given", None) or {}, table, ranks)
    model.attention_splits, model.whole_parts = splits, whole  # type: ignore[assignment]
    for path, split in splits.items():
        table[path] = "attention"
        table |= {f"{path}.{name}": "fused" if n > 1 else "column" for name, n in split.projections.items()}
        table[f"{path}.{split.output}"] = "row"
    return table


def _table(model: nn.Module) -> dict[str, str]:
    """The roles of a model's modules, by pattern."""
    table: dict[str, str] = getattr(model, "parts", None) or {}
    return table


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

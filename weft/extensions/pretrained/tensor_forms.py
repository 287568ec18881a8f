"""The forms in which tensors of a file hold parameters of a model, and which tensor holds which parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch
from torch import Tensor, nn

from weft.extensions.pretrained.family_entry import Fused, PretrainedFamily
from weft.job.errors import JobError
from weft.job.schema import Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """How one tensor of a file holds one or several parameters."""

    split: Callable[[Tensor, Sequence[Shape], Model], list[Tensor]]
    """The parameters of given shapes, as views of the tensor where that is possible."""
    join: Callable[[Sequence[Tensor], Model], Tensor]


def _rows(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    return list(t.split([shape[0] for shape in shapes]))


def _by_head(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    heads = t.unflatten(0, (m.heads or 1, len(shapes), -1))  # [heads, q k v, head_dim, ...]
    return [heads[:, i].reshape(shape) for i, shape in enumerate(shapes)]


def _join_heads(parts: Sequence[Tensor], m: Model) -> Tensor:
    return torch.stack([p.unflatten(0, (m.heads or 1, -1)) for p in parts], 1).flatten(0, 2)


def _unpaired(t: Tensor) -> Tensor:
    """Rows of rotary pairs, from one pair after the other to the first values of all pairs and then the second."""
    return t.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def _paired(t: Tensor) -> Tensor:
    return t.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _latent_queries(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    heads = t.unflatten(0, (m.heads or 1, -1))
    plain = (m.head_dim or 0) - (m.rope_dim or 0)
    rotary = heads[:, plain:].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return [torch.cat((rotary, heads[:, :plain]), 1).flatten(0, 1)]


def _join_latent_queries(parts: Sequence[Tensor], m: Model) -> Tensor:
    heads, rope = parts[0].unflatten(0, (m.heads or 1, -1)), m.rope_dim or 0
    rotary = heads[:, :rope].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((heads[:, rope:], rotary), 1).flatten(0, 1)


def _latent_keys(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    rank = m.latent.kv_rank if m.latent else 0
    return [torch.cat((t[:rank], _unpaired(t[rank:])))]


def _join_latent_keys(parts: Sequence[Tensor], m: Model) -> Tensor:
    rank = m.latent.kv_rank if m.latent else 0
    return torch.cat((parts[0][:rank], _paired(parts[0][rank:])))


def _paired_heads(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    return [t.unflatten(0, (-1, (m.head_dim or 2) // 2, 2)).transpose(1, 2).flatten(0, 2)]


def _join_paired_heads(parts: Sequence[Tensor], m: Model) -> Tensor:
    return parts[0].unflatten(0, (-1, 2, (m.head_dim or 2) // 2)).transpose(1, 2).flatten(0, 2)


def _grouped_heads(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    groups = t.unflatten(0, (m.kv_heads or 1, -1, m.head_dim or 1))  # [key heads, queries … key value, head_dim, ...]
    return [groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)]


def _join_grouped_heads(parts: Sequence[Tensor], m: Model) -> Tensor:
    groups = [p.unflatten(0, (m.kv_heads or 1, -1, m.head_dim or 1)) for p in parts]
    return torch.cat(groups, 1).flatten(0, 2)


def _by_expert(t: Tensor) -> Tensor:
    """Matrices [experts, inputs, outputs] as [experts, outputs, inputs], and biases as they are."""
    return t.transpose(1, 2) if t.dim() == 3 else t


def _interleaved(t: Tensor, shapes: Sequence[Shape], m: Model) -> list[Tensor]:
    turned = _by_expert(t)
    return [turned[:, i :: len(shapes)] for i in range(len(shapes))]


def _join_interleaved(parts: Sequence[Tensor], m: Model) -> Tensor:
    return _by_expert(torch.stack(list(parts), 2).flatten(1, 2))


def _join_patches(parts: Sequence[Tensor], m: Model) -> Tensor:
    channels = m.channels or 3
    side = isqrt(parts[0].shape[1] // channels)
    return parts[0].unflatten(1, (channels, side, side))


FORMS: dict[str, Form] = {
    "same": Form(lambda t, shapes, m: [t], lambda parts, m: parts[0]),
    "rows": Form(_rows, lambda parts, m: torch.cat(list(parts))),
    "columns": Form(lambda t, shapes, m: _rows(t.t(), shapes, m), lambda parts, m: torch.cat(list(parts)).t()),
    "patches": Form(lambda t, shapes, m: [t.flatten(1)], _join_patches),
    "one token": Form(lambda t, shapes, m: [t[0, 0]], lambda parts, m: parts[0][None, None]),
    "one batch": Form(lambda t, shapes, m: [t[0]], lambda parts, m: parts[0][None]),
    "one row": Form(lambda t, shapes, m: [t[None]], lambda parts, m: parts[0][0]),
    "one number": Form(lambda t, shapes, m: [t.reshape(1)], lambda parts, m: parts[0].reshape(())),
    "heads": Form(_by_head, _join_heads),
    "paired heads": Form(_paired_heads, _join_paired_heads),
    "grouped heads": Form(_grouped_heads, _join_grouped_heads),
    "expert columns": Form(lambda t, shapes, m: [_by_expert(t)], lambda parts, m: _by_expert(parts[0])),
    "interleaved experts": Form(_interleaved, _join_interleaved),
    "latent queries": Form(_latent_queries, _join_latent_queries),
    "latent keys": Form(_latent_keys, _join_latent_keys),
}
"""same: as it is. rows: one after the other. columns: the same, transposed (GPT-2). patches: a
convolution of patches. one token, one batch: with dims of size 1 before (ViT). one row, one number: without a dim of
size 1 (CLIP). heads: one after the other in each
head (GPT-NeoX). paired heads: rotary pairs of a head side by side (torchtitan). grouped heads: for each key head its
queries, key and value (Megatron). expert columns: matrices of all experts, transposed. interleaved experts: with the
outputs of several layers in turn (gpt-oss). latent queries, latent keys: the rotary part of a head last and in pairs
(DeepSeek)."""


@dataclass(frozen=True)
class TensorPart:
    """A parameter, or one expert's matrix of it."""

    name: str
    shape: Shape
    index: int | None = None


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file and the parameters that it holds."""

    name: str
    form: Form
    parts: tuple[TensorPart, ...]

    def shape(self, model: Model) -> Shape:
        """The shape that it has in a file."""
        made = [torch.empty(part.shape, device="meta") for part in self.parts]
        return tuple(self.form.join(made, model).shape)


_BLOCK_NAME = re.compile(r"(|image\.|text\.)blocks\.(encoder|decoder|)(\d+)\.(.+)")


def named_shapes(family: PretrainedFamily, module: nn.Module) -> dict[str, Shape]:
    """Names and shapes of the parameters of a model, and of the buffers that the family's files hold."""
    params = {n: tuple(p.shape) for n, p in module.named_parameters()}
    return params | {n: tuple(b.shape) for n, b in module.named_buffers() if _find(family, n) is not None}


def file_tensors(family: PretrainedFamily, model: Model, shapes: Iterable[tuple[str, Shape]]) -> list[FileTensor]:
    """The tensors of a checkpoint's files, from the names and shapes of a model's parameters."""
    found: dict[str, tuple[Form, list[TensorPart]]] = {}
    for name, shape in shapes:
        there = _lookup(family, name)
        there = replace(there, name=there.name.replace("{gated}", "_1" if model.gated else ""))
        there = replace(there, name=there.name.replace("{untied}", "" if model.tied else "decoder."))
        if "{e}" in there.name:
            for e in range(shape[0]):
                found[there.name.replace("{e}", str(e))] = (FORMS[there.form], [TensorPart(name, shape[1:], e)])
        else:
            found.setdefault(there.name, (FORMS[there.form], []))[1].append(TensorPart(name, shape))
    return [FileTensor(name, form, tuple(parts)) for name, (form, parts) in found.items()]


def _lookup(family: PretrainedFamily, name: str) -> Fused:
    """The tensor of a parameter; its name may still have {e} in it."""
    if (found := _find(family, name)) is None:
        raise JobError(f"checkpoints of {family.help} have no tensor for {name}")
    return found


def _find(family: PretrainedFamily, name: str) -> Fused | None:
    match = _BLOCK_NAME.fullmatch(name)
    key, block = (f"{match[1]}blocks.{match[2]}{{i}}.{match[4]}", match[3]) if match else (name, "")
    owner, _, leaf = key.rpartition(".")
    there = family.names.get(key) or family.names.get(f"{owner}.{{p}}")
    if there is None:
        return None
    fused = there if isinstance(there, Fused) else Fused(there, "same")
    return Fused(fused.name.replace("{i}", block).replace("{p}", leaf), fused.form)

"""Writes the weights of a run as a folder of another training library."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.contents import Chunk
from weft.checkpoint.writer import write_file, write_index_file, write_torch_file
from weft.extensions.pretrained.family_entry import PretrainedFamily
from weft.extensions.pretrained.interchange.foreign_weights import DESCRIPTION
from weft.extensions.pretrained.interchange.name_schemes import MEGATRON, torchtitan_scheme, transformers_scheme
from weft.extensions.pretrained.interchange.tensor_files import FP32, ITERATION, LATEST_UNIVERSAL, MEGATRON_FILE, ZERO
from weft.extensions.pretrained.tensor_forms import FORMS, FileTensor, TensorPart, file_tensors, named_shapes
from weft.extensions.pretrained.writer import convert_tensors
from weft.job.errors import JobError
from weft.job.schema import Model
from weft.models.build_model import build_model
from weft.training.weight_shards import write_json

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Optimizer states of a parameter that a universal checkpoint has beside it."""
UNIVERSAL_VERSION = 0.2


@dataclass(frozen=True)
class ExportedModel:
    """What is written: a model, and functions that read its parameters and, where there are some, their moments."""

    model: Model
    step: int
    load: Callable[[str], Tensor]
    load_moment: Callable[[str, str], Tensor] | None
    dtype: torch.dtype | None

    def tensors(self, scheme: PretrainedFamily | None, moment: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors under the names of a scheme, or Weft's own names, one at a time."""
        module = build_model(self.model)
        if scheme is None:
            shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
            files = [FileTensor(n, FORMS["same"], (TensorPart(n, shape),)) for n, shape in shapes.items()]
        else:
            files = file_tensors(scheme, self.model, named_shapes(scheme, module).items())

        def source(names: list[str]) -> dict[str, Tensor]:
            if moment is None or self.load_moment is None:
                return {n: self.load(n) for n in names}
            return {n: self.load_moment(n, moment) for n in names}

        return convert_tensors(files, source, self.model, lambda tensor: self.dtype)


def _known_scheme(model: Model) -> PretrainedFamily | None:
    try:
        return transformers_scheme(model)
    except JobError:
        return None


def write_dcp(out: Path, exported: ExportedModel) -> int:
    """torch's distributed checkpoint of {"model": …}, with the names of transformers if a family has this model."""
    tensors = exported.tensors(_known_scheme(exported.model))
    return _write_dcp(out, ((f"model.{name}", tensor) for name, tensor in tensors))


def write_torchtitan(out: Path, exported: ExportedModel) -> int:
    """step-N, as torchtitan saves a model alone."""
    folder = out / f"step-{exported.step}"
    folder.mkdir(parents=True, exist_ok=True)
    return _write_dcp(folder, exported.tensors(torchtitan_scheme(exported.model)))


def _write_dcp(out: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    chunks: list[Chunk] = []

    def each() -> Iterator[Tensor]:
        for name, tensor in tensors:
            shape = tuple(tensor.shape)
            chunks.append(Chunk(name, str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape))
            yield tensor

    extents, written = write_file(out / "__0_0.distcp", each())
    write_index_file(out, [chunks], [list(range(len(chunks)))], [extents])
    return written.bytes


def write_deepspeed(out: Path, exported: ExportedModel) -> int:
    """A universal checkpoint: each parameter in fp32, and its moments where the run has Adam's."""
    scheme, name = transformers_scheme(exported.model), f"global_step{exported.step}_universal"
    total = 0
    for kind in (None, *(MOMENTS if exported.load_moment else ())):
        for key, tensor in exported.tensors(scheme, kind):
            folder = out / name / ZERO / key
            folder.mkdir(parents=True, exist_ok=True)
            write_torch_file(folder / (f"{kind}.pt" if kind else FP32), {"param": tensor.float().clone()})
            total += 4 * tensor.numel()
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION}}
    write_torch_file(out / name / "mp_rank_00_model_states.pt", {**info, "global_steps": exported.step})
    (out / LATEST_UNIVERSAL).write_text(name)
    return total


def write_megatron(out: Path, exported: ExportedModel) -> int:
    """iter_N/mp_rank_00/model_optim_rng.pt, with the names of Megatron-Core and Transformer Engine."""
    held = {name: tensor.clone() for name, tensor in exported.tensors(MEGATRON)}
    folder = out / f"iter_{exported.step:07d}" / "mp_rank_00"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"args": _megatron_args(exported.model), "checkpoint_version": 3.0, "iteration": exported.step}
    write_torch_file(folder / MEGATRON_FILE, {**content, "model": held})
    (out / ITERATION).write_text(str(exported.step))
    return sum(tensor.nbytes for tensor in held.values())


def _megatron_args(m: Model) -> argparse.Namespace:
    """The arguments of Megatron that describe a model."""
    return argparse.Namespace(
        num_layers=m.layers, hidden_size=m.dim, ffn_hidden_size=m.ffn, num_attention_heads=m.heads,
        group_query_attention=m.kv_heads != m.heads, num_query_groups=m.kv_heads, kv_channels=m.head_dim,
        max_position_embeddings=m.max_len, padded_vocab_size=m.vocab, swiglu=m.activation == "swiglu",
        normalization="LayerNorm" if m.norm == "layernorm" else "RMSNorm", norm_epsilon=m.norm_eps,
        position_embedding_type="rope" if m.positions == "rope" else "learned_absolute",
        rotary_base=int(m.rope_theta or 10_000), untie_embeddings_and_output_weights=not m.tied,
        add_bias_linear=bool(m.biases[2]), add_qkv_bias=bool(m.biases[0]), tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1, transformer_impl="transformer_engine",
    )  # fmt: skip


WRITERS: dict[str, Callable[[Path, ExportedModel], int]] = {
    "dcp": write_dcp,
    "torchtitan": write_torchtitan,
    "deepspeed": write_deepspeed,
    "megatron": write_megatron,
}
"""By the name of `weft export --to`."""


def write_foreign(out: Path, to: str, exported: ExportedModel) -> int:
    """Write a run in one of WRITERS, with a description of the model; returns the bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    size = WRITERS[to](out, exported)
    fields = exported.model.model_dump(mode="json", exclude_none=True, exclude={"pretrained"})
    write_json(out / DESCRIPTION, {"step": exported.step, "format": to, "model": fields})
    return size

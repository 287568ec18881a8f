"""The names and forms under which other training libraries store the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator

from weft.extensions.pretrained.config import write_config
from weft.extensions.pretrained.family_entry import PRETRAINED, Fused, PretrainedFamily
from weft.job.errors import JobError
from weft.job.schema import Model

_BLOCK = "blocks.{i}"
_TITAN, _MEGATRON = "layers.{i}", "decoder.layers.{i}"


def _scheme(name: str, title: str, names: dict[str, str | Fused]) -> PretrainedFamily:
    return PretrainedFamily(name, title, "", "llama", (), names, prefix="")


TORCHTITAN = _scheme(
    "torchtitan", "torchtitan",
    {
        "embed.weight": "tok_embeddings.weight", "norm.weight": "norm.weight", "head.weight": "output.weight",
        f"{_BLOCK}.attn_norm.weight": f"{_TITAN}.attention_norm.weight",
        f"{_BLOCK}.mlp_norm.weight": f"{_TITAN}.ffn_norm.weight",
        **{f"{_BLOCK}.attn.{n}.weight": Fused(f"{_TITAN}.attention.w{n}.weight", "paired heads") for n in "qk"},
        **{f"{_BLOCK}.attn.{n}.weight": f"{_TITAN}.attention.w{n}.weight" for n in "vo"},
        **{f"{_BLOCK}.mlp.{n}.weight": f"{_TITAN}.feed_forward.{w}.weight"
           for n, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))},
    },
)  # fmt: skip


def _megatron(name: str, attn_norm: str, mlp_norm: str) -> PretrainedFamily:
    return _scheme(
        name, "Megatron",
        {
            "embed.weight": "embedding.word_embeddings.weight",
            "positions.weight": "embedding.position_embeddings.weight",
            "norm.{p}": "decoder.final_layernorm.{p}", "head.weight": "output_layer.weight",
            f"{_BLOCK}.attn_norm.{{p}}": f"{_MEGATRON}.{attn_norm}{{p}}",
            f"{_BLOCK}.mlp_norm.{{p}}": f"{_MEGATRON}.{mlp_norm}{{p}}",
            **{f"{_BLOCK}.attn.{n}.{{p}}": Fused(f"{_MEGATRON}.self_attention.linear_qkv.{{p}}", "grouped heads")
               for n in "qkv"},
            **{f"{_BLOCK}.attn.{n}_norm.weight": f"{_MEGATRON}.self_attention.{n}_layernorm.weight" for n in "qk"},
            f"{_BLOCK}.attn.o.{{p}}": f"{_MEGATRON}.self_attention.linear_proj.{{p}}",
            **{f"{_BLOCK}.mlp.{n}.{{p}}": Fused(f"{_MEGATRON}.mlp.linear_fc1.{{p}}", "rows") for n in ("gate", "up")},
            f"{_BLOCK}.mlp.down.{{p}}": f"{_MEGATRON}.mlp.linear_fc2.{{p}}",
        },
    )  # fmt: skip


MEGATRON = _megatron("megatron", "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
"""With the norms inside of the layers that follow them, as Transformer Engine has them."""
MEGATRON_LOCAL = _megatron("megatron local", "input_layernorm.", "pre_mlp_layernorm.")


def transformers_scheme(model: Model) -> PretrainedFamily:
    """The names of transformers for a model; a JobError if no family of it can have it."""
    return PRETRAINED[write_config(model)["model_type"]]


def torchtitan_scheme(model: Model) -> PretrainedFamily:
    """torchtitan's names for a model; a JobError if it is not its Llama."""
    config = write_config(model, "llama")
    scaling = config.get("rope_scaling", {}).get("rope_type", "llama3")
    if scaling != "llama3" or model.tied or config.get("hidden_act") != "silu":
        raise JobError("torchtitan's Llama has SwiGLU, an untied head and unscaled or llama3 positions; --to dcp works")
    return TORCHTITAN


def schemes_of(model: Model) -> Iterator[PretrainedFamily]:
    """Every scheme that may hold a model, for a folder that does not name its own."""
    yield from (TORCHTITAN, MEGATRON, MEGATRON_LOCAL)
    try:
        yield transformers_scheme(model)
    except JobError:
        return

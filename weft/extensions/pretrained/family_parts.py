"""Converters and tables of names that several families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.extensions.pretrained.config_fields import Choice, Config, Converter, Fields, Key, Only, SizeKey
from weft.extensions.pretrained.family_entry import Fused
from weft.job.schema import Model

Names = dict[str, str | Fused]
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
PLAIN = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact",
    "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip

SIZES: tuple[Converter, ...] = (
    SizeKey("dim", "hidden_size"), SizeKey("layers", "num_hidden_layers"), SizeKey("heads", "num_attention_heads"),
    SizeKey("ffn", "intermediate_size"), SizeKey("vocab", "vocab_size"), Key("max_len", "max_position_embeddings"),
)  # fmt: skip


@dataclass(frozen=True)
class KeyHeads:
    """The number of key heads; null is one a head."""

    def read(self, config: Config) -> Fields:
        count = config.take("num_key_value_heads")
        return {} if count is None else {"kv_heads": count}

    def write(self, model: Model) -> Fields:
        return {"num_key_value_heads": model.kv_heads or model.heads}


def llama_like(activation_key: str = "hidden_act") -> tuple[Any, ...]:
    """The converters that relatives of Llama share."""
    return (
        *SIZES, KeyHeads(), Key("norm_eps", "rms_norm_eps"),
        Choice("activation", activation_key, GATED),
    )  # fmt: skip


@dataclass(frozen=True)
class Gpt2Width:
    """The feed-forward width: n_inner, else four times the width."""

    def read(self, config: Config) -> Fields:
        given = config.take("n_inner")
        return {"ffn": 4 * config.number("n_embd") if given is None else given}

    def write(self, model: Model) -> Fields:
        return {"n_inner": model.ffn}


@dataclass(frozen=True)
class GemmaScales:
    """Scores are scaled by query_pre_attn_scalar, and embeddings by √hidden_size."""

    def read(self, config: Config) -> Fields:
        scalar, dim = config.take("query_pre_attn_scalar"), config.number("hidden_size")
        if type(scalar) not in (int, float) or not 0 < scalar < 2**31:
            raise config.wrong("query_pre_attn_scalar", scalar, "a number above 0")
        out: Fields = {"embedding_scale": dim**0.5}
        return out if scalar == config.take("head_dim") else out | {"attention_scale": scalar**-0.5}

    def write(self, model: Model) -> Fields:
        scale = model.attention_scale
        return {"query_pre_attn_scalar": model.head_dim if scale is None else round(scale**-2)}


@dataclass(frozen=True)
class SparseLayers:
    """Which blocks of Qwen's mixtures have experts: all but the first ones."""

    def read(self, config: Config) -> Fields:
        Only("decoder_sparse_step", (1,)).read(config)
        dense = config.take("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            raise config.wrong("mlp_only_layers", dense, "the first blocks, such as [0, 1], or none")
        return {"experts": {"first_dense": len(dense)}}

    def write(self, model: Model) -> Fields:
        first = model.experts.first_dense if model.experts else 0
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(range(first))}


@dataclass(frozen=True)
class QwenShared:
    """Qwen2-MoE's shared expert, which has a width and a gate of its own."""

    def read(self, config: Config) -> Fields:
        width = config.number("shared_expert_intermediate_size")
        return {"experts": {"shared": 1, "shared_ffn": width, "shared_gate": True}}

    def write(self, model: Model) -> Fields:
        return {"shared_expert_intermediate_size": model.experts.shared_width if model.experts else None}


@dataclass(frozen=True)
class LatentKeys:
    """Widths of multi-head latent attention."""

    def read(self, config: Config) -> Fields:
        ranks = {"kv_rank": config.number("kv_lora_rank"), "v_dim": config.number("v_head_dim")}
        if (given := config.take("q_lora_rank")) is not None:
            ranks["q_rank"] = given
        return {"latent": ranks}

    def write(self, model: Model) -> Fields:
        if (latent := model.latent) is None:
            return {}
        return {
            "kv_lora_rank": latent.kv_rank, "v_head_dim": latent.v_dim, "q_lora_rank": latent.q_rank,
            "num_key_value_heads": model.heads,
        }  # fmt: skip


@dataclass(frozen=True)
class Fp8Blocks:
    """Weights in fp8 with a scale for each block, which the reader multiplies."""

    def read(self, config: Config) -> Fields:
        found = config.take("quantization_config") or {}
        blocks = found.get("weight_block_size") if isinstance(found, dict) else None
        sizes = isinstance(blocks, list) and len(blocks) == 2 and all(type(b) is int and 0 < b <= 2**20 for b in blocks)
        if found and not (found.get("quant_method") == "fp8" and sizes):
            raise config.wrong("quantization_config", found, "none, or fp8 with a weight_block_size such as [128, 128]")
        return {}

    def write(self, model: Model) -> Fields:
        return {}


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Experts in MXFP4, which the reader converts to bf16."""

    def read(self, config: Config) -> Fields:
        found = config.take("quantization_config") or {}
        if found and not (isinstance(found, dict) and found.get("quant_method") == "mxfp4"):
            raise config.wrong("quantization_config", found, "none or mxfp4")
        return {}

    def write(self, model: Model) -> Fields:
        return {}


@dataclass(frozen=True)
class GroupsOfExperts:
    """DeepSeek-V2's groups of experts, which topk_method=greedy does not use."""

    def read(self, config: Config) -> Fields:
        method, groups, top = (config.take(k) for k in ("topk_method", "n_group", "topk_group"))
        if method not in ("greedy", "group_limited_greedy"):
            raise config.wrong("topk_method", method, "greedy or group_limited_greedy")
        if method == "greedy":
            return {}
        if groups is None or top is None:
            raise config.wrong("n_group, topk_group", (groups, top), f"two numbers with topk_method={method}")
        return {"experts": {"groups": groups, "top_groups": top}}

    def write(self, model: Model) -> Fields:
        if model.experts is None or model.experts.groups == 1:
            return {"topk_method": "greedy"}
        return {
            "topk_method": "group_limited_greedy", "n_group": model.experts.groups,
            "topk_group": model.experts.top_groups,
        }  # fmt: skip


ENDS = {
    "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight",
}  # fmt: skip
_BLOCK, _LAYER = "blocks.{i}", "model.layers.{i}"
NORMS = {
    f"{_BLOCK}.attn_norm.weight": f"{_LAYER}.input_layernorm.weight",
    f"{_BLOCK}.mlp_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
}
OUT_NORMS = {
    f"{_BLOCK}.attn_out_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
    f"{_BLOCK}.mlp_out_norm.weight": f"{_LAYER}.post_feedforward_layernorm.weight",
}
BOTH_NORMS = {
    **OUT_NORMS,
    f"{_BLOCK}.attn_norm.weight": f"{_LAYER}.input_layernorm.weight",
    f"{_BLOCK}.mlp_norm.weight": f"{_LAYER}.pre_feedforward_layernorm.weight",
}
ATTENTION = {
    **{f"{_BLOCK}.attn.{n}.{{p}}": f"{_LAYER}.self_attn.{n}_proj.{{p}}" for n in "qkvo"},
    **{f"{_BLOCK}.attn.{n}_norm.weight": f"{_LAYER}.self_attn.{n}_norm.weight" for n in "qk"},
}
MLP = {f"{_BLOCK}.mlp.{n}.{{p}}": f"{_LAYER}.mlp.{n}_proj.{{p}}" for n in ("gate", "up", "down")}
LLAMA = ENDS | NORMS | ATTENTION | MLP

MIXTRAL = {
    **ENDS, **NORMS, **ATTENTION,
    f"{_BLOCK}.mlp.router.weight": f"{_LAYER}.block_sparse_moe.gate.weight",
    **{
        f"{_BLOCK}.mlp.experts.{n}.weight": f"{_LAYER}.block_sparse_moe.experts.{{e}}.{w}.weight"
        for n, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
}  # fmt: skip
QWEN_MOE = {
    **LLAMA,
    f"{_BLOCK}.mlp.router.weight": f"{_LAYER}.mlp.gate.weight",
    f"{_BLOCK}.mlp.shared_gate.weight": f"{_LAYER}.mlp.shared_expert_gate.weight",
    **{
        f"{_BLOCK}.mlp.{part}.{n}.weight": f"{_LAYER}.mlp.{there}.{n}_proj.weight"
        for n in ("gate", "up", "down")
        for part, there in (("experts", "experts.{e}"), ("shared", "shared_expert"))
    },
}
PHI3: Names = {
    **ENDS, **NORMS,
    **{f"{_BLOCK}.attn.{n}.weight": Fused(f"{_LAYER}.self_attn.qkv_proj.weight", "rows") for n in "qkv"},
    f"{_BLOCK}.attn.o.weight": f"{_LAYER}.self_attn.o_proj.weight",
    **{f"{_BLOCK}.mlp.{n}.weight": Fused(f"{_LAYER}.mlp.gate_up_proj.weight", "rows") for n in ("gate", "up")},
    f"{_BLOCK}.mlp.down.weight": f"{_LAYER}.mlp.down_proj.weight",
}  # fmt: skip
GPT2: Names = {
    "embed.weight": "transformer.wte.weight", "positions.weight": "transformer.wpe.weight",
    "norm.{p}": "transformer.ln_f.{p}", "head.weight": "lm_head.weight",
    f"{_BLOCK}.attn_norm.{{p}}": "transformer.h.{i}.ln_1.{p}",
    f"{_BLOCK}.mlp_norm.{{p}}": "transformer.h.{i}.ln_2.{p}",
    **{f"{_BLOCK}.attn.{n}.{{p}}": Fused("transformer.h.{i}.attn.c_attn.{p}", "columns") for n in "qkv"},
    f"{_BLOCK}.attn.o.{{p}}": Fused("transformer.h.{i}.attn.c_proj.{p}", "columns"),
    f"{_BLOCK}.mlp.up.{{p}}": Fused("transformer.h.{i}.mlp.c_fc.{p}", "columns"),
    f"{_BLOCK}.mlp.down.{{p}}": Fused("transformer.h.{i}.mlp.c_proj.{p}", "columns"),
}  # fmt: skip
_NEOX = "gpt_neox.layers.{i}"
NEOX: Names = {
    "embed.weight": "gpt_neox.embed_in.weight", "norm.{p}": "gpt_neox.final_layer_norm.{p}",
    "head.weight": "embed_out.weight",
    f"{_BLOCK}.attn_norm.{{p}}": f"{_NEOX}.input_layernorm.{{p}}",
    f"{_BLOCK}.mlp_norm.{{p}}": f"{_NEOX}.post_attention_layernorm.{{p}}",
    **{f"{_BLOCK}.attn.{n}.{{p}}": Fused(f"{_NEOX}.attention.query_key_value.{{p}}", "heads") for n in "qkv"},
    f"{_BLOCK}.attn.o.{{p}}": f"{_NEOX}.attention.dense.{{p}}",
    f"{_BLOCK}.mlp.up.{{p}}": f"{_NEOX}.mlp.dense_h_to_4h.{{p}}",
    f"{_BLOCK}.mlp.down.{{p}}": f"{_NEOX}.mlp.dense_4h_to_h.{{p}}",
}  # fmt: skip
DEEPSEEK: Names = {
    **ENDS, **NORMS, **MLP,
    f"{_BLOCK}.attn.q.weight": Fused(f"{_LAYER}.self_attn.q_proj.weight", "latent queries"),
    f"{_BLOCK}.attn.q_a.weight": f"{_LAYER}.self_attn.q_a_proj.weight",
    f"{_BLOCK}.attn.q_a_norm.weight": f"{_LAYER}.self_attn.q_a_layernorm.weight",
    f"{_BLOCK}.attn.q_b.weight": Fused(f"{_LAYER}.self_attn.q_b_proj.weight", "latent queries"),
    f"{_BLOCK}.attn.kv_a.weight": Fused(f"{_LAYER}.self_attn.kv_a_proj_with_mqa.weight", "latent keys"),
    f"{_BLOCK}.attn.kv_a_norm.weight": f"{_LAYER}.self_attn.kv_a_layernorm.weight",
    f"{_BLOCK}.attn.kv_b.weight": f"{_LAYER}.self_attn.kv_b_proj.weight",
    f"{_BLOCK}.attn.o.weight": f"{_LAYER}.self_attn.o_proj.weight",
    f"{_BLOCK}.mlp.router.weight": f"{_LAYER}.mlp.gate.weight",
    f"{_BLOCK}.mlp.bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
    **{
        f"{_BLOCK}.mlp.{part}.{n}.weight": f"{_LAYER}.mlp.{there}.{n}_proj.weight"
        for n in ("gate", "up", "down")
        for part, there in (("experts", "experts.{e}"), ("shared", "shared_experts"))
    },
}  # fmt: skip
_OSS_EXPERTS = f"{_LAYER}.mlp.experts"
GPT_OSS: Names = {
    **ENDS, **NORMS, **ATTENTION,
    f"{_BLOCK}.attn.sinks.weight": f"{_LAYER}.self_attn.sinks",
    f"{_BLOCK}.mlp.router.{{p}}": f"{_LAYER}.mlp.router.{{p}}",
    **{f"{_BLOCK}.mlp.experts.{n}.weight": Fused(f"{_OSS_EXPERTS}.gate_up_proj", "interleaved experts")
       for n in ("gate", "up")},
    **{f"{_BLOCK}.mlp.experts.{n}.bias": Fused(f"{_OSS_EXPERTS}.gate_up_proj_bias", "interleaved experts")
       for n in ("gate", "up")},
    f"{_BLOCK}.mlp.experts.down.weight": Fused(f"{_OSS_EXPERTS}.down_proj", "expert columns"),
    f"{_BLOCK}.mlp.experts.down.bias": f"{_OSS_EXPERTS}.down_proj_bias",
}  # fmt: skip

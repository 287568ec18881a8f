"""Megatron-LM's arguments of the model."""

from __future__ import annotations

from typing import Any

from weft.extensions.convert.settings import (
    Result,
    Rule,
    Settings,
    absent,
    as_number,
    choice,
    partly,
    switch,
    to,
    unneeded,
)

KERNELS = unneeded("Weft's own kernels, or torch's fastest")
OVERLAP = unneeded("Weft overlaps communication with computation")


def _kv_heads(value: Any, settings: Settings) -> Result:
    if not settings.is_on("group-query-attention"):
        return Result(note="--group-query-attention is off", status="not needed")
    return to("model.kv_heads")(value, settings)


def _moe_balance(value: Any, settings: Settings) -> Result:
    kind = value[0] if isinstance(value, list) else value
    return choice({"aux_loss": {"model.experts.balance": "aux", "model.experts.aux_scope": "batch"},
                   "seq_aux_loss": {"model.experts.balance": "aux", "model.experts.aux_scope": "sequence"},
                   "none": {"model.experts.balance": "none"},
                   "sinkhorn": "Weft balances by an auxiliary loss or a bias"})(kind, settings)  # fmt: skip


def _shared_width(value: Any, settings: Settings) -> Result:
    return Result({"model.experts.shared": 1, "model.experts.shared_ffn": as_number(value)})


def _untied(value: Any, settings: Settings) -> Result:
    return Result({"model.tied": False})


MODEL_RULES: dict[str, Rule] = {
    "num-layers": to("model.layers"),
    "hidden-size": to("model.dim"),
    "ffn-hidden-size": to("model.ffn"),
    "num-attention-heads": to("model.heads"),
    "kv-channels": to("model.head_dim"),
    "num-query-groups": _kv_heads,
    "group-query-attention": unneeded("--num-query-groups gives model.kv_heads"),
    "seq-length": to("data.seq_len"),
    "max-position-embeddings": to("model.max_len"),
    "position-embedding-type": choice(
        {
            "rope": {"model.positions": "rope"},
            "learned_absolute": {"model.positions": "learned"},
            "none": "Weft has learned and rotary positions",
            "yarn": {"model.positions": "rope", "model.rope_scaling.kind": "yarn"},
        }
    ),
    "use-rotary-position-embeddings": switch({"model.positions": "rope"}),
    "rotary-base": to("model.rope_theta"),
    "rotary-scaling-factor": lambda value, s: Result(
        {
            "model.rope_scaling.kind": "yarn",
            "model.rope_scaling.factor": as_number(value),
            "model.rope_scaling.original_len": int(s.number("original-max-position-embeddings", default=4096)),
        },
        "yarn, as latent attention has it",
    ),
    "original-max-position-embeddings": unneeded("part of model.rope_scaling"),
    "mscale": absent("set model.rope_scaling.attention_factor"),
    "mscale-all-dim": absent("set model.attention_scale"),
    "softmax-type": choice({"vanilla": {}, "learnable": {"model.sinks": True}, "off-by-one": "set model.sinks"}),
    "openai-gelu": switch({"model.activation": "gelu"}),
    "no-query-key-layer-scaling": unneeded("scores are computed in fp32"),
    "rotary-percent": partly(
        lambda value, s: Result(
            {
                "model.rope_dim": int(
                    (as_number(value) or 1)
                    * s.number(
                        "kv-channels", default=s.number("hidden-size") // max(1, s.number("num-attention-heads"))
                    )
                )
            }
        ),
        "the rotated part of a head",
    ),
    "rotary-seq-len-interpolation-factor": lambda value, s: Result(
        {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": as_number(value)}
    ),
    "use-rope-scaling": switch({"model.rope_scaling.kind": "llama3"}),
    "rope-scaling-factor": to("model.rope_scaling.factor"),
    "no-position-embedding": switch({"model.positions": "rope"}, note="rotary positions"),
    "normalization": choice({"rmsnorm": {"model.norm": "rmsnorm"}, "layernorm": {"model.norm": "layernorm"}}),
    "norm-epsilon": to("model.norm_eps"),
    "layernorm-epsilon": to("model.norm_eps"),
    "apply-layernorm-1p": absent("model.norm: rmsnorm_offset is the counterpart for RMSNorm"),
    "swiglu": switch({"model.activation": "swiglu"}),
    "squared-relu": absent("Weft has gelu, swiglu and geglu"),
    "disable-bias-linear": switch({"model.bias": False}),
    "add-qkv-bias": switch({"model.qkv_bias": True}),
    "qk-layernorm": switch({"model.qk_norm": True}),
    "untie-embeddings-and-output-weights": _untied,
    "multi-latent-attention": absent("set model.latent"),
    "q-lora-rank": to("model.latent.q_rank"),
    "kv-lora-rank": to("model.latent.kv_rank"),
    "v-head-dim": to("model.latent.v_dim"),
    "qk-head-dim": absent("model.head_dim is qk-head-dim + qk-pos-emb-head-dim"),
    "qk-pos-emb-head-dim": to("model.rope_dim"),
    "window-size": absent("set model.window"),
    "vocab-size": to("model.vocab"),
    "padded-vocab-size": to("model.vocab"),
    "make-vocab-size-divisible-by": unneeded("tp splits any vocabulary"),
    "attention-dropout": partly(to("model.dropout"), "one dropout probability for attention and residuals"),
    "hidden-dropout": to("model.dropout"),
    "init-method-std": absent("weights are initialised by the model family"),
    "attention-softmax-in-fp32": unneeded("the softmax of attention is fp32"),
    "moe-grouped-gemm": KERNELS,
    "moe-permute-fusion": KERNELS,
    "spec": absent("the model's fields say what it is"),
    "moe-shared-expert-overlap": OVERLAP,
    "num-experts": to("model.experts.count"),
    "moe-router-topk": to("model.experts.top_k"),
    "moe-ffn-hidden-size": to("model.experts.ffn"),
    "moe-router-load-balancing-type": _moe_balance,
    "moe-aux-loss-coeff": to("model.experts.aux_weight"),
    "moe-z-loss-coeff": to("model.experts.z_weight"),
    "moe-shared-expert-intermediate-size": _shared_width,
    "moe-router-score-function": choice(
        {"softmax": {"model.experts.router": "softmax"}, "sigmoid": {"model.experts.router": "sigmoid"}}
    ),
    "moe-router-enable-expert-bias": switch({"model.experts.balance": "bias"}),
    "moe-router-bias-update-rate": to("model.experts.bias_rate"),
    "moe-router-num-groups": to("model.experts.groups"),
    "moe-router-group-topk": to("model.experts.top_groups"),
    "moe-router-topk-scaling-factor": to("model.experts.scale"),
    "moe-expert-capacity-factor": to("model.experts.capacity"),
    "moe-token-dispatcher-type": unneeded("tokens are exchanged by all-to-all (parallel.ep_exchange)"),
    "moe-layer-freq": absent("model.experts.first_dense sets dense blocks at the start"),
    "moe-router-pre-softmax": absent("the softmax is over all experts; see model.experts.renormalize"),
    "moe-router-dtype": unneeded("the router computes in fp32"),
    "moe-*": absent("no such setting of experts in Weft"),
}

"""Keys of configs and names of tensors of encoders (BERT) and encoder-decoders (T5)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.extensions.pretrained.config_fields import Choice, Config, Fields, Fixed, Key, Only, SizeKey, Without
from weft.extensions.pretrained.family_entry import PretrainedFamily
from weft.extensions.pretrained.family_parts import PLAIN, SIZES, Names
from weft.job.schema import Model


@dataclass(frozen=True)
class Labels:
    """The number of labels, which a config lists by name."""

    name: str = "classes"
    """Field of the model that has it."""

    def read(self, config: Config) -> Fields:
        kind = config.take("problem_type")
        if kind not in (None, "single_label_classification"):
            raise config.wrong("problem_type", kind, "single_label_classification")
        names, number = config.take("id2label"), config.take("num_labels", 2)
        found = len(names) if isinstance(names, dict) else number
        if type(found) is not int or found < 2:
            raise config.wrong("num_labels", found, "two labels or more, which are no regression")
        return {self.name: found}

    def write(self, model: Model) -> Fields:
        names = [f"LABEL_{i}" for i in range(model.outputs)]
        return {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
        }


_BLOCK, _LAYER = "blocks.{i}", "bert.encoder.layer.{i}"
BERT: Names = {
    "embed.weight": "bert.embeddings.word_embeddings.weight",
    "positions.weight": "bert.embeddings.position_embeddings.weight",
    "types.weight": "bert.embeddings.token_type_embeddings.weight",
    "embed_norm.{p}": "bert.embeddings.LayerNorm.{p}",
    f"{_BLOCK}.attn.q.{{p}}": f"{_LAYER}.attention.self.query.{{p}}",
    f"{_BLOCK}.attn.k.{{p}}": f"{_LAYER}.attention.self.key.{{p}}",
    f"{_BLOCK}.attn.v.{{p}}": f"{_LAYER}.attention.self.value.{{p}}",
    f"{_BLOCK}.attn.o.{{p}}": f"{_LAYER}.attention.output.dense.{{p}}",
    f"{_BLOCK}.attn_sum_norm.{{p}}": f"{_LAYER}.attention.output.LayerNorm.{{p}}",
    f"{_BLOCK}.mlp.up.{{p}}": f"{_LAYER}.intermediate.dense.{{p}}",
    f"{_BLOCK}.mlp.down.{{p}}": f"{_LAYER}.output.dense.{{p}}",
    f"{_BLOCK}.mlp_sum_norm.{{p}}": f"{_LAYER}.output.LayerNorm.{{p}}",
}
_MASKED_HEAD: Names = {
    "transform.{p}": "cls.predictions.transform.dense.{p}",
    "norm.{p}": "cls.predictions.transform.LayerNorm.{p}",
    "head.weight": "cls.predictions.decoder.weight",
    "head.bias": "cls.predictions.{untied}bias",
}
_LABEL_HEAD: Names = {"head.pooler.{p}": "bert.pooler.dense.{p}", "head.{p}": "classifier.{p}"}
_KEYS = (
    *SIZES, Key("token_types", "type_vocab_size"), Key("norm_eps", "layer_norm_eps"),
    Choice("activation", "hidden_act", PLAIN),
    Only("position_embedding_type", ("absolute", None)), Only("is_decoder", (False,)),
    Only("add_cross_attention", (False,)),
    Without((
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    )),
)  # fmt: skip
_OLDER = {".gamma": ".weight", ".beta": ".bias"}
_POSITIONS = "*embeddings.position_ids"


@dataclass(frozen=True)
class T5Layers:
    """Blocks of the encoder, and of both together."""

    def read(self, config: Config) -> Fields:
        encoder = config.number("num_layers")
        decoder = encoder if config.take("num_decoder_layers") is None else config.number("num_decoder_layers")
        return {"encoder_layers": encoder, "layers": encoder + decoder}

    def write(self, model: Model) -> Fields:
        encoder = model.encoder_layers or 0
        return {"num_layers": encoder, "num_decoder_layers": (model.layers or 0) - encoder}


_T5_ACTIVATIONS = {
    "relu": ("relu", "relu"), "gated-gelu": ("geglu", "gelu_new"), "gated-silu": ("swiglu", "silu"),
    "gelu_new": ("gelu", "gelu_new"), "gelu": ("gelu_exact", "gelu"),
}  # fmt: skip
"""By feed_forward_proj, model.activation and dense_act_fn."""


@dataclass(frozen=True)
class T5Activation:
    """feed_forward_proj, which dense_act_fn and is_gated_act repeat."""

    def read(self, config: Config) -> Fields:
        kind = config.take("feed_forward_proj")
        if not isinstance(kind, str) or kind not in _T5_ACTIVATIONS:
            raise config.wrong("feed_forward_proj", kind, " or ".join(_T5_ACTIVATIONS))
        activation, function = _T5_ACTIVATIONS[kind]
        Only("dense_act_fn", (function,)).read(config)
        Only("is_gated_act", (kind.startswith("gated"),)).read(config)
        return {"activation": activation}

    def write(self, model: Model) -> Fields:
        return {"feed_forward_proj": next((k for k, (a, _) in _T5_ACTIVATIONS.items() if a == model.activation), None)}


@dataclass(frozen=True)
class T5Head:
    """Whether the head is tied and its input scaled. Older configs have one key for both."""

    def read(self, config: Config) -> Fields:
        tied = config.take("tie_word_embeddings", True) is not False
        scaled = config.take("scale_decoder_outputs", tied)
        return {"tied": tied, "head_scale": config.number("d_model") ** -0.5 if scaled else 1.0}

    def write(self, model: Model) -> Fields:
        return {"tie_word_embeddings": bool(model.tied), "scale_decoder_outputs": model.head_scale != 1.0}


def _t5_block(kind: str, last: int) -> Names:
    """Names of a block whose feed-forward layer is the last of its layers."""
    block, there = f"blocks.{kind}{{i}}", f"{kind}.block.{{i}}.layer"
    dense = f"{there}.{last}.DenseReluDense"
    return {
        **{f"{block}.attn.{n}.weight": f"{there}.0.SelfAttention.{n}.weight" for n in "qkvo"},
        f"{block}.attn_norm.weight": f"{there}.0.layer_norm.weight",
        f"{block}.mlp.gate.weight": f"{dense}.wi_0.weight",
        f"{block}.mlp.up.weight": f"{dense}.wi{{gated}}.weight",
        f"{block}.mlp.down.weight": f"{dense}.wo.weight",
        f"{block}.mlp_norm.weight": f"{there}.{last}.layer_norm.weight",
    }


_CROSS = "decoder.block.{i}.layer.1"
T5: Names = {
    "embed.weight": "shared.weight",
    **{
        f"{kind}_bias.weight": f"{kind}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for kind in ("encoder", "decoder")
    },
    **_t5_block("encoder", 1), **_t5_block("decoder", 2),
    **{f"blocks.decoder{{i}}.cross.{n}.weight": f"{_CROSS}.EncDecAttention.{n}.weight" for n in "qkvo"},
    "blocks.decoder{i}.cross_norm.weight": f"{_CROSS}.layer_norm.weight",
    "encoder_norm.weight": "encoder.final_layer_norm.weight", "norm.weight": "decoder.final_layer_norm.weight",
    "head.weight": "lm_head.weight",
}  # fmt: skip
_T5_KEYS = (
    SizeKey("dim", "d_model"), SizeKey("head_dim", "d_kv"), SizeKey("ffn", "d_ff"),
    SizeKey("heads", "num_heads"), SizeKey("vocab", "vocab_size"), T5Layers(), T5Activation(), T5Head(),
    SizeKey("position_buckets", "relative_attention_num_buckets"),
    SizeKey("position_limit", "relative_attention_max_distance"), Key("norm_eps", "layer_norm_epsilon"),
    Only("decoder_start_token_id", (0, None)), Only("pad_token_id", (0, None)), Only("is_decoder", (False,)),
    Only("is_encoder_decoder", (True,)), Without(("n_positions", "output_past")),
)  # fmt: skip

ENCODER_FAMILIES = (
    PretrainedFamily(
        "bert", "BERT", "BertForMaskedLM", "bert",
        (*_KEYS, Key("tied", "tie_word_embeddings", True)),
        BERT | _MASKED_HEAD, "bert.",
        (_POSITIONS, "bert.pooler.*", "pooler.*", "cls.seq_relationship.*", "cls.predictions*.bias"),
        repeats={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        also_reads=("BertModel", "BertForPreTraining"), fresh=("transform.*", "norm.*", "head.*"),
        older_endings=_OLDER,
    ),
    PretrainedFamily(
        "bert-classes", "BERT with labels", "BertForSequenceClassification", "bert",
        (*_KEYS, Labels(), Fixed({"tied": False}), Without(("tie_word_embeddings",))),
        BERT | _LABEL_HEAD, "bert.", (_POSITIONS, "cls.*"), model_type="bert",
        also_reads=("BertModel", "BertForMaskedLM", "BertForPreTraining"), fresh=("head.*",), older_endings=_OLDER,
        labels=True,
    ),
    PretrainedFamily(
        "t5", "T5, T5 v1.1 and Flan-T5", "T5ForConditionalGeneration", "t5", _T5_KEYS, T5, "",
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
         "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        always_tied=True,
        repeats={f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")},
    ),
)  # fmt: skip

"""Keys of configs and names of tensors of encoders (BERT)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.schema import Model
from weft.pretrained.config_fields import Choice, Config, Fields, Fixed, Key, Only, Without
from weft.pretrained.family_parts import PLAIN, SIZES, Names
from weft.pretrained.registry import PretrainedFamily


@dataclass(frozen=True)
class Labels:
    """The number of labels, which a config lists by name."""

    def read(self, config: Config) -> Fields:
        kind = config.take("problem_type")
        if kind not in (None, "single_label_classification"):
            raise config.wrong("problem_type", kind, "single_label_classification")
        names, number = config.take("id2label"), config.take("num_labels", 2)
        found = len(names) if isinstance(names, dict) else number
        if type(found) is not int or found < 2:
            raise config.wrong("num_labels", found, "two labels or more, which are no regression")
        return {"classes": found}

    def write(self, model: Model) -> Fields:
        names = [f"LABEL_{i}" for i in range(model.classes or 2)]
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
    "head.bias": "cls.predictions.bias",
}
_LABEL_HEAD: Names = {"head.pooler.{p}": "bert.pooler.dense.{p}", "head.{p}": "classifier.{p}"}
_KEYS = (
    *SIZES, Key("token_types", "type_vocab_size", 2), Key("norm_eps", "layer_norm_eps", 1e-12),
    Choice("activation", "hidden_act", {"gelu": "gelu_exact", **PLAIN, "relu": "relu"}, "gelu"),
    Only("position_embedding_type", ("absolute",)), Only("is_decoder", (False,)), Only("add_cross_attention", (False,)),
    Without((
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    )),
)  # fmt: skip
_OLDER = {".gamma": ".weight", ".beta": ".bias"}
_POSITIONS = "*embeddings.position_ids"

ENCODER_FAMILIES = (
    PretrainedFamily(
        "bert", "BERT", "BertForMaskedLM", "bert", (*_KEYS, Key("tied", "tie_word_embeddings", True)),
        BERT | _MASKED_HEAD, "bert.",
        (_POSITIONS, "bert.pooler.*", "pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.bias"),
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
)  # fmt: skip

"""`model`: the model to train, and the registry of model families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from weft.job.interchange import IMPLEMENTATIONS
from weft.job.model_parts.attention_settings import Latent, RopeScaling
from weft.job.model_parts.expert_settings import Experts
from weft.job.model_parts.lora_settings import Lora
from weft.job.model_parts.loss_settings import NamedLoss, check_loss
from weft.job.model_parts.table_settings import EmbeddingTable, TableOptim
from weft.job.model_parts.tower_settings import TowerName, TowerShape
from weft.job.registry import NameIn, Registry
from weft.job.section import Section

Pixels = Annotated[int, Field(ge=1, le=65_536)]


@dataclass(frozen=True)
class Structure:
    """What the models of several families have in common: samples, targets, and what is done with a trained one.
    Functions are named as `module:function`."""

    name: str
    help: str
    sample: Literal["tokens", "patches", "vectors", "any"] = "any"
    """What a sample's inputs are: tokens or image patches of a sequence, a vector, or what a module takes."""
    target: Literal["next token", "hidden token", "text", "label", "vector", "any"] = "any"
    """What is predicted: for each token the next one, tokens that are hidden in the inputs, a text that belongs to the
    inputs, a label a sample, a vector, or what a module's loss takes."""
    needs: tuple[str, ...] = ("dim", "layers", "heads")
    """Fields of `model` that a job or a shape must give."""
    dataset: str = ""
    """From (job, dataset of texts) to the dataset that it trains on."""
    generate: str = ""
    """What `weft generate` does, from (checkpoint, job, prompts, tokens, sampling, ema, beams) to parts of texts."""


STRUCTURES: Registry[Structure] = Registry("model structure", "weft.models.families")


@dataclass(frozen=True)
class Family:
    """A model family: its structure, the defaults of its fields and what builds it."""

    name: str
    help: str
    build: str
    """`module:function` that takes the resolved Model section and returns an nn.Module, called on the meta device."""
    structure: str
    """The name of its structure."""
    defaults: Mapping[str, Any]
    """Fields of `model` that neither the job nor a shape gives."""
    weights: Callable[[Model, bool, int, int, bool, bool], Iterable[Any]] | None = None
    """Its table of weights, where they are not those of its structure (planner/model/weight_table.py)."""

    args: str | None = None
    """Of a module: `module:function` that takes the sections model and data and returns the constructor's arguments."""
    fields: tuple[str, ...] | None = None
    """Fields of `model` that it uses, besides those of all modules; None where FIELD_USES tells (job/field_uses.py)."""
    config: str = ""
    """`module:function` from model.args to fields of `model`, for a family that model.args describe."""
    rule: str = ""
    """`module:function` from (job, plan) to why it cannot be trained so, in one sentence, or None."""
    axes: str = ""
    """`module:function` from a job to the axes among tp, pp and cp that can split its model; without it, all."""
    in_parts: bool = True
    """Whether its blocks can be computed in parts of a sequence."""
    has_tables: bool = False
    """Whether it has embedding tables (model.tables)."""
    has_towers: bool = False
    """Whether it has several encoders (model.towers)."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Fields that a job or a shape must give."""
        parts = ("tables",) if self.has_tables else ("towers",) if self.has_towers else ("layers",)
        needs = STRUCTURES[self.structure].needs
        return needs if needs else parts


FAMILIES: Registry[Family] = Registry("model.family", "weft.models.families")


def expand_model(text: str) -> dict[str, Any]:
    """The fields of a model's short form: hf:PATH, package.module:Class or the name of a shape."""
    if text.startswith("hf:"):
        return {"pretrained": text.removeprefix("hf:")}
    return {"module": text} if ":" in text else {"shape": text}


class Model(Section):
    """The model. A shape or a family sets the defaults; fields given here override them."""

    shape: str | None = None
    """A predefined shape, such as tiny, gpt2-125m, llama-1b, llama-8b or llama-405b."""
    pretrained: str | None = None
    """A Hugging Face checkpoint: a folder, or a name in the local hub cache; `model: hf:PATH` is short for it. Its
    config sets the fields of the model, and training starts from its weights."""
    implementation: str = "auto"
    """What computes the model of a checkpoint: weft (a family of Weft's own), transformers (the class of the installed
    transformers), or auto: Weft's where it has one."""
    module: str | None = None
    """Your own nn.Module, as package.module:Class; `model: package.module:Class` is short for it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own module's constructor, or the fields of the dataclass that it takes; for
    family=transformers, the fields of a config of transformers."""
    loss: str | dict[str, NamedLoss] = "auto"
    """Loss of your own module: auto (cross-entropy for integer targets, otherwise squared error; the module's own where
    samples have no targets), model (the module's own), cross_entropy, nll, bce, mse, l1, smooth_l1, a
    package.module:function that takes (outputs, targets) and returns one loss per target, contrastive (of the vectors
    of two towers, over the samples of all replicas), or several losses by name, such as {label: cross_entropy, box:
    {function: l1, weight: 0.5}}."""
    frozen: tuple[str, ...] = ()
    """Weights of your own module that are not trained, by name or pattern, such as image or text.blocks.*: they have no
    gradients and no optimizer states."""
    batch_norm: Literal["all", "rank"] = "all"
    """Statistics of batch norms in training: over the samples of all replicas, as one process would compute them, or of
    each rank's own samples."""
    family: Annotated[str, NameIn(FAMILIES)] | None = None
    """gpt2 and llama (decoder-only), bert (encoder-only), t5 (encoder-decoder), vit (an encoder of image patches),
    resnet (convolutions), clip (an image and a text encoder), dlrm and two_tower (recommenders), mlp (the deep MLP of
    the lessons), transformers (any class of the installed transformers)."""
    dim: int | None = Field(None, ge=1, le=2**20)
    """Width of the residual stream; for clip, of the vectors that are compared."""
    layers: int | None = Field(None, ge=1, le=10_000)
    """Number of blocks, for t5 of encoder and decoder together; for mlp, of square layers."""
    encoder_layers: int | None = Field(None, ge=1, le=10_000)
    """Blocks of the encoder (t5); the others are the decoder's. Default: half of layers."""
    patch: int | None = Field(None, ge=1, le=4096)
    """Side of an image patch in pixels (vit). Default: 4."""
    image: tuple[Pixels, Pixels] | None = None
    """Height and width of an image in pixels (vit); what is left of them after the last whole patch is cut off.
    Default: any that patches divide."""
    class_token: bool | None = None
    """Put a learned token before the patches of an image and classify by it, not by their mean (vit); data.seq_len
    counts it. Default: false, or as a checkpoint has it."""
    channels: int | None = Field(None, ge=1, le=4096)
    """Colours of an image (vit, resnet). Default: 3."""
    heads: int | None = Field(None, ge=1, le=65_536)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1, le=65_536)
    """Key and value heads; fewer than heads is grouped-query attention. Default: heads."""
    head_dim: int | None = Field(None, ge=1, le=65_536)
    """Width of one head. Default: dim / heads."""
    ffn: int | None = Field(None, ge=1, le=2**24)
    """Hidden width of the feed-forward layer. Default: 4 × dim (gpt2), 8/3 × dim rounded up to a multiple of 64
    (llama)."""
    vocab: int | None = Field(None, ge=1, le=2**27)
    """Vocabulary size; for vit and resnet, the number of classes. Default: the tokenizer's, for bert one more if it has
    no mask token; of images in a folder for each class, the number of these."""
    classes: int | None = Field(None, ge=2, le=2**27)
    """Labels of sequence classification (bert; none trains a masked language model), or new labels of a published vit
    instead of its own."""
    token_types: int | None = Field(None, ge=1, le=2**20)
    """Kinds of tokens with a learned embedding each, such as first and second sentence (bert)."""
    max_len: int | None = Field(None, ge=1, le=2**31)
    """Longest sequence of a model with learned positions. Default: data.seq_len."""
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_offset"] | None = None
    """Normalisation; the weights of rmsnorm_offset are differences from 1."""
    norm_at: Literal["input", "output", "both", "residual"] | None = None
    """Normalise the inputs of attention and feed-forward, their outputs, both, or the residual stream after each
    (post-norm). Default: input."""
    norm_eps: float | None = Field(None, gt=0)
    """Epsilon added to the variance in the norm."""
    positions: Literal["learned", "rope", "relative"] | None = None
    """Position encoding: a learned embedding, rotary (rope), or learned scores of distances (relative, of t5)."""
    position_buckets: int | None = Field(None, ge=4, le=2**20)
    """Ranges of distances that have a learned score each (t5). Default: 32."""
    position_limit: int | None = Field(None, ge=2, le=2**31)
    """Distance from which on all have the same score (t5). Default: 128."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary positions for longer sequences."""
    rope_dim: int | None = Field(None, ge=2, le=65_536)
    """Width of the rotated part of a head. Default: head_dim."""
    window: int | None = Field(None, ge=1, le=2**31)
    """Sliding window: a token attends to this many tokens, itself included. Default: to all."""
    window_layers: tuple[int, ...] | None = None
    """Blocks with the sliding window. Default: all."""
    window_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies in blocks with the sliding window, where it differs; they are not scaled."""
    latent: Latent | None = None
    """Multi-head latent attention instead of grouped queries."""
    attention_scale: float | None = Field(None, gt=0)
    """Scale of the attention scores. Default: 1 / √head_dim."""
    embedding_scale: float | None = Field(None, gt=0)
    """Factor on the token embedding. Default: 1."""
    activation: (
        Literal["gelu", "gelu_exact", "quick_gelu", "relu", "silu", "swiglu", "geglu", "swiglu_clamped"] | None
    ) = None
    """Activation of the feed-forward layer: gelu (tanh approximation), gelu_exact, quick_gelu (x · sigmoid(1.702 x)),
    relu, silu, or a product of two linear layers of which one goes through SiLU (swiglu) or GELU (geglu).
    swiglu_clamped limits both and adds 1 to the other."""
    swiglu_limit: float | None = Field(None, gt=0)
    """Largest value of the gate, and of the size of the other layer's values (swiglu_clamped). Default: 7."""
    swiglu_alpha: float | None = Field(None, gt=0)
    """Factor on the gate inside the sigmoid (swiglu_clamped). Default: 1.702."""
    head_scale: float | None = Field(None, gt=0)
    """Factor on the input of the head (t5). Default: 1 / √dim if the head is tied, else 1."""
    parallel_residual: bool | None = None
    """Compute attention and feed-forward from the same input, and add both to it."""
    tied: bool | None = None
    """Tie the token embedding and the output head."""
    bias: bool | None = None
    """Use biases in linear layers and layer norms."""
    qkv_bias: bool | None = None
    """Use biases in the layers of queries, keys and values. Default: as bias."""
    out_bias: bool | None = None
    """Use a bias in the output layer of attention. Default: as bias."""
    mlp_bias: bool | None = None
    """Use biases in feed-forward layers. Default: as bias."""
    qk_norm: bool | Literal["all"] | None = None
    """Normalise queries and keys before attention: those of each head (true), or of all heads together (all)."""
    sinks: bool | None = None
    """Give each head a learned score that takes part in the softmax of its attention and has no value (gpt-oss)."""
    causal: bool | None = None
    """Causal attention: a token attends only to itself and earlier tokens."""
    experts: Experts | None = None
    """Mixture of experts instead of a dense feed-forward layer (gpt2 and llama)."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout probability after the embedding, attention and feed-forward layers; the masks are the same in every
    layout."""
    tables: tuple[EmbeddingTable, ...] = ()
    """Embedding tables of a recommender (dlrm, two_tower)."""
    table_optim: TableOptim = TableOptim()
    """The optimizer of the tables."""
    dense_features: int = Field(0, ge=0, le=65_536)
    """Numbers in `dense` of a sample (dlrm, two_tower)."""
    bottom: tuple[int, ...] = ()
    """Widths of the hidden layers below the interaction (dlrm: of dense features; two_tower: of each tower)."""
    top: tuple[int, ...] = ()
    """Widths of the hidden layers above the interaction (dlrm)."""
    towers: dict[TowerName, TowerShape] = Field(default_factory=dict)
    """Encoders of a model with several (clip), such as {image: {dim: 768, layers: 12, heads: 12, patch: 32}, text:
    {dim: 512, layers: 12, heads: 8}}."""
    lora: Lora | None = None
    """Train low-rank adapters of the linear layers, and freeze the model's own weights."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return expand_model(value) if isinstance(value, str) else value

    @field_validator("implementation")
    @classmethod
    def _known_implementation(cls, value: str) -> str:
        return value if value == "auto" else IMPLEMENTATIONS.check(value)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str | dict[str, NamedLoss]) -> str | dict[str, NamedLoss]:
        if not value:
            raise ValueError("must name at least one loss")
        return check_loss(value) if isinstance(value, str) else value

    @field_validator("tables")
    @classmethod
    def _distinct_tables(cls, value: tuple[EmbeddingTable, ...]) -> tuple[EmbeddingTable, ...]:
        for names in ([t.name for t in value], [key for t in value for key in t.keys]):
            if twice := [n for i, n in enumerate(names) if n in names[:i]]:
                raise ValueError(f"must not name {twice[0]!r} twice")
        if any(key == "dense" for t in value for key in t.keys):
            raise ValueError("must not name a feature dense, which holds the dense features")
        return value

    @property
    def patch_dim(self) -> int:
        """Values in one image patch."""
        return (self.patch or 4) ** 2 * (self.channels or 3)

    @property
    def structure(self) -> Structure | None:
        """The structure of its family; None before the model is resolved."""
        return None if self.family is None else STRUCTURES[FAMILIES[self.family].structure]

    def _predicts(self, target: str) -> bool:
        return self.structure is not None and self.structure.target == target

    def _takes(self, sample: str) -> bool:
        return self.structure is not None and self.structure.sample == sample

    def sample_positions(self, seq_len: int) -> int:
        """Positions of a sample: its sequence length, or 1 for a vector."""
        return 1 if self.takes_vectors else seq_len

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer is a product of two linear layers."""
        return self.activation in ("swiglu", "geglu", "swiglu_clamped")

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether the layers of queries, keys and values, the output of attention, and the feed-forward layers have
        biases."""
        qkv, out, mlp = (bool(self.bias if b is None else b) for b in (self.qkv_bias, self.out_bias, self.mlp_bias))
        return qkv, out, mlp

    def has_window(self, index: int) -> bool:
        """Whether a block has the sliding window."""
        return self.window is not None and (self.window_layers is None or index in self.window_layers)

    @property
    def continues_text(self) -> bool:
        """Whether it predicts the next token of a text."""
        return self._predicts("next token")

    @property
    def hides_tokens(self) -> bool:
        """Whether it predicts hidden tokens from both sides, or a label from all tokens."""
        return self._predicts("hidden token")

    @property
    def takes_tokens(self) -> bool:
        """Whether a sample is a sequence of tokens."""
        return self._takes("tokens")

    @property
    def ends_with_product(self) -> bool:
        """Whether nothing but the residual sum follows the last product of a block, so that recompute stops before."""
        return not self.dropout and self.norm_at in (None, "input")

    @property
    def runs_in_parts(self) -> bool:
        """Whether its blocks can be computed in parts: Weft's own, of one sequence and without experts."""
        sequence = (self.takes_tokens or self.takes_patches) and not self.has_source
        in_parts = self.family is None or FAMILIES[self.family].in_parts
        return sequence and in_parts and self.module is None and self.experts is None

    @property
    def has_source(self) -> bool:
        """Whether an encoder reads a source text, and a decoder predicts the target text."""
        return self._predicts("text")

    @property
    def first_blocks(self) -> int | None:
        """Blocks at the beginning that are another kind than the rest: dense ones before those with experts, or those
        of an encoder. None if all are alike."""
        if self.experts is not None:
            return min(self.experts.first_dense, self.layers or 0)
        return self.encoder_layers if self.has_source else None

    @property
    def takes_patches(self) -> bool:
        """Whether a sample is the patches of an image, with one label."""
        return self._takes("patches")

    @property
    def labels_samples(self) -> bool:
        """Whether it gives one label a sample, not one a token."""
        return self.takes_patches or self.classes is not None

    @property
    def has_head_bias(self) -> bool:
        """Whether the head has a bias."""
        return self.hides_tokens or bool(self.class_token)

    @property
    def outputs(self) -> int:
        """Logits of one target: the labels, or the vocabulary."""
        return self.classes or self.vocab or 0

    @property
    def takes_vectors(self) -> bool:
        """Whether a sample is one vector."""
        return self._takes("vectors")

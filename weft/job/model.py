"""`model`: what is trained, and what is registered for each model family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weft.job.registry import NameIn, Registry
from weft.job.section import Section

Structure = Literal["decoder", "classifier", "stack"]


@dataclass(frozen=True)
class Family:
    """A model family: its structure, the defaults of its fields and what builds it."""

    name: str
    help: str
    build: str
    """`module:function` that takes the resolved Model section and returns an nn.Module, called on the meta device."""
    structure: Structure
    """decoder: tokens, blocks of attention and feed-forward, logits for each token. classifier: image patches, the same
    blocks, one label a sample. stack: vectors and square linear layers. The planner counts, splits and prices by it."""
    defaults: Mapping[str, Any]
    """Fields of `model` that neither the job nor a shape gives."""
    weights: Callable[[Model, bool, int, int, bool, bool], Iterable[Any]] | None = None
    """Its table of weights, where they are not those of its structure (planner/model/weight_table.py)."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Fields that a job or a shape must give."""
        return ("dim", "layers") if self.structure == "stack" else ("dim", "layers", "heads")


FAMILIES: Registry[Family] = Registry("model.family", "weft.models.families")


class RopeScaling(Section):
    """How rotary positions are stretched beyond the length a model was trained on."""

    kind: Literal["linear", "ntk", "llama3"] = "llama3"
    """linear divides positions; ntk raises the base; llama3 stretches only the slow frequencies."""
    factor: float = Field(8.0, ge=1)
    """How many times longer the sequences become."""
    original_len: int = Field(8192, ge=1)
    """The length the model was first trained on (llama3)."""
    low_freq: float = Field(1.0, gt=0)
    """Wavelengths longer than original_len / low_freq are stretched in full (llama3)."""
    high_freq: float = Field(4.0, gt=0)
    """Wavelengths shorter than original_len / high_freq are left alone (llama3)."""


class Experts(Section):
    """Feed-forward parts of which each token uses a few. Neither they nor the router have biases."""

    count: int = Field(8, ge=1)
    """Routed experts in each block."""
    top_k: int = Field(2, ge=1)
    """Experts that a token is sent to."""
    ffn: int | None = Field(None, ge=1)
    """Hidden width of one expert. Left out: model.ffn."""
    shared: int = Field(0, ge=0)
    """Experts of the same width that every token uses; they are kept as one part of that many times the width."""
    first_dense: int = Field(0, ge=0)
    """Blocks at the start that keep the plain feed-forward part of width model.ffn."""
    groups: int = Field(1, ge=1)
    """Groups of experts; a token goes to experts of few groups, and so of few nodes."""
    top_groups: int | None = Field(None, ge=1)
    """Groups that a token may use. Left out: all."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's scores into weights."""
    renormalize: bool | None = None
    """Divide the weights of a token's experts by their sum. Left out: with top_k of more than one; the weight of a
    single expert over itself is always 1, and its router would learn nothing from the loss."""
    scale: float = Field(1.0, gt=0)
    """What the routed experts' sum is multiplied by."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """How load is kept even: an auxiliary loss, a bias that learns from the load, or not at all."""
    aux_weight: float | None = Field(None, ge=0)
    """Weight of the auxiliary loss. Left out: 0.01 with balance aux, else 0."""
    aux_scope: Literal["sequence", "batch"] = "sequence"
    """Whose load the auxiliary loss evens out: each sequence's own, or that of the whole batch of the step before."""
    z_weight: float = Field(0.0, ge=0)
    """Weight of the router z-loss, the square of the scores' log-sum-exp; 0.001 is usual."""
    bias_rate: float = Field(0.001, gt=0)
    """What the bias of an expert moves by in a step (balance bias)."""
    capacity: float | None = Field(None, gt=0)
    """Tokens of a sequence that an expert takes, as a multiple of an even share; later ones are dropped, in training
    alone. Left out: none is dropped."""

    @model_validator(mode="after")
    def _few(self) -> Experts:
        if {"count", "top_k", "groups"} - self.model_fields_set:
            return self  # the shape may say the rest; who resolves it says everything
        if self.top_k > self.count:
            raise ValueError(f"must not ask for top_k={self.top_k} of count={self.count} experts")
        if self.count % self.groups:
            raise ValueError(f"must split count={self.count} experts evenly, which groups={self.groups} does not")
        groups = self.top_groups or self.groups
        if groups > self.groups:
            raise ValueError(f"must not ask for top_groups={groups} of groups={self.groups}")
        if self.top_k > (room := groups * self.count // self.groups):
            raise ValueError(f"must not ask for top_k={self.top_k} of the {room} experts in top_groups={groups}")
        return self


class Model(Section):
    """What is trained. A shape or a family sets the defaults; every field given here wins over them."""

    shape: str | None = None
    """A named shape, such as tiny, gpt2-125m, llama-1b, llama-8b or llama-405b."""
    module: str | None = None
    """Your own nn.Module, as package.module:Class. `model: package.module:Class` is short for this."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your own module's constructor."""
    loss: str = "auto"
    """For your own module: auto (cross-entropy for integer targets, squared error otherwise) or package.module:function
    taking (outputs, targets) and returning one loss a target."""
    family: Annotated[str, NameIn(FAMILIES)] | None = None
    """gpt2 and llama (decoder-only), vit (an encoder of image patches), mlp (the deep MLP of the lessons)."""
    dim: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    layers: int | None = Field(None, ge=1)
    """Number of blocks (for the MLP: of square layers)."""
    heads: int | None = Field(None, ge=1)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads; fewer than heads is grouped-query attention. Left out: the same as heads."""
    head_dim: int | None = Field(None, ge=1)
    """Width of one head. Left out: dim / heads."""
    ffn: int | None = Field(None, ge=1)
    """Hidden width of the feed-forward part. Left out: 4 × dim (gpt2), 8/3 × dim rounded up to 64 (llama)."""
    vocab: int | None = Field(None, ge=1)
    """Vocabulary size. Left out: the tokenizer's. For vit: the number of classes."""
    max_len: int | None = Field(None, ge=1)
    """Longest sequence of a model with learned positions. Left out: data.seq_len."""
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """Normalisation before each part of a block."""
    norm_eps: float | None = Field(None, gt=0)
    """Added to the variance inside the norm."""
    positions: Literal["learned", "rope"] | None = None
    """How a token knows where it stands."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary positions for longer sequences."""
    activation: Literal["gelu", "swiglu"] | None = None
    """The feed-forward part's non-linearity."""
    tied: bool | None = None
    """Share the token embedding with the output head."""
    bias: bool | None = None
    """Biases in the linear layers and the layer norms."""
    qk_norm: bool | None = None
    """Normalise queries and keys by head before attention."""
    causal: bool | None = None
    """A token sees only those before it."""
    experts: Experts | None = None
    """Experts instead of one feed-forward part (gpt2 and llama)."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Share of activations dropped after the embedding, attention and feed-forward parts; the same in every layout."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"module": value} if ":" in value else {"shape": value}
        return value

    def _is(self, structure: Structure) -> bool:
        return self.family is not None and FAMILIES[self.family].structure == structure

    @property
    def is_decoder(self) -> bool:
        """Whether it is a decoder of tokens of Weft's own."""
        return self._is("decoder")

    @property
    def is_classifier(self) -> bool:
        """Whether it takes image patches and gives one label a sample."""
        return self._is("classifier")

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of square linear layers on vectors."""
        return self._is("stack")

"""A class of transformers with Weft's interface of a decoder: tokens and targets in, the summed loss or logits out.

The class of the module is a subclass of transformers' own, so the names of its parameters are those of the checkpoint.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.extensions.hub.attention import NAME, register, tokens
from weft.extensions.hub.config import causal_class, make_config
from weft.extensions.hub.parts import tensor_parts
from weft.extensions.hub.shallow_internals import shallow_copy
from weft.job.errors import JobError
from weft.job.schema import Model
from weft.models.attention import TokenInfo
from weft.models.documents import segments_of
from weft.models.init import generator
from weft.models.lora import initialise_adapter
from weft.models.loss import linear_cross_entropy


def build_hub_model(model: Model) -> nn.Module:
    """The model of model.args on the meta device; its buffers have values."""
    return copy.deepcopy(_built(json.dumps(model.args, sort_keys=True)))


@cache
def _built(args: str) -> nn.Module:
    register()
    config = make_config(json.loads(args))
    base = causal_class(config)
    if type(config) is not base.config_class and (text := config.get_text_config(decoder=True)) is not config:
        config = text
    prepare(config, uses_interface(base))
    with torch.device("meta"), quiet():
        try:
            module: Any = base(config)
        except (ImportError, OSError) as error:
            raise JobError(f"transformers cannot build {base.__name__}: {str(error).strip().splitlines()[0]}") from None
    module.tie_weights()
    module.__class__ = type(base.__name__, (HubModel, base), {"__module__": base.__module__})
    module.setup()
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings about its own defaults."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def uses_interface(base: type[nn.Module]) -> bool:
    """Whether the attention of a class goes through transformers' attention interface, with masks that nothing else
    reads."""
    source = inspect.getsource(inspect.getmodule(base))  # type: ignore[arg-type]
    source = re.sub(EAGER, "", source, flags=re.DOTALL)
    return "ALL_ATTENTION_FUNCTIONS" in source and not re.search(READS_MASKS, source)


EAGER = r"\n(?:@[^\n]*\n)*def (?:\w*eager_attention\w*|apply_mask_to_padding_states)\(.*?(?=\n(?:def|class|@|\w+ =))"
"""Functions that read masks and are not called with Weft's attention."""
READS_MASKS = (
    r"(?<!\w)attention_mask\[:|causal_mask\[:|(?<!\w)attention_mask\.(?:dtype|to\()|_attn_implementation (?:not )?in |"
    r"_attn_implementation != \"flash|CLASSES\[config\._attn_implementation"
)
"""What a class does with masks, or by the name of the attention, that Weft's has not."""


def prepare(config: Any, interface: bool) -> None:
    """Set Weft's attention, no cache, and no random numbers, which would differ between layouts."""
    for part in _configs(config):
        part._attn_implementation = NAME if interface else "eager"
        for key, value in list(vars(part).items()):
            if re.search("drop|jitter", key) and isinstance(value, float | int) and not isinstance(value, bool):
                setattr(part, key, type(value)(0))
        if getattr(part, "is_decoder", True) is False and not getattr(part, "is_encoder_decoder", False):
            part.is_decoder = True  # an encoder's class that continues text
        for key in ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"):
            if hasattr(part, key):
                setattr(part, key, False)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _configs(value)


class SkippedBlock(nn.Module):
    """Stands where another stage has a block. It returns its input, or what the stage before sent."""

    def __init__(self, block: nn.Module, stage: PassedOn, gives: bool, takes: bool, returns_tuple: bool):
        super().__init__()
        for key, value in vars(block).items():
            if not key.startswith("_") and not isinstance(value, nn.Module | Tensor) and key != "training":
                self.__dict__[key] = value
        self.__dict__["stage"], self.gives, self.takes, self.returns_tuple = stage, gives, takes, returns_tuple

    def forward(self, *args: Any, **named: Any) -> Any:
        x = args[0] if args else named["hidden_states"]
        stage: PassedOn = self.__dict__["stage"]
        if self.takes:
            stage.sent = x
        if self.gives:
            x = stage.received
        return (x,) if self.returns_tuple else x


class AbsentModule(nn.Module):
    """Stands where another stage has a module outside the blocks."""

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


class PassedOn:
    """What a stage of a pipeline receives and sends in one forward pass."""

    received: Tensor | None = None
    sent: Tensor | None = None


class HubModel(nn.Module):
    """Weft's interface of a decoder, over a class of transformers."""

    context_attention = "weft.extensions.hub.attention:HubContext"

    @property
    def text_model(self) -> Any:
        """The model of transformers that calls the blocks, whose config has their tables."""
        from transformers import PreTrainedModel

        path = self.blocks_path or ""
        above = [
            m for n, m in self.named_modules() if isinstance(m, PreTrainedModel) and (not n or path.startswith(f"{n}."))
        ]
        return above[-1]

    def setup(self) -> None:
        """Find the blocks, the head and the tables of a module that was just built."""
        from transformers import PreTrainedModel

        assert isinstance(self, PreTrainedModel)
        self.blocks_path = find_blocks(self)
        if self.blocks_path:
            self.units = f"{self.blocks_path}.*"
        own = dict(self.named_parameters())
        by_id = {id(p): n for n, p in own.items()}
        self.aliases = {n: by_id[id(p)] for n, p in self.named_parameters(remove_duplicate=False) if by_id[id(p)] != n}
        self.parts, self.whole_reason = tensor_parts(self)
        self.__dict__["skeleton"] = copy.deepcopy(self)
        fill_buffers(self)
        head = self.get_output_embeddings()
        self.head_path = next((n for n, m in self.named_modules() if m is head), None)
        if type(head) is nn.Linear and self._multiplies_last():
            head.__class__ = LossHead
        accepted = inspect.signature(self._causal_forward).parameters
        inner = inspect.signature(self.text_model.forward).parameters
        rest = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        source = inspect.getsource(inspect.getmodule(type(self.text_model)))  # type: ignore[arg-type]
        self.takes_positions = "create_position_ids_from" not in source and (
            "position_ids" in accepted or (rest and "position_ids" in inner)
        )
        self.__dict__["stage"] = None
        self.depth = len(self.blocks)
        self.width: int = self.text_model.config.hidden_size

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, in their order."""
        return self.get_submodule(self.blocks_path) if self.blocks_path else nn.ModuleList()  # type: ignore[return-value]

    @property
    def _causal_forward(self) -> Any:
        return super().forward

    def _multiplies_last(self) -> bool:
        """Whether the logits are the head's outputs, with nothing after it."""
        source = inspect.getsource(inspect.unwrap(vars(type(self).__mro__[2])["forward"]))
        made = re.findall(r"^\s*(logits|lm_logits)\b[^=\n]*= *(.*)$", source, re.MULTILINE)
        return len(made) == 1 and bool(re.fullmatch(r"self\.lm_head\((?:[^()]*(?:\([^()]*\))?|.*\])\)", made[0][1]))

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, valid: Tensor | None = None, docs: Tensor | None = None,
        positions: Tensor | None = None, keys: Tensor | None = None, smoothing: float = 0.0,
        hidden: Tensor | None = None, rows: Tensor | None = None, length: int | None = None,
    ) -> Tensor:  # fmt: skip
        # inputs [batch, seq]; hidden [batch, seq, dim] if another stage began;
        # rows and length: indices of these tokens and length of the sequence, if they are not all of it
        segments = None
        if rows is None:
            rows = torch.arange(inputs.shape[1], device=inputs.device)
            segments = None if docs is None else segments_of(docs)
        positions = rows if positions is None else positions
        length = inputs.shape[1] if length is None else length
        info = TokenInfo(None, docs, keys, rows, length, keys, segments=segments)
        if positions.dim() == 1:
            positions = positions.unsqueeze(0).expand(inputs.shape[0], -1)
        named: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        stage: PassedOn | None = self.__dict__["stage"]
        if stage is not None:
            stage.received, stage.sent = hidden, None
        if hidden is None:
            named["input_ids"] = inputs
        else:
            named["inputs_embeds"] = hidden.detach()
        head = None if self.head_path is None else self.get_submodule(self.head_path)
        losses = isinstance(head, LossHead) and targets is not None
        if losses:
            head.wanted = (targets, valid, smoothing)  # type: ignore[union-attr]
        try:
            with tokens(info):
                out = self._causal_forward(use_cache=False, **named)
        finally:
            if losses:
                head.wanted = None  # type: ignore[union-attr]
        if stage is not None and stage.sent is not None:
            return stage.sent
        logits: Tensor = out.logits
        if losses or targets is None:
            return logits
        return summed_loss(logits, targets, valid, smoothing)

    def keep(self, first: int, last: int, begins: bool, ends: bool) -> None:
        """Keep only blocks first … last - 1, what is before them if `begins` and what is after them if `ends`."""
        stage = self.__dict__["stage"] = PassedOn()
        blocks = self.blocks
        inside = inspect.getsource(inspect.unwrap(type(self.text_model).forward))
        returns_tuple = bool(re.search(r"=\s*\w*outputs?\w*\[0\]", inside))
        for i in range(self.depth):
            if not first <= i < last:
                gives, takes = i == first - 1 and not begins, i == last and not ends
                blocks[i] = SkippedBlock(blocks[i], stage, gives, takes, returns_tuple)
        before, after = self._around()
        for path in (() if begins else before) + (() if ends else after):
            owner, _, key = path.rpartition(".")
            setattr(self.get_submodule(owner), key, AbsentModule())
        names = dict(self.named_parameters())
        self.aliases = {n: of for n, of in self.aliases.items() if n in names or of in names}

    def _around(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Modules with weights before and after the blocks, by the pp plan of the config."""
        owner = self.blocks_path.rpartition(".")[0]  # type: ignore[union-attr]
        prefix = f"{owner}." if owner else ""
        children = [n for n, m in self.get_submodule(owner).named_children() if any(True for _ in m.parameters())]
        place = children.index(self.blocks_path.rpartition(".")[2])  # type: ignore[union-attr]
        before, after = [prefix + n for n in children[:place]], [prefix + n for n in children[place + 1 :]]
        plan = list(self.text_model.config.base_model_pp_plan or ())
        if "layers" in plan:
            early = {prefix + n for n in plan[: plan.index("layers")]}
            before, after = [*before, *(n for n in after if n in early)], [n for n in after if n not in early]
        top = self.blocks_path.partition(".")[0]  # type: ignore[union-attr]
        after += [n for n, m in self.named_children() if n != top and any(True for _ in m.parameters())]
        return tuple(before), tuple(after)

    def hidden_shape(self, batch: dict[str, Tensor], sequence_cut: int) -> tuple[int, ...]:
        """Shape of the activations between stages."""
        inputs = batch["inputs"]
        return inputs.shape[0], inputs.shape[1], self.width

    def initialise(self, name: str, tensor: Tensor, seed: int) -> None:
        """Fill one parameter in place, as transformers does; a function of the seed and the name alone."""
        *path, key = name.lstrip(".").split(".")
        if path and path[-1] == "lora":
            return initialise_adapter(key, tensor, generator(seed, name, tensor.device))
        module: Any = self.__dict__["skeleton"]
        chain, fillers = [shallow_copy(module)], [module]
        for part in path:
            module = getattr(module, part)
            chain.append(shallow_copy(module))
            fillers.append(module if hasattr(module, "_init_weights") else fillers[-1])
            setattr(chain[-2], part, chain[-1])
        owner = chain[-1]
        for other, param in list(owner.named_parameters(recurse=False)):  # on the host: the same for every device
            setattr(owner, other, nn.Parameter(torch.zeros(param.shape, dtype=param.dtype, device="cpu")))
        start = generator(seed, name, torch.device("cpu")).initial_seed()
        with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(start)  # transformers draws from it
            for module, filler in zip(reversed(chain), reversed(fillers), strict=True):
                filler._init_weights(module)
            tensor.copy_(getattr(owner, key))


class LossHead(nn.Linear):
    """The head: logits, or their summed cross-entropy computed in chunks."""

    wanted: tuple[Tensor, Tensor | None, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.wanted is None:
            return F.linear(x, self.weight, self.bias)
        targets, valid, smoothing = self.wanted
        return linear_cross_entropy(x, self.weight, targets, valid, smoothing, bias=self.bias)


def summed_loss(logits: Tensor, targets: Tensor, valid: Tensor | None, smoothing: float) -> Tensor:
    """Cross-entropy summed over the valid targets."""
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    return losses.sum() if valid is None else torch.where(valid.flatten() > 0, losses * valid.flatten(), 0.0).sum()


def find_blocks(model: Any) -> str | None:
    """The path of the list of blocks: that with most blocks which must not be split, else the one with most weights."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    named = {n: sum(type(b).__name__ in kinds for b in m) for n, m in lists.items()}
    if any(named.values()):
        return max(named, key=lambda n: named[n])
    weights = {n: sum(p.numel() for p in m.parameters()) for n, m in lists.items() if "." not in n or n.count(".") < 4}
    return max(weights, key=lambda n: weights[n], default=None)


def fill_buffers(model: Any) -> None:
    """Give the buffers of a model on the meta device their values, as transformers computes them."""
    fillers = {id(part): m for m in model.modules() if hasattr(m, "_init_weights") for part in m.modules()}
    for module in model.modules():
        empty = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in empty.items():
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu"))
        if empty:
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                fillers[id(module)]._init_weights(module)

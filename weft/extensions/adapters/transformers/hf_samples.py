"""How samples become the batches of WeftTrainer: collators, columns, accumulated batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def default_collator(processing_class: Any) -> Any:
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator

    tokenizer = isinstance(processing_class, PreTrainedTokenizerBase)
    return DataCollatorWithPadding(processing_class) if tokenizer else default_data_collator


def used_columns(model: nn.Module, collator: Any, label_names: list[str]) -> Any:
    """The collator of samples without the columns that the model does not take."""
    from transformers.trainer_utils import RemoveColumnsCollator

    names = list(inspect.signature(model.forward).parameters)
    return RemoveColumnsCollator(collator, [*names, "label", "label_ids", *label_names])


def predicts_next_token(model: Any) -> bool:
    """Whether the loss of a model of transformers is that of a causal language model."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return decoder and LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss


def uses(loss: Tensor, value: Tensor) -> bool:
    """Whether a loss is computed from a value that requires gradients."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is value:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def groups(loader: Any, size: int) -> Iterator[list[Any]]:
    """Batches in groups of `size`; the last may have fewer."""
    group: list[Any] = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group

"""Evaluation as transformers' Trainer does it: the loss, and the predictions and labels of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.extensions.adapters.accelerate.accelerator import Accelerator
from weft.extensions.adapters.training import to_device


@dataclass
class Evaluated:
    """What a pass over the evaluation data gave; arrays of NumPy, nested where the model's outputs are."""

    loss: float | None
    predictions: Any
    labels: Any
    samples: int


Predict = Callable[[Any], tuple[Tensor | None, Any, Any]]
"""The loss, the outputs and the labels of a batch."""


def evaluate_batches(
    accelerator: Accelerator, loader: Any, predict: Predict, loss_only: bool, preprocess: Any, concatenate: bool
) -> Evaluated:
    """One pass over a loader, with the samples of all ranks in their order."""
    from transformers.trainer_pt_utils import EvalLoopContainer

    training = accelerator.training
    assert training is not None
    losses: list[Tensor] = []
    outputs, answers = EvalLoopContainer(concatenate, -100), EvalLoopContainer(concatenate, -100)
    samples = 0
    with training.evaluation():
        for batch in loader:
            batch = to_device(batch, accelerator.device)
            size = next(v for v in batch.values() if isinstance(v, Tensor)).shape[0]
            loss, logits, labels = predict(batch)
            if loss is not None:
                losses.append(accelerator.gather_for_metrics(loss.detach().mean().repeat(size)))
            samples += len(accelerator.gather_for_metrics(torch.zeros(size, device=accelerator.device)))
            if loss_only:
                continue
            logits, labels = (accelerator.pad_across_processes(x, dim=1, pad_index=-100) for x in (logits, labels))
            if preprocess is not None and logits is not None:
                logits = preprocess(logits, labels)
            if logits is not None:
                outputs.add(_on_host(accelerator.gather_for_metrics(logits)))
            if labels is not None:
                answers.add(_on_host(accelerator.gather_for_metrics(labels)))
    mean = float(torch.cat(losses).mean()) if losses else None
    return Evaluated(mean, outputs.get_arrays(), answers.get_arrays(), samples)


def predicted(
    model: Any, batch: Any, label_names: list[str], loss_of: Any, loss_only: bool, ignored: list[str] | None
) -> tuple[Tensor | None, Any, Any]:
    """The loss, outputs and labels of a batch; `loss_of` gives loss and outputs of one that has labels."""
    labelled = bool(label_names) and all(batch.get(name) is not None for name in label_names)
    if labelled:
        loss, output = loss_of(batch)
    else:
        loss, output = None, model(**batch)
        loss = output.get("loss") if batch.get("return_loss") and isinstance(output, dict) else None
    if loss_only:
        return loss, None, None
    if ignored is None:
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or []
    named = output.items() if isinstance(output, dict) else enumerate(output[1:] if labelled else output)
    logits = _one(tuple(value for key, value in named if key not in ("loss", *ignored)))
    return loss, logits, _one(tuple(batch[name] for name in label_names)) if labelled else None


def _one(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _on_host(value: Any) -> Any:
    return to_device(value, torch.device("cpu"))

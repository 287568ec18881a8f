"""Evaluation as transformers' Trainer does it: the loss, and the predictions and labels of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.extensions.adapters.accelerator import Accelerator
from weft.extensions.adapters.training import to_device


@dataclass
class Evaluated:
    """What a pass over the evaluation data gave; arrays of NumPy, nested where the model's outputs are."""

    loss: float | None
    predictions: Any
    labels: Any
    samples: int


def evaluate_batches(
    accelerator: Accelerator, model: Any, loader: Any, label_names: list[str], loss_arguments: Any, loss_only: bool,
    preprocess: Any, concatenate: bool,
) -> Evaluated:  # fmt: skip
    """`loss_arguments` gives the arguments that a batch with labels is called with besides its own."""
    from transformers.trainer_pt_utils import EvalLoopContainer

    training = accelerator.training
    assert training is not None
    losses: list[Tensor] = []
    outputs, answers = EvalLoopContainer(concatenate, -100), EvalLoopContainer(concatenate, -100)
    ignored = {"loss", *(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or ())}
    samples = 0
    with training.evaluation():
        for batch in loader:
            batch = to_device(batch, accelerator.device)
            labelled = bool(label_names) and all(batch.get(name) is not None for name in label_names)
            found = model(**batch, **(loss_arguments(batch) if labelled else {}))
            size = next(v for v in batch.values() if isinstance(v, Tensor)).shape[0]
            if labelled:
                losses.append(accelerator.gather_for_metrics(found["loss"].detach().mean().repeat(size)))
                samples += len(losses[-1])
            if loss_only:
                continue
            labels = _one(tuple(batch[name] for name in label_names)) if labelled else None
            logits = _one(tuple(value for key, value in found.items() if key not in ignored))
            logits, labels = (accelerator.pad_across_processes(x, dim=1, pad_index=-100) for x in (logits, labels))
            if preprocess is not None:
                logits = preprocess(logits, labels)
            outputs.add(_on_host(accelerator.gather_for_metrics(logits)))
            if labelled:
                answers.add(_on_host(accelerator.gather_for_metrics(labels)))
    loss = float(torch.cat(losses).mean()) if losses else None
    return Evaluated(loss, outputs.get_arrays(), answers.get_arrays(), samples)


def _one(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _on_host(value: Any) -> Any:
    return to_device(value, torch.device("cpu"))

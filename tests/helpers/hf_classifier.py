"""A script for transformers' Trainer, with metrics, a collator, the best model and callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.published import transformers


def arguments(folder: Path, **fields: Any) -> Any:
    usual: dict[str, Any] = dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2, num_train_epochs=2,
        logging_steps=1, warmup_steps=2, weight_decay=0.1, use_cpu=True, save_strategy="no", report_to="none", seed=7,
        disable_tqdm=True,
    )  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **(usual | fields))


def classifier() -> Any:
    torch.manual_seed(0)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=32)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **off, num_labels=3))


def texts() -> list[dict[str, Any]]:
    """Token lists of different lengths with a label, and a column that the model does not take."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (14,), generator=random).tolist()
    tokens = [torch.randint(1, 32, (n,), generator=random).tolist() for n in lengths]
    return [{"input_ids": t, "attention_mask": [1] * len(t), "label": sum(t) % 3, "text": "…"} for t in tokens]


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    assert all("text" not in sample for sample in samples)
    longest = max(len(s["input_ids"]) for s in samples)
    rows = {
        k: torch.tensor([s[k] + [0] * (longest - len(s[k])) for s in samples]) for k in ("input_ids", "attention_mask")
    }
    return {**rows, "labels": torch.tensor([s["label"] for s in samples])}


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()}


def callback_that_notes(seen: list[str]) -> Any:
    """A callback that appends the names of the events it sees."""

    class Events(transformers.TrainerCallback):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                return lambda *args, **kwargs: seen.append(name)
            return super().__getattribute__(name)

    return Events()


def run_classifier(kind: Any, folder: Path, stop: bool, job: Any = None, **options: Any) -> tuple[Any, Any, list[str]]:
    """A script as the docs of transformers write it: metrics, collator, best model, callbacks. Updates do not depend on
    the size of the loss, which transformers multiplies by the number of ranks if a model ignores the count of targets.
    """
    seen, stopping = list[str](), [transformers.EarlyStoppingCallback(1)] if stop else []
    args = arguments(
        folder, **{"per_device_eval_batch_size": 4, **options}, num_train_epochs=4, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
        gradient_accumulation_steps=1, learning_rate=3e-2, logging_steps=3, max_grad_norm=0.0, adam_epsilon=1e-12,
    )  # fmt: skip
    trainer = kind(
        model=classifier(), args=args, train_dataset=texts()[:12], eval_dataset=texts()[:7], data_collator=padded,
        compute_metrics=accuracy, callbacks=[callback_that_notes(seen), *stopping],
        **({} if job is None else {"job": job}),
    )  # fmt: skip
    trainer.train()
    return trainer, trainer.predict(texts()[3:]), seen

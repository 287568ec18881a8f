"""WeftTrainer trains as transformers' Trainer does, and names what it does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.published import transformers

from weft.adapters.hf_trainer import WeftTrainer
from weft.job.errors import JobError


def model() -> Any:
    torch.manual_seed(0)
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, **off)
    return transformers.GPT2LMHeadModel(config)


def samples() -> list[dict[str, Any]]:
    """Texts with different numbers of targets."""
    texts = torch.randint(32, (20, 8), generator=torch.Generator().manual_seed(0))
    return [
        {"input_ids": text, "labels": torch.where(torch.arange(8) < i % 5, -100, text)} for i, text in enumerate(texts)
    ]


def arguments(folder: Path, **fields: Any) -> Any:
    usual: dict[str, Any] = dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2, num_train_epochs=2,
        logging_steps=1, warmup_steps=2, weight_decay=0.1, use_cpu=True, save_strategy="no", report_to="none", seed=7,
        disable_tqdm=True,
    )  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **(usual | fields))


def test_losses_are_those_of_transformers(tmp_path: Path) -> None:
    made, outputs, losses = list[Any](), list[Any](), list[float]()
    for kind in (transformers.Trainer, WeftTrainer):
        trainer: Any = kind(
            model=model(), args=arguments(tmp_path), train_dataset=samples(), eval_dataset=samples()[:6]
        )
        made.append(trainer)
        outputs.append(trainer.train())
        losses.append(trainer.evaluate()["eval_loss"])
    assert outputs[0].global_step == outputs[1].global_step
    theirs, ours = ([h["loss"] for h in t.state.log_history if "loss" in h] for t in made)
    assert len(theirs) == outputs[0].global_step and ours == pytest.approx(theirs, abs=1e-4)
    assert outputs[1].training_loss == pytest.approx(outputs[0].training_loss, rel=1e-4)
    for one, other in zip(made[0].model.parameters(), made[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    made[1].save_model(str(tmp_path / "saved"))
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.lm_head.weight, made[1].model.lm_head.weight)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    for fields, name in (
        ({"push_to_hub": True}, "push_to_hub"), ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"optim": "adafactor"}, "optim"), ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is not used"),
    ):  # fmt: skip
        with pytest.raises(JobError, match=name):
            WeftTrainer(model=model(), args=arguments(tmp_path, **fields), train_dataset=samples()).train()
    with pytest.raises(JobError, match="compute_metrics"):
        WeftTrainer(model=model(), args=arguments(tmp_path), compute_metrics=print)

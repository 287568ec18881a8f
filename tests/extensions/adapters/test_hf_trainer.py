"""WeftTrainer trains as transformers' Trainer does, and names what it does not support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command import python
from helpers.hf_classifier import arguments, classifier, padded, run_classifier, texts
from helpers.published import transformers

from weft.extensions.adapters.transformers.hf_seq2seq import WeftSeq2SeqTrainer
from weft.extensions.adapters.transformers.hf_trainer import WeftTrainer
from weft.job.errors import JobError

SCRIPT = Path(__file__).parent / "scripts" / "trainer_script.py"


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
    with pytest.raises(JobError, match="compute_loss_func"):
        WeftTrainer(model=model(), args=arguments(tmp_path), compute_loss_func=print)


def test_hooks_and_files_of_scripts(tmp_path: Path) -> None:
    """A subclass with a loss of its own, the evaluation loop, several datasets, and the model card."""

    class Doubled(WeftTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, **others)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    losses = []
    for kind in (WeftTrainer, Doubled):
        trainer: Any = kind(model=model(), args=arguments(tmp_path, learning_rate=0.0), train_dataset=samples()[:8])
        losses.append(trainer.train().training_loss)
        found = trainer.evaluation_loop(trainer.get_eval_dataloader(samples()[:6]), "Evaluation")
        assert found.num_samples == 6 and found.predictions.shape[0] == 6
        losses.append(found.metrics["eval_loss"])
    assert losses[2:] == pytest.approx([2 * losses[0], 2 * losses[1]], rel=1e-5)
    assert {"eval_a_loss", "eval_b_loss"} <= set(trainer.evaluate({"a": samples()[:2], "b": samples()[2:4]}))
    trainer.create_model_card(tasks="text-generation", finetuned_from="x")
    assert "x" in (tmp_path / "README.md").read_text()
    with pytest.raises(JobError, match="push_to_hub is not supported"):
        trainer.push_to_hub()


def test_the_loss_of_a_classifier_is_a_mean_whatever_is_accumulated(tmp_path: Path) -> None:
    """It ignores num_items_in_batch, by which transformers expects models to divide."""
    losses = []
    for passes in (1, 2):
        args = arguments(
            tmp_path, learning_rate=0.0, per_device_train_batch_size=4 // passes, gradient_accumulation_steps=passes,
            max_steps=1,
        )  # fmt: skip
        trainer: Any = WeftTrainer(classifier(), args, data_collator=padded, train_dataset=texts()[:12])
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] < 2.0


def test_generated_predictions_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    spoken = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    rows = [{"input_ids": torch.arange(3, 8) + i, "labels": torch.arange(2, 6) + i} for i in range(4)]
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, predict_with_generate=True, generation_max_length=6, use_cpu=True,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    made = []
    for kind in (transformers.Seq2SeqTrainer, WeftSeq2SeqTrainer):
        ours: Any = kind(spoken, args, eval_dataset=rows, compute_metrics=lambda found: {"n": len(found.predictions)})
        made.append(ours.predict(rows))
    one, other = made
    assert np.array_equal(one.predictions, other.predictions) and np.array_equal(one.label_ids, other.label_ids)
    assert ours.evaluate(max_length=4)["eval_n"] == 4
    assert one.metrics["test_loss"] == pytest.approx(other.metrics["test_loss"], rel=1e-4)


@pytest.mark.parametrize("stop", [False, True])
def test_metrics_callbacks_and_the_best_model_are_those_of_transformers(tmp_path: Path, stop: bool) -> None:
    theirs, their_predictions, their_events = run_classifier(transformers.Trainer, tmp_path / "theirs", stop)
    ours, predictions, events = run_classifier(WeftTrainer, tmp_path / "ours", stop)
    kept = [[h["eval_accuracy"] for h in t.state.log_history if "eval_accuracy" in h] for t in (theirs, ours)]
    assert kept[0] == kept[1] and len(kept[0]) > 1
    assert ours.state.best_metric == theirs.state.best_metric
    assert ours.state.global_step == theirs.state.global_step
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert predictions.predictions == pytest.approx(their_predictions.predictions, abs=1e-4)
    assert predictions.metrics["test_accuracy"] == their_predictions.metrics["test_accuracy"]
    assert events == [name for name in their_events if name != "on_prediction_step"]


def test_metrics_on_two_ranks(tmp_path: Path) -> None:
    """Two ranks with half of each batch, which they pad to different lengths, evaluate as one process."""
    alone, predictions, _ = run_classifier(transformers.Trainer, tmp_path / "alone", stop=True)
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path / "ranks"))
    done = python(tmp_path, *command, PYTHONPATH=f"{SCRIPT.parents[2]}:{SCRIPT.parents[3]}")
    assert done.code == 0, done.err
    found = json.loads(done.out.strip().splitlines()[-1])
    assert found["accuracies"] == [h["eval_accuracy"] for h in alone.state.log_history if "eval_accuracy" in h]
    assert found["step"] == alone.state.global_step
    assert np.array(found["logits"]) == pytest.approx(predictions.predictions, abs=1e-4)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "ranks" / "saved")
    torch.testing.assert_close(again.classifier.weight, alone.model.classifier.weight, rtol=1e-4, atol=1e-4)

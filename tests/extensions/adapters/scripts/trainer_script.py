"""A script for transformers' Trainer on the ranks of torchrun, with the import changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.hf_classifier import run_classifier

from weft.job.schema import Job, Parallel
from weft.transformers import WeftTrainer

job = Job(precision="fp32", parallel=Parallel(dp_shard=2, zero=3))
trainer, found, _ = run_classifier(
    WeftTrainer, Path(sys.argv[1]), True, job=job, per_device_train_batch_size=2, per_device_eval_batch_size=2
)
trainer.save_model(str(Path(sys.argv[1]) / "saved"))
if trainer.is_world_process_zero():
    history = [h["eval_accuracy"] for h in trainer.state.log_history if "eval_accuracy" in h]
    print(json.dumps({"accuracies": history, "step": trainer.state.global_step, "logits": found.predictions.tolist()}))

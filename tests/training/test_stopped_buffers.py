"""Buffers that differ between ranks: a stop between two checkpoints does not average them."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.command import python, run_of, write_job
from helpers.self_faults import write_orders

from weft.checkpoint.format import list_checkpoints
from weft.checkpoint.reader import load_full

MODEL = """
import torch
from helpers.own_models import Plain

class Squares(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("squares", torch.zeros(()))

    def forward(self, tokens):
        if self.training:
            self.squares.copy_((self.squares.square() + tokens.float().mean() / 256) / 2)
        return super().forward(tokens)
"""


def test_a_stopped_run_has_the_buffers_of_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "squares.py").write_text(MODEL, encoding="utf-8")
    write_job(
        tmp_path, model={"module": "squares:Squares", "vocab": 256},
        data={"source": "synthetic", "seq_len": 16}, train={"steps": 6, "global_batch": 4, "eval_every": 0},
        checkpoint={"every": 4}, cluster={"device": "cpu"}, parallel={"dp_replicate": 2},
    )  # fmt: skip
    stop = {"kind": "launcher SIGTERM", "rank": 0, "step": 2}
    for name, codes, orders in (("calm", [0], []), ("stopped", [75, 0], [stop])):
        faults = write_orders(tmp_path / name, *orders)
        for code in codes:
            result = python(tmp_path, "-m", "weft", "train", "job.yaml", f"name={name}", "--nproc", "2", **faults)
            assert result.code == code, result.err
    saved = [
        [load_full(c) for c in list_checkpoints(run_of(tmp_path, name).checkpoints)[-2:]]
        for name in ("calm", "stopped")
    ]
    for calm, stopped in zip(*saved, strict=True):
        assert calm.keys() == stopped.keys() and "buffer.squares" in calm
        assert [name for name in calm if not torch.equal(calm[name], stopped[name])] == []

    faults = write_orders(tmp_path / "alone", stop)
    for ranks, code in (("2", 75), ("1", 0)):  # another layout takes the average
        words = ("train", "job.yaml", "name=alone", "parallel={}", "--nproc", ranks)
        assert (result := python(tmp_path, "-m", "weft", *words, **faults)).code == code, result.err

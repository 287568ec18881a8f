"""User modules train with replicas and shards unchanged, and under tp with a table of roles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_ranks
from helpers.parity import NOT_OURS, ONE_PASS, check, differences, make_job, run, section
from safetensors.torch import load_file
from torch import nn

from weft.checkpoint.format import newest_good
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model, loss_sum
from weft.parallel.inferred_parts import infer_parts
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.training.export import ExportOptions, export_file
from weft.verify.prove import with_layout

DATA = ("dp_replicate 2", "dp_shard 2 zero=1", "dp_shard 4 zero=3", "dp_replicate 2 × dp_shard 2 zero=2")
TENSOR = ("tp 2", "dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × tp 2")


def own(name: str, model: dict[str, Any] | None = None, *overrides: str, **sections: Any) -> Job:
    return make_job(
        *overrides,
        model={**NOT_OURS, "module": f"helpers.own_models:{name}", **(model or {})},
        data={"source": "pydoc", "seq_len": 8},
        **sections,
    )


@pytest.mark.parametrize(
    ("name", "precision", "layouts"),
    [
        ("Plain", "fp32", (*DATA[:2], "tp 2 × dp_shard 2 zero=3", "pp 2 × tp 2")),
        ("TorchLayers", "fp32", ("tp 2 × dp_replicate 2", "pp 2 1f1b")),
        ("WithParts", "fp32", TENSOR[1:]),
        ("Odd", "fp32", TENSOR[:2]),
        ("WithParts", "bf16", (DATA[3], TENSOR[1])),
        ("Frozen", "fp32", (DATA[0], DATA[2])),
        ("InPlace", "fp32", ("dp_shard 2 zero=3",)),
        ("GivesDict", "fp32", DATA[:1]),
        ("GivesObject", "fp32", DATA[1:2]),
        ("Containers", "fp32", DATA[2:3]),
        ("Scalar", "fp32", DATA[:1]),
    ],
)
def test_same_run(pool: RankPool, name: str, precision: str, layouts: tuple[str, ...]) -> None:
    check(pool, own(name, None, ONE_PASS, precision=precision), layouts)


def test_a_block_that_is_not_called(pool: RankPool) -> None:
    check(pool, own("Skips", None, "train.accumulation=2"), ("dp_shard 2 zero=1",))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Normalised(Gated):
    """What is between its layers needs all of the hidden values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1))


class UsedTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden) + hidden.sum(-1, keepdim=True)


def test_parts_are_pairs_of_linear_layers_with_an_activation_between() -> None:
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8), nn.LayerNorm(8)]
    assert infer_parts(nn.Sequential(*layers, nn.Linear(8, 4))) == {"0": "column", "2": "row"}
    assert infer_parts(Gated()) == {"gate": "column", "up": "column", "down": "row"}
    assert infer_parts(nn.ModuleList([Normalised(), UsedTwice()])) == {}


def test_a_frozen_weight_is_not_trained(pool: RankPool) -> None:
    assert "embed.weight" not in run(pool, own("Frozen"), "1").result.trace.parameters


def test_running_statistics_are_averaged_when_saved(pool: RankPool, tmp_path: Path) -> None:
    """The mean over the ranks is saved, so that it does not depend on the layout."""
    normed = own("Normed", {"batch_norm": "rank"})
    states = {}
    for layout in ("dp_replicate 2", "dp_replicate 2 × dp_shard 2 zero=3", "1"):
        job, file = make_plan(with_layout(normed, section(layout))), tmp_path / "states.pt"
        pool.run(on_ranks.move, ranks(section(layout)), job, str(tmp_path / "checkpoints"), 2, str(file))
        states[layout] = torch.load(file)
    name = "buffer.batchnorm.running_mean"
    for (_, saved), (opened, _) in pairwise(states.values()):
        assert torch.equal(saved[name], opened[name])
        assert int(opened["buffer.batchnorm.num_batches_tracked"]) == int(saved["buffer.batchnorm.num_batches_tracked"])
    found = newest_good(tmp_path / "checkpoints")
    assert found
    export_file(found, "safetensors", tmp_path / "model.safetensors", ExportOptions(torch.bfloat16))
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported[name[7:]], states["1"][1][name].bfloat16())
    assert exported["batchnorm.num_batches_tracked"].dtype == torch.int64
    planned = make_plan(with_layout(normed, section("dp_replicate 2")))
    seen = pool.run(on_ranks.buffers_after, 2, planned, 2)
    (before, after), (other_before, other_after) = seen
    means = (before[name[7:]].double() + other_before[name[7:]].double()) / 2
    assert not torch.equal(before[name[7:]], other_before[name[7:]])
    assert torch.equal(after[name[7:]], means.float())
    assert all(torch.equal(value, other_after[key]) for key, value in after.items())
    assert torch.equal(after["scale"], before["scale"])


def test_recompute_of_user_modules(pool: RankPool) -> None:
    job = own("Plain", memory={"recompute": "full"})
    assert not differences(run(pool, own("Plain"), "1"), run(pool, job, "dp_shard 2 zero=3"))


@pytest.mark.parametrize(
    ("name", "layout", "text"),
    [
        ("Pairless", "tp 2", "JobError: Pairless has no table of parts, and no two linear layers with an activation "
                             "between them, so parallel.tp must be 1; for tp give the class an attribute `parts` such "
                             "as {'*.up': 'column', '*.down': 'row'}"),
        ("Pairless", "pp 2 tp 2", "JobError: Pairless has no table of parts, and no two linear layers with an "
                                  "activation between them, so parallel.tp must be 1; for tp give the class an "
                                  "attribute `parts` such as {'*.up': 'column', '*.down': 'row'}"),
        ("WrongParts", "tp 2", "JobError: the table of parts says 'blocks.*.up': 'colum', which is no part; did you "
                               "mean 'column'?"),
        ("MisspeltParts", "tp 2", "JobError: the table of parts of MisspeltParts has 'blocks.*.dwn', which fits no "
                                  "module; did you mean 'blocks.*.down'?"),
        ("Scalar", "dp_shard 2", "JobError: the parameter heat has no dimension to cut; give it the shape [1], or use "
                                 "dp_replicate"),
        ("Missing", "1", "JobError: model.module='helpers.own_models:Missing': helpers.own_models has no 'Missing'"),
    ],
)  # fmt: skip
def test_unsupported_user_modules_are_refused(pool: RankPool, name: str, layout: str, text: str) -> None:
    job = with_layout(own(name), section(layout))
    answers = pool.run(on_ranks.refusal, ranks(section(layout)), job)
    assert answers == [text] * len(answers)


def test_outputs_without_a_name_are_refused() -> None:
    job = own("GivesNameless")
    batch = {"ids": torch.arange(2), "inputs": torch.zeros(2, 8, dtype=torch.long),
             "targets": torch.zeros(2, 8, dtype=torch.long), "valid": torch.ones(2, 8, dtype=torch.bool)}  # fmt: skip
    with pytest.raises(
        JobError, match=r"GivesNameless returns out, other; name one of them logits, or give model.loss"
    ):
        loss_sum(build_model(job.model), batch, job.model)


def test_an_input_that_forward_does_not_take_is_refused() -> None:
    job = own("Plain")
    batch = {"ids": torch.arange(2), "inputs/#0": torch.zeros(2, 8, dtype=torch.long), "inputs/#1": torch.zeros(2, 8)}
    with pytest.raises(JobError, match=r"Plain.forward\(tokens.*too many positional arguments, and the samples have 2"):
        loss_sum(build_model(job.model), batch, job.model)

"""Language models as common repositories write them: the same run under tp and pp, and what is split of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import gpt_modules
from helpers.parity import check, make_job
from torch import nn

import weft
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.parallel.forward_recorder_internals import inputs_of_modules
from weft.parallel.pipeline.module_stages import ModuleStages
from weft.parallel.tensor import infer_table
from weft.parallel.units import find_units

NOT_OURS: dict[str, Any] = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))
TOKENS = torch.zeros(4, 8, dtype=torch.int64)


def own(name: str, *overrides: str, **args: Any) -> Job:
    model = {**NOT_OURS, "module": f"helpers.gpt_modules:{name}", "args": args}
    return make_job("train.accumulation=auto", *overrides, model=model, data={"source": "pydoc", "seq_len": 8})


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("FusedGpt", ("pp 2 zbv microbatches=4", "tp 2 × dp_shard 2 zero=3", "pp 2 1f1b × tp 2")),
        ("RotaryGpt", ("pp 2 1f1b × tp 2",)),
        ("BatchFirst", ("pp 2 1f1b microbatches=2",)),
    ],
)
def test_same_run(pool: RankPool, name: str, layouts: tuple[str, ...]) -> None:
    args = {"heads": 4} if name == "FusedGpt" else {}
    check(pool, own(name, **args), layouts)


def table(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    model.given = {"tokens": TOKENS}  # type: ignore[assignment]
    return infer_table(model, ranks)


def test_attention_is_split_as_mlps_are() -> None:
    found = table(gpt_modules.FusedGpt(gpt_modules.GptConfig(layers=1)))
    assert found == {
        "transformer.h.0.attn": "attention", "transformer.h.0.attn.c_attn": "fused",
        "transformer.h.0.attn.c_proj": "row", "transformer.h.0.mlp.up": "column", "transformer.h.0.mlp.down": "row",
    }  # fmt: skip
    found = table(gpt_modules.RotaryGpt())
    assert {n: r for n, r in found.items() if "0.attention" in n} == {
        "layers.0.attention": "attention", "layers.0.attention.wo": "row",
        **{f"layers.0.attention.w{x}": "column" for x in "qkv"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ranks", "why"),
    [
        (gpt_modules.GptConfig(dropout=0.1), 2, "dropout of 0.1 on single heads"),
        (gpt_modules.GptConfig(), 4, "2 heads are not a multiple of tp=4"),
    ],
)
def test_attention_that_stays_whole_says_why(config: gpt_modules.GptConfig, ranks: int, why: str) -> None:
    model = gpt_modules.FusedGpt(config)
    found = table(model, ranks)
    assert "transformer.h.0.attn" not in found and found["transformer.h.0.mlp.up"] == "column"
    assert model.whole_parts == {f"transformer.h.{i}.attn": why for i in range(2)}


def test_a_plan_says_what_tp_splits_and_its_traffic() -> None:
    plan = weft.plan(own("FusedGpt", "parallel={tp: 2}", dropout=0.1), 2)
    assert plan.reasons[-1] == (
        "tp=2 splits transformer.h.*.mlp.up, transformer.h.*.mlp.down: 25 % of the weights; whole on every rank: "
        "transformer.h.*.attn (dropout of 0.1 on single heads), all other modules"
    )
    passes = plan.accumulation * plan.microbatch * 8
    assert plan.predicted["communication_mib"] * 2**20 == passes * 2 * 2 * 16 * 4, "two sums a layer"
    plan = weft.plan(own("FusedGpt", "parallel={pp: 2}"), 2)
    assert plan.predicted["communication_mib"] * 2**20 == plan.accumulation * plan.microbatch * 8 * 16 * 4


def test_constructors_that_take_a_config() -> None:
    assert weft.plan(own("FusedGpt", layers=1), 1).predicted["memory_gib"] > 0
    with pytest.raises(JobError, match=r"model.args does not fit GptConfig, .* unexpected keyword argument 'depth'"):
        weft.plan(own("FusedGpt", depth=1), 1)
    with pytest.raises(JobError, match=r"def build\(\*\*fields\): return Unannotated\(GptConfig\(\*\*fields\)\)`"):
        weft.plan(own("Unannotated", layers=1), 1)


def test_time_major_modules_are_refused_with_their_wrapper() -> None:
    with pytest.raises(
        JobError, match=r"encoder of TimeMajor .* is given \[batch, time, …\]; set batch_first=True, or"
    ):
        weft.plan(own("TimeMajor"), 2)


def test_float64_modules_are_refused_with_their_wrapper() -> None:
    with pytest.raises(
        JobError, match=r"Double has float64 weights \(embed.weight\), .* return Double\(\*\*fields\).float"
    ):
        weft.plan(own("Double"), 2)


def stages(model: nn.Module, count: int = 2) -> ModuleStages:
    return ModuleStages(model, list(find_units(model)), count, given={"x": torch.zeros(3, 4)})


@pytest.mark.parametrize("name", ["KeepsPeak", "AddsAll"])
def test_attributes_and_sizes_are_those_of_one_process(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(gpt_modules, name)()
    before = {key: value for key, value in vars(model).items() if key != "training"}
    cut = stages(model)
    assert {key: value for key, value in vars(model).items() if key != "training"} == before
    parts = [cut.stage(i) for i in range(2)]
    for step in range(3):
        x = torch.randn(3, 4) * (step + 1)
        hidden: Any = None
        for part in parts:
            hidden = part.stage.call(part, hidden, [x], {})  # type: ignore[union-attr, operator]
        assert torch.equal(hidden, model(x))


def test_sizes_that_were_read_as_numbers_are_checked() -> None:
    part = stages(gpt_modules.AddsAll()).stage(0)
    with pytest.raises(JobError, match=r"stages are those for x of shape \[3, 4\], and a batch has \[2, 4\]"):
        part.stage.call(part, None, [torch.zeros(2, 4)], {})  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Counts", "its forward changes calls; move that"),
        ("KeepsMean", "computes mean from the value of the call before"),
    ],
)
def test_state_that_stages_cannot_have_is_refused(name: str, text: str) -> None:
    with pytest.raises(JobError, match=text):
        stages(getattr(gpt_modules, name)())


def test_inputs_of_modules_are_found_without_data() -> None:
    model = gpt_modules.RotaryGpt()
    found = inputs_of_modules(model, {"tokens": TOKENS}, {"head": model.head})
    assert found["head"]["input"].shape == (4, 8, 16) and torch.equal(model.freqs, gpt_modules.RotaryGpt().freqs)

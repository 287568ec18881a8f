"""Own modules in a pipeline: the same run as one process, and clear refusals of what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import on_ranks, staged_models
from helpers.own_models import Containers, Plain
from helpers.parity import check, make_job, section

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model
from weft.parallel.pipeline.boundary import Boundary, message_layout, pack, unpack
from weft.parallel.pipeline.module_stages import ModuleStages
from weft.parallel.units import find_units
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.planner.schedules.stage_costs import simulated
from weft.verify.prove import with_layout

NOT_OURS: dict[str, Any] = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))


def own(module: str, source: str = "helpers.own_models:Labelled", **sections: Any) -> Job:
    where = module if ":" in module else f"helpers.staged_models:{module}"
    model = {**NOT_OURS, "module": where, **sections.pop("model", {})}
    return make_job("train.accumulation=auto", model=model, data={"source": source, "seq_len": 8}, **sections)


def test_every_schedule(pool: RankPool) -> None:
    names = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")
    check(pool, own("Crossing"), [f"pp 2 {name} microbatches=4" for name in names])


def test_with_data_parallelism(pool: RankPool) -> None:
    check(pool, own("Crossing"), [
        "pp 2 1f1b × dp_replicate 2 microbatches=2", "pp 2 zbv × dp_shard 2 zero=3 microbatches=2",
        "pp 2 gpipe × dp_shard 2 zero=1 microbatches=2", "pp 4 1f1b microbatches=4",
    ])  # fmt: skip


def test_tied_weights_and_weights_that_are_not_used(pool: RankPool) -> None:
    job = own("helpers.own_models:Plain", "pydoc", model={"args": {"layers": 3}})
    check(pool, job, ["pp 2 1f1b", "pp 2 zbv microbatches=4", "pp 2 zb-h1 × dp_shard 2 zero=3 microbatches=2"])


def test_batch_norm(pool: RankPool) -> None:
    """Statistics are of a microbatch of all replicas, so one process has the same microbatches."""
    job = own("Convolutions", "helpers.own_models:Pictures", train={"microbatch": 4})
    check(pool, job, ["pp 2 1f1b microbatches=2", "pp 2 interleaved-1f1b virtual_stages=2 microbatches=2"])
    job = own("Convolutions", "helpers.own_models:Pictures", train={"microbatch": "auto"})
    check(pool, job, ["pp 2 gpipe × dp_replicate 2 microbatches=1"])


def test_metrics_do_not_depend_on_the_layout(pool: RankPool) -> None:
    """13 samples in batches of 8: the padding of the last batch counts nothing."""
    train = {"metrics": ["accuracy", "helpers.own_models:margin"]}
    for job in (
        own("Crossing", train=train),
        own("Convolutions", "helpers.own_models:Pictures", model={"args": {"dropout": 0.5}}, train=train),
    ):
        found = []
        for layout in ("1", "pp 2 1f1b microbatches=4", "pp 2 zbv × dp_shard 2 zero=3 microbatches=2"):
            spread = section(layout)
            answers = pool.run(on_ranks.evaluated, ranks(spread), make_plan(with_layout(job, spread)))
            assert all(answer == answers[0] for answer in answers)
            found.append(answers[0])
        assert set(found[0]) == {"val_loss", "val_accuracy", "val_margin"}
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-6)


def stages(model: torch.nn.Module, count: int, **options: Any) -> ModuleStages:
    return ModuleStages(model, list(find_units(model)), count, **options)


def test_parts_and_their_weights() -> None:
    made = stages(staged_models.Convolutions(), 3)
    assert made.parts == ["0.0", "0.1", "0.3", "0.4", "0.6", "0.7", "4"]
    names = [set(dict(made.stage(i).named_parameters())) for i in range(3)]
    assert set.union(*names) == set(dict(made.model.named_parameters()))
    assert sum(map(len, names)) == len(set.union(*names))
    pinned = stages(staged_models.Convolutions(), 2, pinned=((0, 1), (1, 7)))
    assert set(dict(pinned.stage(0).named_parameters())) == {"0.0.weight"}
    assert stages(Containers(), 2).parts[-1] == "head"
    assert stages(Plain(layers=3), 2).ties == {"embed.weight": (0, 1)}


def test_stages_give_what_the_module_gives() -> None:
    torch.manual_seed(0)
    model = staged_models.Crossing(random_skip=True)
    words, values = torch.randint(0, 16, (2, 5)), torch.randn(2, 4)
    for given in ([words, values], [words, values, torch.full((2, 1, 1), 2.0)]):
        names = ["words", "values", "weight"][: len(given)]
        parts = [made for made in [stages(model, 3, given=dict.fromkeys(names))] for made in map(made.stage, range(3))]
        for training in (True, False):
            torch.manual_seed(1)
            expected = model.train(training)(*given)
            torch.manual_seed(1)
            hidden: Any = None
            for part in parts:
                hidden = part.train(training).stage.call(part, hidden, given, {})  # type: ignore[union-attr, operator]
            assert torch.equal(hidden, expected)


@pytest.mark.parametrize(
    ("module", "count", "text"),
    [
        (
            "Branching",
            2,
            r"Branching cannot be cut into pipeline stages: its forward depends on values .*staged_models",
        ),
        ("LayerDrop", 2, "draws random numbers outside of its blocks; move that into one of its blocks"),
        ("Twice", 3, r"stages 1 and 2 both use inner\.(weight|bias); choose a parallel\.split"),
        ("Crossing", 9, r"has 7 parts with weights \(words, values, blocks\.0, .*makes 9 stages"),
    ],
)
def test_refusals(module: str, count: int, text: str) -> None:
    with pytest.raises(JobError, match=text):
        stages(getattr(staged_models, module)(), count)


def test_a_split_that_does_not_fit_is_refused() -> None:
    with pytest.raises(JobError, match=r"parallel.split=\[1, 2\] has 3 parts, and .*Crossing has 7"):
        stages(staged_models.Crossing(), 2, pinned=((0, 1), (1, 3)))
    with pytest.raises(JobError, match=r"parallel.split=\[3\] must have 2 numbers"):
        make_plan(with_layout(own("Crossing"), {"pp": 2, "split": [3]}))


def test_messages_of_several_tensors() -> None:
    value = (torch.randn(3), {"a": torch.arange(5), "b": [None, 2, torch.ones(2, 2, dtype=torch.bfloat16)]}, "x")
    boundary, tensors = Boundary.of(value)
    again = Boundary.from_bytes(boundary.to_bytes())
    assert again == boundary
    message = pack(tensors)
    assert (tuple(message.shape), message.dtype) == message_layout(boundary.tensors)
    rebuilt = again.value(unpack(message, again.tensors))
    assert torch.equal(rebuilt[0], value[0])
    assert torch.equal(rebuilt[1]["b"][2], value[1]["b"][2])
    assert (rebuilt[1]["b"][:2], rebuilt[2]) == ([None, 2], "x")
    assert boundary.trained == (boundary.tensors[0], boundary.tensors[2])
    with pytest.raises(JobError, match="gives a set to the next one"):
        Boundary.of({1, 2})


def test_blocks_that_are_lists_are_units() -> None:
    """A block that is an nn.Sequential is one unit, and its members are none."""
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(2))
    assert list(find_units(torch.nn.ModuleDict({"blocks": blocks}))) == ["blocks.0", "blocks.1"]


def test_the_schedule_of_an_own_module_can_be_drawn() -> None:
    job, plan = make_plan(with_layout(own("Crossing"), {"pp": 2, "schedule": "zbv", "microbatches": 4}))
    assert 0 < simulated(job, plan).bubble < 0.6


def test_build_does_not_change_the_module() -> None:
    job = own("Convolutions", "helpers.own_models:Pictures")
    module = build_model(job.model)
    before = list(module.state_dict())
    stages(module, 2).stage(1)
    assert list(module.state_dict()) == before

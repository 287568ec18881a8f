"""Checkpoints of real ranks: loaded under other layouts; an error on one rank reaches all."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.checkpoint.format import SavedCheckpoint, list_checkpoints, newest_good, read_meta, verify
from weft.checkpoint.reader import load_full
from weft.job.errors import JobError
from weft.launch.rank_pool import PRELOADED

Events = list[tuple[str, dict[str, Any]]]

# name → full tensor, how four ranks cut it, how a 2×2 mesh cuts it, how two ranks cut it
SHAPES: dict[str, tuple[torch.Tensor, list[Placement], list[Placement], list[Placement]]] = {
    "even": (torch.arange(32.0).view(8, 4), [Shard(0)], [Shard(0), Shard(1)], [Shard(1)]),
    "seven rows": (torch.arange(21.0).view(7, 3), [Shard(0)], [Shard(1), Shard(0)], [Shard(0)]),
    "an empty shard": (torch.arange(10.0).view(5, 2), [Shard(0)], [Shard(0), Shard(0)], [Shard(0)]),
    "one row": (torch.arange(5.0).view(1, 5), [Shard(0)], [Shard(0), Shard(0)], [Replicate()]),
    "no row": (torch.empty(0, 3), [Shard(0)], [Shard(0), Shard(1)], [Shard(0)]),
    "bfloat16": (torch.arange(12.0).view(3, 4).bfloat16(), [Shard(1)], [Replicate(), Shard(1)], [Shard(0)]),
    "int64": (torch.arange(9) << 40, [Shard(0)], [Shard(0), Replicate()], [Shard(0)]),
    "scalar": (torch.tensor(3.5), [Replicate()], [Replicate(), Replicate()], [Replicate()]),
    "replicated": (torch.arange(6.0), [Replicate()], [Shard(0), Replicate()], [Replicate()]),
}
PLAIN = {"plain": torch.arange(4.0), "step": torch.tensor(7, dtype=torch.int64), "flag": torch.tensor([True])}
WHOLE = {**{name: row[0] for name, row in SHAPES.items()}, **PLAIN}


class Ranks:
    """Arguments of a check: this rank, a shared folder, and the group of checkpoints."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.root = rank, world, folder
        self.group = dist.new_group(backend="gloo")
        self.events: Events = []
        self.line = init_device_mesh("cpu", (world,))

    def open(self, name: str, **options: Any) -> Checkpointer:
        self.events = []
        chosen = {"group": self.group, "keep": 3, "keep_every": 0, "background": True} | options
        return Checkpointer(self.root / name, on_event=lambda n, **fields: self.events.append((n, fields)), **chosen)

    def agree(self, ok: bool) -> bool:
        votes = torch.tensor(int(ok))
        dist.all_reduce(votes)
        return int(votes) == self.world


def cut(full: torch.Tensor, mesh: Any, placements: list[Placement]) -> DTensor:
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def layout(mesh: Any, column: int) -> dict[str, torch.Tensor]:
    """The full state, sharded by that column of SHAPES."""
    return {name: cut(row[0], mesh, row[column]) for name, row in SHAPES.items()} | {  # type: ignore[arg-type]
        name: tensor.clone() for name, tensor in PLAIN.items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wiped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors.values():
        local(tensor).zero_()
    return tensors


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(local(left[n]), local(right[n])) for n in left)


def four_cut_by_rows(ranks: Ranks) -> None:
    checkpoints = ranks.open("rows")
    checkpoints.save(100, layout(ranks.line, 1), {"from": "four"}, wait=True)
    assert [name for name, _ in ranks.events] == ["checkpoint_saved"]


def a_square_opens_it_and_writes_it_again(ranks: Ranks) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tensors = wiped(layout(square, 2))
    found = ranks.open("rows").load_newest(tensors)
    assert found is not None
    assert found.meta == {"from": "four"}
    assert same(tensors, layout(square, 2))
    ranks.open("square").save(101, tensors, {"from": "square"}, wait=True)
    back = wiped(layout(ranks.line, 1))
    assert ranks.open("square").load_newest(back) is not None
    assert same(back, layout(ranks.line, 1))


def fsdp_over_tp(ranks: Ranks) -> None:
    """fully_shard shards tensors that tensor parallelism has sharded: its placements are _StridedShard."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))

    def build(fill: bool) -> dict[str, torch.Tensor]:
        module = torch.nn.ParameterDict()
        for rows in (8, 7, 6, 5, 3):
            for dim in (0, 1):
                full = torch.arange(rows * 4.0).view(rows, 4) + rows if fill else torch.zeros(rows, 4)
                module[f"{rows}x4 cut by {dim}"] = torch.nn.Parameter(cut(full, square["tp"], [Shard(dim)]))
        fully_shard(module, mesh=square["dp_shard"])
        return dict(module.state_dict())

    tensors = build(True)
    assert any("Strided" in type(p).__name__ for p in tensors["8x4 cut by 0"].placements)  # type: ignore[attr-defined]
    checkpoints = ranks.open("fsdp")
    checkpoints.save(5, tensors, {}, wait=True)
    again = build(False)
    found = checkpoints.load_newest(again)
    assert found is not None, ranks.events
    assert same(again, tensors)
    for name, full in load_full(found.path).items():
        rows = int(name[0])
        assert torch.equal(full, torch.arange(rows * 4.0).view(rows, 4) + rows)


def any_shape_from_any_layout_to_any(ranks: Ranks) -> None:
    meshes = [ranks.line, init_device_mesh("cpu", (2, 2))]
    step = 0

    @st.composite
    def cases(draw: st.DrawFn) -> tuple[list[int], int, list[Placement], int, list[Placement]]:
        shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
        dims = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        chosen: list[Any] = [shape]
        for _ in range(2):
            which = draw(st.integers(0, 1))
            chosen += [which, [draw(st.sampled_from(dims)) for _ in range(meshes[which].ndim)]]
        return tuple(chosen)  # type: ignore[return-value]

    # Every rank must draw the same cases, and fail on the same one.
    @settings(derandomize=True, database=None, deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
    @given(cases(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]))
    def round_trip(case: Any, dtype: torch.dtype) -> None:
        nonlocal step
        step += 1
        shape, saved_on, saved_as, opened_on, opened_as = case
        full = (torch.arange(torch.Size(shape).numel()).view(shape) % 100).to(dtype)
        checkpoints = ranks.open("any", keep=1)
        checkpoints.save(step, {"x": cut(full, meshes[saved_on], saved_as)}, {}, wait=True)
        target = {"x": cut(torch.zeros_like(full), meshes[opened_on], opened_as)}
        found = checkpoints.load_newest(target)
        expected = cut(full, meshes[opened_on], opened_as).to_local().float()
        ok = found is not None and found.step == step and torch.equal(target["x"].to_local().float(), expected)
        assert ranks.agree(ok), (case, dtype, ranks.events)

    round_trip()


def training_goes_on_while_it_is_written(ranks: Ranks) -> None:
    """The default group is in use meanwhile, so a collective of the writer on it would get wrong data."""
    checkpoints = ranks.open("async", keep=2)
    weights = cut(torch.zeros(4 << 18), ranks.line, [Shard(0)])
    for step in (1, 2, 3):
        weights.to_local().fill_(step)
        checkpoints.save(step, {"w": weights}, {"step": step})
        weights.to_local().fill_(-1)
        for turn in range(20):
            total = torch.tensor(float(turn + ranks.rank))
            dist.all_reduce(total)
            assert total.item() == 4 * turn + 6
        checkpoints.poll()
    checkpoints.wait()
    assert [fields["step"] for name, fields in ranks.events if name == "checkpoint_saved"] == [1, 2, 3]
    dist.barrier()
    for path in list_checkpoints(checkpoints.folder):
        assert load_full(path)["w"].unique().tolist() == [read_meta(path)["step"]]
    assert len(list_checkpoints(checkpoints.folder)) == 2


def stages_hold_different_tensors(ranks: Ranks) -> None:
    """A pipeline: each rank has its own names, and one that all share."""
    checkpoints = ranks.open("stages")
    own = f"layer.{ranks.rank}"
    checkpoints.save(1, {own: torch.full((3,), float(ranks.rank)), "shared": torch.ones(2)}, {}, wait=True)
    tensors = {f"layer.{3 - ranks.rank}": torch.zeros(3), "shared": torch.zeros(2)}
    assert checkpoints.load_newest(tensors) is not None
    assert tensors[f"layer.{3 - ranks.rank}"].tolist() == [3 - ranks.rank] * 3
    assert tensors["shared"].tolist() == [1, 1]


def one_full_disk_fails_the_save_on_every_rank(ranks: Ranks) -> None:
    checkpoints = ranks.open("full")
    tensors = {"w": cut(torch.ones(64, 1024), ranks.line, [Shard(0)])}
    checkpoints.save(1, tensors, {}, wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    checkpoints.save(2, tensors, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    name, fields = ranks.events[-1]
    assert (name, fields["step"]) == ("checkpoint_failed", 2)
    limit = "no file may be larger than 10,000 bytes here; raise the limit with `ulimit -f unlimited`"
    assert fields["why"].startswith(f"rank 2: {checkpoints.folder}/step-00000002")
    assert fields["why"].endswith(f"/__2_0.distcp: File too large; {limit}")
    assert checkpoints.newest() == SavedCheckpoint(1, checkpoints.folder / "step-00000001", {})
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000001"]
    checkpoints.save(3, tensors, {}, wait=True)
    assert checkpoints.durable == 3


def a_disk_that_not_all_see_is_named(ranks: Ranks) -> None:
    checkpoints = ranks.open("node-b" if ranks.rank == 3 else "node-a")
    checkpoints.save(1, {"w": cut(torch.ones(64, 4), ranks.line, [Shard(0)])}, {}, wait=True)
    [(name, fields)] = ranks.events
    assert name == "checkpoint_failed"
    assert "__3_0.distcp is missing where rank 0 looks" in fields["why"]
    assert "must be one folder that every node sees" in fields["why"]
    dist.barrier()
    assert list(checkpoints.folder.iterdir()) == []


def damage_in_one_file_is_seen_by_all(ranks: Ranks) -> None:
    checkpoints = ranks.open("damage")
    tensors = {"w": cut(torch.ones(64, 4), ranks.line, [Shard(0)])}
    for step in (1, 2, 3):
        tensors["w"].to_local().fill_(step)
        checkpoints.save(step, tensors, {}, wait=True)
    if ranks.rank == 3:
        file = checkpoints.folder / "step-00000003" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        (checkpoints.folder / "step-00000002" / "__2_0.distcp").unlink()
    dist.barrier()
    checkpoints = ranks.open("damage")
    found = checkpoints.load_newest(tensors)
    assert found is not None
    assert found.step == 1
    assert tensors["w"].to_local().unique().tolist() == [1]
    assert [(name, fields["path"].name, fields["why"]) for name, fields in ranks.events] == [
        ("damaged", "step-00000003", "__1_0.distcp has another checksum than when it was written"),
        ("damaged", "step-00000002", "__2_0.distcp is missing"),
    ]


def a_misfit_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    checkpoints = ranks.open("rows")
    found = checkpoints.newest()
    assert found is not None
    odd = {"oddly": torch.zeros(1)} if ranks.rank == 1 else {}
    with pytest.raises(JobError, match="has no tensor 'oddly'"):
        checkpoints.load(found, layout(ranks.line, 1) | odd)
    odd = {"plain": torch.zeros(5)} if ranks.rank == 3 else {}
    with pytest.raises(JobError, match=r"'plain' as float32\[4\], and this job needs float32\[5\]"):
        checkpoints.load(found, layout(ranks.line, 1) | odd)


def what_would_be_wrong_is_not_saved(ranks: Ranks) -> None:
    checkpoints = ranks.open("wrong")
    checkpoints.save(1, {"x": torch.zeros(2 if ranks.rank == 1 else 3)}, {}, wait=True)
    name, fields = ranks.events.pop()
    assert name == "checkpoint_failed"
    assert "rank 1 gives 'x' as float32[2], another rank as float32[3]; two tensors need two names" in fields["why"]
    sums = DTensor.from_local(torch.ones(2), ranks.line, [Partial()], run_check=False)
    checkpoints.save(2, {"x": sums}, {}, wait=True)
    name, fields = ranks.events.pop()
    assert name == "checkpoint_failed"
    assert "partial" in fields["why"].lower()
    if ranks.rank == 0:
        alone = Checkpointer(
            ranks.root / "alone",
            group=None,
            keep=1,
            keep_every=0,
            background=True,
            on_event=lambda n, **f: ranks.events.append((n, f)),
        )
        alone.save(3, {"x": cut(torch.ones(8), ranks.line, [Shard(0)])}, {}, wait=True)
        assert "the ranks together hold only a part of 'x'" in ranks.events.pop()[1]["why"]
    assert checkpoints.newest() is None
    assert not checkpoints.folder.exists()


def two_open_what_four_and_what_one_wrote(ranks: Ranks) -> None:
    for name in ("rows", "square", "one"):
        tensors = wiped(layout(ranks.line, 3))
        found = ranks.open(name).load_newest(tensors)
        assert found is not None
        assert same(tensors, layout(ranks.line, 3)), name
    ranks.open("two").save(103, tensors, {"from": "two"}, wait=True)


def a_killed_rank_ends_the_save_and_not_the_others(ranks: Ranks) -> None:
    """The last check, after which only one rank is left."""
    checkpoints = ranks.open("killed")
    tensors = {"w": cut(torch.ones(64, 1024), ranks.line, [Shard(0)])}
    checkpoints.save(1, tensors, {}, wait=True)
    if ranks.rank == 1:

        def die(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and str(args[0]).endswith("__1_0.distcp"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
    checkpoints.save(2, tensors, {})
    checkpoints.wait()
    assert [(name, fields["step"]) for name, fields in ranks.events] == [
        ("checkpoint_saved", 1),
        ("checkpoint_failed", 2),
    ]


FOUR: list[Callable[[Ranks], None]] = [
    four_cut_by_rows,
    a_square_opens_it_and_writes_it_again,
    fsdp_over_tp,
    any_shape_from_any_layout_to_any,
    training_goes_on_while_it_is_written,
    stages_hold_different_tensors,
    one_full_disk_fails_the_save_on_every_rank,
    a_disk_that_not_all_see_is_named,
    damage_in_one_file_is_seen_by_all,
    a_misfit_on_one_rank_is_an_error_on_all,
    what_would_be_wrong_is_not_saved,
]
TWO: list[Callable[[Ranks], None]] = [
    two_open_what_four_and_what_one_wrote,
    a_killed_rank_ends_the_save_and_not_the_others,
]


def _rank(rank: int, world: int, folder: Path, checks: list[Callable[[Ranks], None]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    ranks, report = Ranks(rank, world, folder), {}
    for check in checks:
        report[check.__name__] = "began"
        _write_report(folder, rank, report)
        try:
            check(ranks)
            report[check.__name__] = "ok"
        except BaseException:
            report[check.__name__] = traceback.format_exc()
        _write_report(folder, rank, report)
        if report[check.__name__] != "ok" or check is checks[-1]:
            break
        dist.barrier()
    # Without Python's own ending, which would wait for groups whose other ranks may be gone.
    os._exit(0)


def _write_report(folder: Path, rank: int, report: dict[str, str]) -> None:
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


def _spawn(world: int, folder: Path, checks: list[Callable[[Ranks], None]]) -> dict[str, list[str]]:
    """Each check's outcome by rank."""
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    work = (world, folder, checks)
    started = mp.start_processes(_rank, args=work, nprocs=world, join=False, start_method="forkserver")
    for process in started.processes:
        process.join()
    reports = [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(world)]
    return {c.__name__: [report.get(c.__name__, "not reached") for report in reports] for c in checks}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, list[str]]:
    return _spawn(4, folder, FOUR)


@pytest.fixture(scope="module")
def one(folder: Path, four: dict[str, list[str]]) -> Checkpointer:
    checkpoints = Checkpointer(folder / "one", group=None, keep=1, keep_every=0, background=True)
    checkpoints.save(102, {name: tensor.clone() for name, tensor in WHOLE.items()}, {"from": "one"}, wait=True)
    return checkpoints


@pytest.fixture(scope="module")
def two(folder: Path, one: Checkpointer) -> dict[str, list[str]]:
    return _spawn(2, folder, TWO)


@pytest.mark.parametrize("check", [c.__name__ for c in FOUR])
def test_four_ranks(four: dict[str, list[str]], check: str) -> None:
    assert four[check] == ["ok"] * 4, "\n".join(four[check])


def test_two_ranks(two: dict[str, list[str]]) -> None:
    outcome = two["two_open_what_four_and_what_one_wrote"]
    assert outcome == ["ok"] * 2, "\n".join(outcome)


def test_a_killed_rank_fails_only_that_save(folder: Path, two: dict[str, list[str]]) -> None:
    outcome = two["a_killed_rank_ends_the_save_and_not_the_others"]
    assert outcome == ["ok", "began"], outcome[0]
    events: Events = []
    found = Checkpointer(
        folder / "killed",
        group=None,
        keep=1,
        keep_every=0,
        background=True,
        on_event=lambda name, **fields: events.append((name, fields)),
    ).newest()
    assert found is not None
    assert found.step == 1
    [(name, fields)] = events
    assert name == "damaged"
    assert fields["path"].name.startswith("step-00000002.tmp-")
    assert fields["why"] == "half-written: its save was interrupted; left alone, since no newer checkpoint is good"


@pytest.mark.parametrize("name", ["rows", "square", "one", "two"])
def test_one_process_loads_checkpoints_of_any_number_of_ranks(
    folder: Path, two: dict[str, list[str]], name: str
) -> None:
    found = newest_good(folder / name)
    assert found is not None
    assert verify(found.path) is None
    assert same(load_full(found.path), WHOLE)
    tensors = wiped({name: tensor.clone() for name, tensor in WHOLE.items()})
    checkpoints = Checkpointer(folder / name, group=None, keep=1, keep_every=0, background=False)
    assert checkpoints.load_newest(tensors) == found
    assert same(tensors, WHOLE)

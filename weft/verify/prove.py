"""The proof that every layout is the same run: one process and each layout, step by step, gradient by gradient."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.hardware.probe import probe
from weft.hardware.shared_devices import multi_process_service
from weft.job.errors import FitError, MachineError, WeftError
from weft.job.load import parse_job
from weft.job.parallel import Parallel
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankFailed, RankPool
from weft.planner import RUNNABLE, Plan, check, make_plan
from weft.planner.model.counts import count_parameters
from weft.planner.rules.layout_syntax import parse_layouts, ranks
from weft.verify.compare import ROUNDED, Trace, Verdict, compare, tolerance_name
from weft.verify.small_job import small
from weft.verify.traced_run import AS_IT_IS, IN_STEP, Variant, trace

DEFAULT_LAYOUTS = (
    "ddp2", "zero1", "zero2", "zero3", "tp2", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "hsdp", "pp2", "pp2 zbv",
    "pp2 dp_shard=2", "pp2 tp2", "cp2 ring", "cp2 ulysses", "cp2 dp_shard=2", "cp2 tp2", "dp_shard=2 ep=2",
    "tp2 ep2", "cp2 ep2", "pp2 dp_shard=2 ep=2",
)  # fmt: skip

TOWER_LAYOUTS = ("image:tp2 text:shard2", "image:ranks=0 text:ranks=1")
"""Layouts of models with towers besides the default ones."""

ADAM_EPS = 1e-6
"""Adam divides a gradient by its own size, so one that is zero but for rounding (a key's bias) would become a full step
of noise. With this the update stays a smooth function of the gradient, and a wrong gradient still shows."""


STYLES = {
    "cp": ("cp_style",), "pp": ("schedule", "virtual_stages"), "tp": ("sequence",), "ep": ("ep_exchange", "ep_overlap"),
}  # fmt: skip
"""Settings of how an axis works, which a layout takes from the job if it names none of them."""


def styles_of(job: Job, section: dict[str, Any]) -> dict[str, Any]:
    """The STYLES that the job sets itself, of the axes that a layout uses."""
    if not isinstance(job.parallel, Parallel):
        return {}
    used = [styles for axis, styles in STYLES.items() if section.get(axis, 1) != 1 and not section.keys() & set(styles)]
    given = job.parallel.model_dump(exclude_unset=True)
    return {name: given[name] for styles in used for name in styles if name in given}


def with_layout(job: Job, section: dict[str, Any]) -> Job:
    """The job on local ranks in one layout: CPU ranks, or ranks that share the GPUs if the job has device=cuda."""
    raw = resolve(job).model_dump(mode="json")
    raw["parallel"] = styles_of(job, section) | section
    device = "cuda" if job.cluster.device == "cuda" else "cpu"
    raw["cluster"] = {"device": device, "devices_per_node": ranks(section), "share_devices": device == "cuda"}
    raw["optim"]["eps"] = max(raw["optim"]["eps"], ADAM_EPS)
    raw["data"]["record_ids"] = False
    raw["train"]["sync"] = "step"  # a layout is proven by the gradients of a step
    if raw["train"]["compile"] == "auto":  # minutes for each layout, and the same mathematics
        raw["train"]["compile"] = False
    return parse_job(raw)


def prove(
    job: Job, layouts: list[str], steps: int = 3, shrink: bool = False,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None, pool: RankPool | None = None,
) -> list[Verdict]:  # fmt: skip
    """Compare each layout with one process. Without layouts, every one of DEFAULT_LAYOUTS that the job allows.

    Gradients are not compressed, since compression changes them, and no metric but the loss is evaluated. Random
    numbers that a user module draws depend on the rank, so they are replaced by their means.
    """
    comm, train = job.comm.model_copy(update={"compression": "none"}), job.train.model_copy(update={"metrics": []})
    job = job.model_copy(update={"comm": comm, "train": train})
    towers = TOWER_LAYOUTS if resolve(job).model.towers else ()
    named = parse_layouts(layouts or (*DEFAULT_LAYOUTS, *towers))
    job = small(job) if shrink else job
    reference_job, plan = _one_process(job)
    check_proof_fits(reference_job, plan, steps)
    refused = [verdict for name, section in named if (verdict := _refusal(job, name, section)) is not None]
    verdicts: list[Verdict] = []
    if len(refused) == len(named):  # there is nothing to compare one process with
        for verdict in refused if layouts else ():
            verdicts.append(verdict)
            on_verdict(verdict)
        return verdicts
    with (
        open_pool(job, max(ranks(section) for _, section in named)) if pool is None else nullcontext(pool) as pool,
        tempfile.TemporaryDirectory(prefix="weft-prove-") as folder,
    ):
        reference = _run(pool, reference_job, 1, steps, folder)
        if reference.batch_norms and (job.train.accumulation, job.train.microbatch) == ("auto", "auto"):
            # statistics are of one microbatch of every rank, which holds other samples than one of one process
            job = job.model_copy(update={"train": job.train.model_copy(update={"accumulation": 1})})
            if plan.accumulation > 1:
                reference_job, plan = _one_process(job)
                reference = _run(pool, reference_job, 1, steps, folder)
        draws = bool(reference.generators)
        if draws:
            reference = _run(pool, reference_job, 1, steps, folder, None, Variant(mean_draws=True))
        checker = LayoutChecker(pool, job, plan, steps, folder, reference, draws)
        for name, section in named:
            verdict = checker.verdict(name, section)
            if verdict.verdict == "refused" and not layouts:
                continue
            verdicts.append(verdict)
            on_verdict(verdict)
    return verdicts


def _one_process(job: Job) -> tuple[Job, Plan]:
    """The job and its plan without any parallelism."""
    return _plan_layout(job, {"dp_replicate": 1, "dp_shard": 1})


def _plan_layout(job: Job, section: dict[str, Any]) -> tuple[Job, Plan]:
    """The job in one layout, and its plan."""
    job, plan = make_plan(with_layout(job, section))
    check(job, plan, RUNNABLE)
    return job, plan


def _refusal(job: Job, name: str, section: dict[str, Any]) -> Verdict | None:
    """The verdict of a layout that the job does not allow, else None."""
    try:
        _plan_layout(job, section)
    except WeftError as error:
        return Verdict(name, ranks(section), "refused", why=str(error))
    return None


def check_proof_fits(job: Job, plan: Plan, steps: int) -> None:
    """Refuse a proof whose reference does not fit into this machine's memory: what one process trains, and fp32 copies
    of the weights before and after, the moments and the gradients of every step."""
    counts = None if job.model.module else count_parameters(job.model)
    if counts is None:
        return
    trained = plan.predicted.get("states_gib", 0.0) if plan.device == "cpu" else 0.0
    needed = trained + 4 * counts.total * (4 + steps) / 2**30
    if needed > (limit := probe().memory_gib):
        raise FitError(
            f"the proof of a model of {counts.total / 1e9:.1f}B parameters over {steps} steps needs {needed:.1f} GiB "
            f"of host memory, and this machine has {limit:.1f}; --shrink proves a small model of the same kind"
        )


@contextmanager
def open_pool(job: Job, world: int) -> Iterator[RankPool]:
    """Local ranks for a proof. Ranks that share a GPU run under NVIDIA's multi-process service where it is found."""
    shared = job.cluster.device == "cuda" and len(probe().gpus) < world
    service: AbstractContextManager[dict[str, str]] = multi_process_service() if shared else nullcontext({})
    with service as environment, RankPool(job.comm.timeout_s, environment) as pool:
        yield pool


def describe_ranks(job: Job, world: int) -> str:
    """The devices of up to `world` ranks of a proof, as text."""
    if job.cluster.device != "cuda":
        return "local CPU ranks"
    gpus = len(probe().gpus)
    if gpus == 0:
        raise MachineError("--device cuda needs an NVIDIA GPU, and this machine has none; --device cpu would work")
    if world <= gpus:
        return f"up to {world} of {gpus} GPUs, one rank each, over NCCL"
    return f"up to {world} NCCL ranks that share {gpus} GPU{'s' if gpus > 1 else ''}"


@dataclass
class LayoutChecker:
    """Runs layouts and compares them with one process. A layout that differs is run again in step with one process
    (Variant.in_step). After the first that still differs, another run of one process shows how much rounding explains:
    in bf16, in fp16 and with activations in fp8 it is run in fp32, and in fp32 from weights that differ in their last
    bits."""

    pool: RankPool
    job: Job
    plan: Plan
    """Of one process."""
    steps: int
    folder: str
    """Of the reference run."""
    reference: Trace
    mean_draws: bool = False
    """Whether random numbers of a user module are replaced by their means."""
    leader: Trace | None = None
    """The reference run again, whose weights of each step are in `folder`."""
    exact: Trace | None = None

    def verdict(self, name: str, section: dict[str, Any]) -> Verdict:
        world = ranks(section)
        try:
            spread, plan = _plan_layout(self.job, section)
            name = plan.layout() + (f" split {section['split']}" if "split" in section else "")
            other = self._trace(spread, world)
            found = self._compare(name, world, self.reference, other)
            if found.verdict == "differs" and self.steps > 1:
                if self.leader is None:
                    self.leader = _run(self.pool, _one_process(self.job)[0], 1, self.steps, self.folder, None,
                                       replace(IN_STEP, mean_draws=self.mean_draws))  # fmt: skip
                other = self._trace(spread, world, IN_STEP)
                found = self._compare(name, world, self.leader, other)
            precision = tolerance_name(self.plan)
            if found.verdict == "differs" and self.exact is None and precision in ROUNDED:
                memory = self.job.memory.model_copy(update={"activations": "exact"})
                exact, _ = _one_process(self.job.model_copy(update={"precision": "fp32", "memory": memory}))
                self.exact = self._trace(exact, 1, Variant(round_weights=precision == "fp32"))
                found = self._compare(name, world, self.leader or self.reference, other)
            return found
        except RankFailed as failure:  # the pool has replaced its ranks, so other layouts can still be proven
            return Verdict(name, world, "failed", why=str(failure))
        except WeftError as error:
            return Verdict(name, world, "refused", why=str(error))

    def _compare(self, name: str, world: int, reference: Trace, other: Trace) -> Verdict:
        return compare(name, world, reference, other, tolerance_name(self.plan), self.exact)

    def _trace(self, job: Job, world: int, variant: Variant = AS_IT_IS) -> Trace:
        with tempfile.TemporaryDirectory(prefix="weft-prove-") as folder:
            variant = replace(variant, mean_draws=self.mean_draws)
            return _run(self.pool, job, world, self.steps, folder, self.folder, variant)


def _run(
    pool: RankPool, job: Job, world: int, steps: int, folder: str, reference: str | None = None,
    variant: Variant = AS_IT_IS,
) -> Trace:  # fmt: skip
    try:
        pool.run(trace, world, job, steps, folder, reference, variant)
    except RankFailed as failure:
        if isinstance(failure.error, WeftError):  # an error that only a rank can find
            raise failure.error from None
        raise
    return Trace.load(Path(folder))

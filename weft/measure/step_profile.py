"""`weft bench step`: the job's own session on its own ranks, a few steps timed and a few profiled."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from weft.comm.shards import local_of
from weft.data.loader import to_device
from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.measure.device_peaks import measure_roofs
from weft.measure.short_run import short_run
from weft.measure.torch_internals import is_compiled
from weft.planner.model.counts import attention_per_token, count_parameters, flops_per_sample, flops_per_token
from weft.planner.model.reference_rate import peak_flops
from weft.planner.time.traffic import communication_bytes
from weft.precision import COMPUTE_DTYPES
from weft.training.metrics import StepMetrics, peak_memory_gib, utilization
from weft.training.session import Session
from weft.training.stop_requests import Signals
from weft.watch.kernel_profile import StepFacts, from_json, summarise, table, to_json
from weft.watch.profiler_trace import ProfilerTrace, read_trace
from weft.watch.report import write_report

WARMUP_STEPS, TIMED_STEPS = 4, {"cpu": 4, "cuda": 12}
"""Steps before the measurement, and steps timed without the profiler."""
SUFFIX = "-bench"


def bench_step(job: Job, nproc: int | None, steps: int, report: Callable[[str], None]) -> tuple[int, RunDir]:
    """Profile a job in a run of its own, runs/NAME-bench. Returns the exit code and the run."""
    total = WARMUP_STEPS + max(TIMED_STEPS.values()) + steps + 2
    code, run, _ = short_run(job, nproc, SUFFIX, total, report, worker=("weft.measure.step_profile", str(steps)))
    if code == Exit.DONE:
        write_report(run)
    return code, run


def show(run: RunDir) -> str:
    """The content of profile.json, for a terminal."""
    found = json.loads(run.profile.read_text(encoding="utf-8"))
    roofs = found["roofs"]
    head = f"{found['layout']} on {found['device']}, {found['precision']}: {found['step_ms']:.2f} ms a step"
    if found["tokens_per_s"]:
        head += f", {found['tokens_per_s']:,.0f} tokens/s"
    head += f", MFU {found['mfu']:.1%}" if found["mfu"] else ""
    known = [
        f"{what} {value:,.3g} {unit}"
        for what, value, unit in (
            ("products", roofs["tflops"], "TFLOP/s"),
            ("fp8 products", roofs["low_tflops"], "TFLOP/s"),
            ("data sheet", found["catalog_tflops"], "TFLOP/s"),
            ("memory", roofs["memory_gb_s"], "GB/s"),
            ("link", roofs["link_gb_s"], "GB/s"),
        )
        if value
    ]
    lines = [head, f"roofs: {', '.join(known)}", "", *table(from_json(found["ranks"][0]["classes"]))]
    if len(found["ranks"]) > 1:
        lines.append(f"(rank 0 of {len(found['ranks'])}; the others are in {run.profile} and in {run.report})")
    return "\n".join(lines)


def measure(session: Session, signals: Signals, steps: int) -> Exit:
    """Warm up, time some steps, profile some more, and write profile.json."""
    job, plan, mesh = session.job, session.plan, session.mesh
    write = session.journal.metrics if session.journal else (lambda record: None)
    metrics = StepMetrics(job, plan, mesh, session.state, write, signals, session.guards)
    session.event("start", step=0, layout=plan.layout(), world=plan.world)
    with closing(session.loader()) as loader:

        def take_steps(count: int) -> float:
            """Take steps as the loop does, from idle device to idle device. Returns seconds per step."""
            mesh.barrier()
            began = time.perf_counter()
            with record_function("weft.window"):
                for _ in range(count):
                    _step(session, loader, metrics)
                metrics.settle()
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        metrics.start_clock()
        take_steps(WARMUP_STEPS)
        seconds = take_steps(TIMED_STEPS.get(mesh.device.type, TIMED_STEPS["cuda"]))
        if mesh.device.type == "cuda":
            with _profiling(mesh.device):  # the first one starts the tracer, which is slow
                take_steps(1)
        with _marked_loss(session), _profiling(mesh.device) as profiler:
            take_steps(steps)
    roofs = measure_roofs(plan, mesh.device, COMPUTE_DTYPES[plan.precision])
    rows = summarise(_read(profiler), steps, seconds * 1e3, facts_of(session), roofs)
    mine = {
        "rank": mesh.rank, "position": mesh.position, "peak_memory_gib": peak_memory_gib(mesh.device),
        "classes": to_json(rows),
    }  # fmt: skip
    everyone = mesh.all_gather_json(mine)
    if mesh.rank == 0:
        sample = flops_per_sample(job.model, job.data.seq_len)
        peak = peak_flops(plan, job)
        flops = sample * job.train.global_batch if sample else None
        found = {
            "job": job.name, "layout": plan.layout(), "device": plan.device_name, "precision": plan.precision,
            "step_ms": seconds * 1e3, "profiled_steps": steps,
            "tokens_per_s": _tokens(job) / seconds if job.model.takes_tokens else None,
            "mfu": utilization(flops, seconds, peak, plan.world),
            "catalog_tflops": peak / 1e12 if peak else None,
            "roofs": vars(roofs), "ranks": everyone,
        }  # fmt: skip
        session.run.profile.write_text(json.dumps(found, indent=1), encoding="utf-8")
    session.event("done", step=session.state.step)
    return Exit.DONE


def _step(session: Session, loader: Iterator[Any], metrics: StepMetrics) -> None:
    """One step of the loop, with its parts marked in the trace."""
    stepper, device = session.stepper, session.mesh.device
    lr = stepper.learning_rate()
    with record_function("weft.data"):
        batches = [to_device(b, device) for b in next(loader)]
    with record_function("weft.gradients"):
        grads = stepper.gradients(batches)
    with record_function("weft.update"):
        norm, _ = stepper.update(grads, lr)
    with record_function("weft.figures"):
        metrics.post(grads, norm, lr)


def _profiling(device: torch.device) -> profile:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=kinds, record_shapes=True)


def _read(profiler: profile) -> ProfilerTrace:
    with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


@contextmanager
def _marked_loss(session: Session) -> Iterator[None]:
    """Mark the heads in the trace, so that the loss is distinguished from the rest of the forward pass."""
    open_ranges: list[record_function] = []

    def begin(module: nn.Module, args: Any) -> None:
        open_ranges.append(record_function("weft.loss"))
        open_ranges[-1].__enter__()

    def end(module: nn.Module, args: Any, out: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    heads = [h for h in _heads(session) if not is_compiled(h)]  # a hook would recompile it
    handles = [h.register_forward_pre_hook(begin) for h in heads]
    handles += [h.register_forward_hook(end) for h in heads]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tokens(job: Job) -> int:
    return job.train.global_batch * (job.model.sample_positions(job.data.seq_len))


def facts_of(session: Session) -> StepFacts:
    """Bytes and FLOPs of one step of this rank, from the job and the plan."""
    job, plan = session.job, session.plan
    model, width = job.model, COMPUTE_DTYPES[plan.precision].itemsize
    master_params = session.state.model.master_params.values()
    held = sum(local_of(m).numel() for m in master_params)
    copies = width if width < 4 and plan.dp_shard == 1 else 0
    update = held * (width + 2 * 4 * OPTIMIZERS[job.optim.name].state_per_parameter(job.optim) + 8 + copies)
    tokens = _tokens(job) / plan.dp / plan.cp
    targets = tokens / job.data.seq_len if model.labels_samples else tokens
    ends = session.mesh.coord("pp") == plan.pp - 1 or plan.pp == 1 or bool(_heads(session))
    loss = 2 * targets * model.outputs / plan.tp * width if ends and count_parameters(model) else 0.0
    total = flops_per_token(model, job.data.seq_len)
    attention = attention_per_token(model, job.data.seq_len) if total else 0.0
    share = tokens / plan.tp / plan.pp
    return StepFacts(
        bool(model.causal), (total - attention) * share if total else None,
        attention * share * 7 / 6 or None,  # backward recomputes the scores: seven products where six are counted
        update, loss, sum(communication_bytes(job, plan).values()),
    )  # fmt: skip


def _heads(session: Session) -> list[nn.Module]:
    """The heads on this rank."""
    found = [getattr(part.module, "head", None) for part in session.state.model.parts]
    return [head for head in found if isinstance(head, nn.Module)]


if __name__ == "__main__":
    from weft.training.rank import exit_process, run_launched_rank

    count = int(sys.argv[2])
    exit_process(run_launched_rank(lambda session, signals: measure(session, signals, count)))

"""Prove every layout and pipeline schedule on NCCL ranks that share one GPU, against one rank, in fp32, bf16 and fp8.

    python bench/gpu_proof.py                 # writes bench/gpu-proof.md and .json
    python bench/gpu_proof.py --device cpu --precisions fp32 --only pp     # the same over Gloo, to try the script

Each layout is connected once and run in every precision on a mesh of four ranks. A layout that hangs is ended after
--timeout seconds with the stacks of its ranks in the log, and the next one goes on with new processes.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_common import facts, make_parser, parse, write_results

from weft.hardware.shared_devices import multi_process_service
from weft.job import apply_overrides, parse_job
from weft.job.errors import WeftError
from weft.job.schema import Job
from weft.launch.rank_pool import RankFailed, RankPool
from weft.mesh import connect
from weft.planner import RUNNABLE, Plan, check, make_plan
from weft.planner.rules.layout_syntax import parse_layout, ranks
from weft.verify.compare import TOLERANCE, TRACE_FILE, Trace, compare
from weft.verify.prove import with_layout
from weft.verify.traced_run import AS_IT_IS, IN_STEP, Variant, trace_on

PRECISIONS = ("fp32", "bf16", "fp8")
MODEL: dict[str, Any] = {
    "family": "llama", "dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 512, "vocab": 512,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"count": 8, "top_k": 2, "ffn": 128}
T5: dict[str, Any] = {"family": "t5", "dim": 256, "layers": 4, "heads": 8, "ffn": 512, "vocab": 512}
BASE: dict[str, Any] = {
    "data": {"source": "synthetic", "seq_len": 128},
    "train": {"global_batch": 16, "steps": 10, "compile": False},
    "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "clip": 0.5},
    "comm": {"timeout_s": 60},
}
LATENT: dict[str, Any] = {
    "family": "llama", "dim": 256, "layers": 8, "heads": 8, "head_dim": 48, "rope_dim": 16, "ffn": 512, "vocab": 512,
    "latent": {"q_rank": 96, "kv_rank": 64, "v_dim": 32},
}  # fmt: skip
DENSE = (
    "pp4 naive microbatches=4", "pp4 gpipe microbatches=8", "pp4 1f1b microbatches=8",
    "pp4 interleaved-1f1b microbatches=8", "pp4 zb-h1 microbatches=8", "pp4 zbv microbatches=8",
    "pp4 dualpipe-v microbatches=8", "pp2 interleaved-1f1b tp2 microbatches=4", "pp2 1f1b dp_shard=2 zero=3",
    "pp2 zb-h1 dp_shard=2 zero=3 microbatches=4", "pp2 zbv dp_shard=2 zero=2 microbatches=4", "pp2 gpipe cp2 ring",
    "pp2 zbv cp2 ulysses microbatches=4", "pp2 dualpipe-v tp2 microbatches=4",
    "pp2 dualpipe-v dp_replicate=2 microbatches=4", "pp2 naive tp2 microbatches=4",
    "dp_replicate=4", "dp_shard=4 zero=1", "dp_shard=4 zero=2", "dp_shard=4 zero=3", "dp_replicate=2 dp_shard=2",
    "tp4", "tp2 dp_shard=2", "tp2 dp_replicate=2", "cp4 ring", "cp4 ulysses", "cp2 ring dp_shard=2", "cp2 ring tp2",
)  # fmt: skip
MIXED = (
    "dp_shard=4 ep=4", "dp_shard=2 tp2 ep=2", "cp2 dp_shard=2 ep=4", "pp2 1f1b dp_shard=2 ep=2",
    "pp2 zbv dp_shard=2 ep=2 microbatches=4", "pp2 dualpipe-v dp_shard=2 ep=2 microbatches=4",
)  # fmt: skip
"""Layouts of a model with experts."""
ENCODER_DECODER = (
    "tp4", "dp_shard=4 zero=3", "cp4 ring", "cp4 ulysses", "cp2 ring tp2", "cp2 ring dp_shard=2",
    "pp2 1f1b cp2 ring", "pp2 zbv cp2 ulysses microbatches=4",
)  # fmt: skip
WITH_LATENT = (
    "tp4", "dp_shard=4 zero=3", "cp4 ring", "cp4 ulysses", "cp2 ring tp2", "pp2 1f1b tp2",
    "pp2 zbv cp2 ring microbatches=4",
)  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense": (MODEL, DENSE),
    "experts": ({**MODEL, "experts": EXPERTS}, MIXED),
    "T5": (T5, ENCODER_DECODER),
    "latent attention": (LATENT, WITH_LATENT),
}


def job_for(model: dict[str, Any], precision: str, device: str) -> Job:
    raw = {**BASE, "model": model, "precision": precision, "cluster": {"device": device}}
    return parse_job(apply_overrides(raw, ()))


def run_layout(
    runs: list[tuple[str, Job, Plan]], steps: int, folder: str, reference: str | None, variant: Variant
) -> dict[str, str]:
    """On a rank: connect once, then a few steps in every precision. Returns what failed, by precision."""
    began = time.perf_counter()
    mesh = connect(runs[0][2], runs[0][1].comm.timeout_s)
    connected = time.perf_counter() - began
    failed = {}
    for precision, job, plan in runs:
        own = Path(folder) / precision
        try:
            compared = None if reference is None else f"{reference}/{precision}"
            trace_on(mesh, job, plan, steps, str(own), compared, variant)
        except (WeftError, RuntimeError) as error:
            if mesh.world > 1:
                raise
            failed[precision] = f"{type(error).__name__}: {error}"
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
    return failed | {"connect_s": f"{connected:.2f}"}


def start_and_step(job: Job, plan: Plan, folder: str) -> None:
    """On a rank: one start of a run and its first step."""
    trace_on(connect(plan, job.comm.timeout_s), job, plan, 1, folder)


def planned(job: Job, layout: str) -> tuple[Job, Plan]:
    section = {"dp_replicate": 1, "dp_shard": 1} if layout == "1" else parse_layout(layout)
    spread, plan = make_plan(with_layout(job, section))
    check(spread, plan, RUNNABLE)
    return spread, plan


class Proof:
    """The rows of the table, made one layout at a time."""

    def __init__(self, asked: argparse.Namespace, pool: RankPool, folder: Path):
        self.asked, self.pool, self.folder = asked, pool, folder
        self.deadline = time.monotonic() + asked.budget
        self.rows: list[dict[str, Any]] = []
        self.log: list[str] = []

    def run(self, model: dict[str, Any], layouts: tuple[str, ...], name: str) -> None:
        reference = self.folder / f"{name}-1"
        found = self._run(
            model, "1", reference, None, self.asked.precisions, IN_STEP
        )  # writes the weights of each step
        self.note(f"{name}: one rank: {found}")
        traces = {p: load(reference / p) for p in self.asked.precisions}
        for layout in layouts:
            if self.asked.only and not any(o in layout for o in self.asked.only.split(",")):
                continue
            self._prove(model, layout, name, reference, traces)

    def _run(
        self, model: dict[str, Any], layout: str, folder: Path, reference: Path | None, precisions: list[str],
        variant: Variant,
    ) -> dict[str, str]:  # fmt: skip
        runs, refused = [], {}
        for precision in precisions:
            (folder / precision).mkdir(parents=True, exist_ok=True)
            try:
                runs.append((precision, *planned(job_for(model, precision, self.asked.device), layout)))
            except WeftError as error:
                refused[precision] = f"refused: {error}"
        if not runs:
            return refused
        results = self.pool.run(
            run_layout, runs[0][2].world, runs, self.asked.steps, str(folder), reference and str(reference), variant,
        )  # fmt: skip
        return refused | results[0]

    def _prove(
        self, model: dict[str, Any], layout: str, name: str, reference: Path, traces: dict[str, Trace | None]
    ) -> None:
        row: dict[str, Any] = {"model": name, "layout": layout, "ranks": ranks(parse_layout(layout)), "by": {}}
        self.rows.append(row)
        began = time.monotonic()
        if began > self.deadline:
            row["by"] = {p: {"verdict": "not run"} for p in self.asked.precisions}
            return
        folder = self.folder / f"{name}-{len(self.rows)}"
        try:
            found = self._run(model, layout, folder, reference, self.asked.precisions, AS_IT_IS)
        except (RankFailed, WeftError) as error:
            lines = str(error).strip().splitlines()
            found = {}
            row["why"] = lines[-1][:300]
            self.note(f"{layout}: FAILED\n{error}"[:20000])
        row["connect_s"] = float(found.pop("connect_s", 0))
        for precision in self.asked.precisions:
            one, other = traces[precision], load(folder / precision)
            if precision in found:
                row["by"][precision] = {"verdict": found[precision].split(":")[0], "why": found[precision]}
            elif one is None or other is None:
                row["by"][precision] = {"verdict": "failed", "why": row.get("why", "the reference failed")}
            else:
                v = compare(layout, row["ranks"], one, other, precision)
                if v.verdict == "differs":  # as in weft prove: again, in step with one rank
                    self.note(f"{layout}, {precision}: {', '.join(v.differs)} differ; again in step with one rank")
                    self._run(model, layout, folder, reference, [precision], IN_STEP)
                    v = compare(layout, row["ranks"], one, load(folder / precision) or other, precision)
                row["by"][precision] = {
                    "verdict": v.verdict, "loss": v.max_loss_diff, "grad": v.max_grad_diff, "norm": v.grad_norm_diff,
                    "worst": v.worst_parameter, "differs": v.differs, "param": v.param_diff, "size": v.size_diff,
                    "first_grad": first_step(one, other),
                }  # fmt: skip
        row["seconds"] = time.monotonic() - began
        self.note(f"{layout:42} {row['seconds']:5.1f} s (connect {row['connect_s']:.1f}) " + "  ".join(
            f"{p} {x['verdict']} {x.get('grad') or 0:.1e}" for p, x in row["by"].items()))  # fmt: skip

    def starts(self, layout: str, count: int) -> str:
        """Start a run and take its first step, over and over."""
        done, slowest, why = 0, 0.0, ""
        spread, plan = planned(job_for(MODEL, "bf16", self.asked.device), layout)
        while done < count and time.monotonic() < self.deadline:
            began = time.monotonic()
            try:
                self.pool.run(start_and_step, plan.world, spread, plan, str(self.folder))
            except RankFailed as error:
                why = str(error)
                self.note(f"start {done + 1} of {layout}: {error} {error.__notes__}"[:20000])
                break
            done, slowest = done + 1, max(slowest, time.monotonic() - began)
        return f"{layout}: {done} starts of {count}, slowest {slowest:.1f} s{why and ', then: '}{why}"

    def note(self, text: str) -> None:
        self.log.append(text)
        print(text, flush=True)


def first_step(one: Trace, other: Trace) -> float:
    """The largest difference of a parameter's gradient in the first step, before any update."""
    single = [replace(t, losses=t.losses[:1], norms=t.norms[:1], gradients=t.gradients[:1]) for t in (one, other)]
    return compare("", 1, single[0], single[1], "fp32").max_grad_diff or 0.0


def load(folder: Path) -> Trace | None:
    return Trace.load(folder) if (folder / TRACE_FILE).exists() else None


def page(about: dict[str, str], rows: list[dict[str, Any]], precisions: list[str], starts: list[str]) -> str:
    shared = "NCCL ranks that share one GPU" if about["NCCL"] != "none" else "Gloo ranks on the CPU"
    lines = [
        "# Every layout on shared NCCL ranks", "",
        f"Made by `python bench/gpu_proof.py`: {shared}, against one rank. Largest relative differences over the "
        "steps; each gradient is compared to its own norm. `g₁` is that of the first step. A run "
        "beyond the tolerance is repeated in step with one rank, as by `weft prove`.", "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "- tolerance of gradients, and of losses, norms and sizes: "
        + ", ".join(f"{p} {TOLERANCE[p].gradient:g} and {TOLERANCE[p].size:g}" for p in precisions), "",
        "| layout | ranks | " + " | ".join(f"{p}: Δloss · Δgradient · g₁ · Δnorm | verdict" for p in precisions) + " |",
        "|---|---:|" + "---|---|" * len(precisions),
    ]  # fmt: skip
    for row in rows:
        cells = []
        for p in precisions:
            x = row["by"][p]
            if "grad" in x:
                cells += [f"{x['loss']:.0e} · {x['grad']:.0e} · {x['first_grad']:.0e} · {x['norm']:.0e}", x["verdict"]]
            else:
                cells += ["–", x["verdict"]]
        name = row["layout"] + ("" if row["model"] == "dense" else f" ({row['model']})")
        lines.append(f"| {name} | {row['ranks']} | " + " | ".join(cells) + " |")
    verdicts = [x["verdict"] for row in rows for x in row["by"].values()]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    lines += ["", f"{len(verdicts)} proofs: {counted}.", *([""] if starts else []), *(f"- {s}" for s in starts)]
    whys = dict.fromkeys(f"- {r['layout']}, {p}: {x['why']}" for r in rows for p, x in r["by"].items() if "why" in x)
    return "\n".join([*lines, *([""] if whys else []), *whys]) + "\n"


def main() -> int:
    parser = make_parser(__doc__, "gpu-proof")
    parser.add_argument("--precisions", default=list(PRECISIONS), type=lambda s: s.split(","))
    parser.add_argument("--models", default=list(MODELS), type=lambda s: s.split(","))
    parser.add_argument("--only", default="", help="layouts that contain one of these words, separated by commas")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=45.0, help="seconds for one layout")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds for all")
    parser.add_argument("--starts", type=int, default=0, help="starts of pp4 1f1b and pp2 zbv × dp_shard 2 at the end")
    parser.add_argument("--no-mps", action="store_true", help="let ranks take turns on the GPU")
    asked = parse(parser)
    stacks = (asked.to / "gpu-proof-stacks.txt").open("w")
    faulthandler.dump_traceback_later(asked.budget + 3 * asked.timeout, file=stacks, exit=True)
    about, starts = facts(asked), []
    mps = multi_process_service() if asked.device == "cuda" and not asked.no_mps else tempfile.TemporaryDirectory()
    with mps as service, tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        environment = service if isinstance(service, dict) else {}
        about["MPS"] = "yes" if environment else "no"
        print(about, flush=True)
        with RankPool(asked.timeout, environment) as pool:
            proof = Proof(asked, pool, Path(folder))
            try:
                for name, (model, layouts) in MODELS.items():
                    if name in asked.models:
                        proof.run(model, layouts, name)
                for layout in (
                    ("pp4 1f1b microbatches=8", "pp2 zbv dp_shard=2 zero=2 microbatches=4") if asked.starts else ()
                ):
                    starts.append(proof.starts(layout, asked.starts))
            except Exception:
                proof.note(traceback.format_exc())
    text = page(about, proof.rows, asked.precisions, starts)
    write_results(asked.to, "gpu-proof", text, {"about": about, "rows": proof.rows, "starts": starts})
    (asked.to / "gpu-proof-log.txt").write_text("\n".join(proof.log), encoding="utf-8")
    faulthandler.cancel_dump_traceback_later()
    print(text)
    return 0 if all(x["verdict"] in ("same", "refused") for r in proof.rows for x in r["by"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

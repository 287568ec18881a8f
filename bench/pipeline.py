"""Measured and simulated time of a pipeline's step, for every schedule, in one run.

    python bench/pipeline.py [--ranks 4] [--microbatches 16] [--forward-ms 50] [--steps 3] [--json]

The ranks are real processes that run Weft's own executor and send real messages over Gloo; only the computation is
simulated: a stage sleeps, so that more ranks than cores give the same times as one rank a core. A model's share of a
rank takes the same time under every schedule: with two stages a rank, each sleeps half as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from weft.comm.axis import Axis  # noqa: E402
from weft.launch.rank_pool import RankPool  # noqa: E402
from weft.mesh import connect  # noqa: E402
from weft.parallel.data.data_parallel import Replicas  # noqa: E402
from weft.parallel.expert.expert_load import ExpertLoad  # noqa: E402
from weft.parallel.pipeline.executor import Pipelined  # noqa: E402
from weft.parallel.spread_model import Batch, SpreadModel  # noqa: E402
from weft.planner.plan import Plan  # noqa: E402
from weft.planner.schedules.actions import Schedule  # noqa: E402
from weft.planner.schedules.known_schedules import make_schedule  # noqa: E402
from weft.planner.schedules.simulate import Costs, simulate  # noqa: E402

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")
AIM_RATIO, AIM_SPEEDUP = 0.10, 3.0


class SleepBackward(torch.autograd.Function):
    """The identity with a slow gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SleepyStage(nn.Module):
    """x + weight, where the forward and both gradients sleep for the stage's cost."""

    def __init__(self, first: bool, last: bool, costs: Costs, stage: int):
        super().__init__()
        self.last = last
        if first:
            self.embed = nn.Parameter(torch.ones(4))
        self.blocks = nn.ParameterDict({str(stage): torch.ones(4)})  # parameter names are unique across stages
        self.forward_s = costs.forward[stage]
        self.input_s = costs.backward[stage] * costs.input_share
        self.weight_s = costs.backward[stage] - self.input_s

    def forward(self, inputs: Tensor, hidden: Tensor | None) -> Tensor:
        time.sleep(self.forward_s)
        (weight,) = self.blocks.values()
        x = inputs * self.embed if hidden is None else hidden
        out = SleepBackward.apply(x, self.input_s) + SleepBackward.apply(weight, self.weight_s)
        return out.sum() if self.last else out

    def hidden_shape(self, batch: Batch, sequence_cut: int) -> tuple[int, ...]:
        return tuple(batch["inputs"].shape)


def loss_of(module: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    loss: Tensor = module(batch["inputs"], hidden)
    return loss


@dataclass(frozen=True)
class Row:
    """One schedule: seconds of a step, bubble, and speed-up over naive."""

    schedule: str
    simulated_s: float
    measured_s: float
    ratio: float
    simulated_bubble: float
    measured_bubble: float
    speedup: float


Told = list[tuple[float, float, float]]
"""For each step on one rank: start, end, and seconds of work."""


def run_rank(work: list[tuple[Schedule, Costs]], steps: int) -> list[Told]:
    """On one rank: the schedules alternate step by step, so that other load on the machine affects all of them."""
    mesh = connect(Plan(device="cpu", device_name="cpu", backend="gloo", pp=work[0][0].ranks), 60.0)
    axis = mesh.axis("pp")
    assert axis is not None
    pipelines = [make_pipeline(schedule, costs, axis, mesh.device) for schedule, costs in work]
    output: list[Told] = [[] for _ in work]
    for _ in range(steps):
        for pipeline, seen in zip(pipelines, output, strict=True):
            pipeline.zero_grad()
            pipeline.spans.spans.clear()
            batches = [{"inputs": torch.ones(1, 4)} for _ in range(pipeline.schedule.microbatches)]
            mesh.barrier()
            began = time.monotonic()
            pipeline.backward(batches, loss_of, 1.0)
            ended = time.monotonic()
            seen.append(
                (began, ended, sum(end - start for kind, _, _, start, end in pipeline.spans.spans if kind != "recv"))
            )
    for pipeline in pipelines:
        check_gradients(pipeline)
    return output


def make_pipeline(schedule: Schedule, costs: Costs, axis: Axis, device: torch.device) -> Pipelined:
    stages = {}
    for index in schedule.stages_of(axis.rank):
        module = SleepyStage(index == 0, index == schedule.stages - 1, costs, index)
        stages[index] = SpreadModel(module, Replicas(module, None, torch.float32, 25.0, summed=True), None, ())
    load = ExpertLoad(nn.Module(), device, None)
    pipeline = Pipelined(stages, schedule, axis, device, torch.float32, 1, load)
    pipeline.spans.wanted = True
    return pipeline


def check_gradients(pipeline: Pipelined) -> None:
    """Check that the step was computed."""
    for name, master in pipeline.master_params.items():
        expected = torch.full_like(master, pipeline.schedule.microbatches)
        if master.grad is None or not torch.equal(master.grad, expected):
            raise RuntimeError(f"the gradient of {name} is {master.grad}, not {expected}")


def measure(names: list[str], ranks: int, microbatches: int, forward_s: float, steps: int) -> list[Row]:
    """One row a schedule, compared with the first."""
    work = []
    for name in names:
        schedule = make_schedule(name, ranks, microbatches)
        share = forward_s * ranks / schedule.stages
        work.append((schedule, Costs((share,) * schedule.stages, (2 * share,) * schedule.stages)))
    with RankPool() as pool:
        by_rank = pool.run(run_rank, ranks, work, steps + 1)
    rows: list[Row] = []
    for (schedule, costs), *seen in zip(work, *by_rank, strict=True):
        lengths, bubbles = [], []
        for step in list(zip(*seen, strict=True))[1:]:  # the first step opens the connections
            length = max(end for _, end, _ in step) - min(start for start, _, _ in step)
            lengths.append(length)
            bubbles.append(1 - sum(busy for _, _, busy in step) / (ranks * length))
        predicted, measured = simulate(schedule, costs), statistics.median(lengths)
        rows.append(
            Row(
                schedule.name, predicted.length, measured, measured / predicted.length, predicted.bubble,
                statistics.median(bubbles), (rows[0].measured_s if rows else measured) / measured,
            )
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--forward-ms", type=float, default=50.0, help="a rank's; its backward takes twice that")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES, help="naive is always run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = ["naive", *(n for n in args.schedules if n != "naive")]
    rows = measure(names, args.ranks, args.microbatches, args.forward_ms / 1000, args.steps)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(
        f"{args.ranks} ranks, {args.microbatches} microbatches, a rank's forward {args.forward_ms:g} ms and backward "
        f"{2 * args.forward_ms:g} ms, median of {args.steps} steps\n"
    )
    print("| schedule | simulated s | measured s | ratio | simulated bubble | measured bubble | speed-up over naive |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        print(
            f"| {r.schedule} | {r.simulated_s:.3f} | {r.measured_s:.3f} | {r.ratio:.3f} | {r.simulated_bubble:.1%} "
            f"| {r.measured_bubble:.1%} | {r.speedup:.2f} |"
        )
    worst = max(abs(r.ratio - 1) for r in rows)
    slowest = min((r.speedup for r in rows[1:]), default=1.0)
    print(f"\nfarthest from the simulator {worst:.1%} (aim: {AIM_RATIO:.0%}); ", end="")
    print(f"least speed-up over naive {slowest:.2f}× (aim: {AIM_SPEEDUP:g}×)")


if __name__ == "__main__":
    main()

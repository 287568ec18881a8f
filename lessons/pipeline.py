"""A pipeline by hand: a deep MLP split into four stages, with only send and receive. The text is in pipeline.md.

weft lesson pipeline
"""

import tempfile
import time
from collections import deque

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from weft.cli.lessons.output import say, show, t

RANKS, LAYERS, DIM, BATCH, MICROBATCHES = 4, 8, 32, 64, 16
# A laptop may have fewer cores than this pipeline has ranks, so a stage sleeps instead of computing: this long for the
# forward of one sample, and twice that for its backward.
FORWARD_S = 0.004


def run_layers(layers: list[nn.Linear], x: Tensor, first: bool) -> Tensor:
    """The layers, with a GELU before each except the model's first."""
    for i, layer in enumerate(layers):
        x = layer(x if first and i == 0 else F.gelu(x))
    return x


def squared_error(out: Tensor, targets: Tensor, samples: int) -> Tensor:
    """A microbatch's part of the mean: divided by the samples of the whole batch, so that the parts add up."""
    return (out - targets).square().mean(-1).sum() / samples


class Stage:
    """One rank's layers, with the forward and the later backward of a microbatch."""

    def __init__(self, layers: list[nn.Linear], samples: int, work_s: float = 0.0):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.first, self.last = self.rank == 0, self.rank == self.ranks - 1
        self.layers, self.samples, self.work_s = layers, samples, work_s
        self.kept: deque[tuple[Tensor, Tensor]] = deque()  # inputs and outputs until their backward
        self.sent: list[tuple[dist.Work, Tensor]] = []
        self.loss, self.most_kept = 0.0, 0

    def forward(self, inputs: Tensor, targets: Tensor) -> None:
        x = inputs if self.first else self.receive(inputs, self.rank - 1).requires_grad_()
        out = run_layers(self.layers, x, self.first)
        time.sleep(self.work_s * len(x))
        if self.last:
            out = squared_error(out, targets, self.samples)
            self.loss += out.item()
        else:
            self.send(out.detach(), self.rank + 1)
        self.kept.append((x, out))
        self.most_kept = max(self.most_kept, len(self.kept))

    def backward(self) -> None:
        """The backward of the oldest microbatch."""
        x, out = self.kept.popleft()
        out.backward(None if self.last else self.receive(out, self.rank + 1))
        time.sleep(2 * self.work_s * len(x))
        if not self.first:
            self.send(x.grad, self.rank - 1)

    def send(self, tensor: Tensor, to: int) -> None:
        # Not dist.send, which may block until the other side receives: in 1F1B neighbours send to each other at the
        # same time, an activation down and a gradient up, and would deadlock.
        self.sent.append((dist.isend(tensor, to), tensor))

    def receive(self, like: Tensor, source: int) -> Tensor:
        buffer = torch.empty_like(like, requires_grad=False)  # square layers: all activations have the same shape
        dist.recv(buffer, source)
        return buffer

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()


def train(stage: Stage, microbatches: list[tuple[Tensor, Tensor]], most: int) -> None:
    """Run the microbatches; when `most` of them are kept, one backward before each new forward."""
    for inputs, targets in microbatches:
        if len(stage.kept) == most:
            stage.backward()
        stage.forward(inputs, targets)
    while stage.kept:
        stage.backward()
    stage.finish()


KEEP = {
    "naive": lambda stage, m: 1,
    "gpipe": lambda stage, m: m,
    # the last stage alternates from the start; the first fills the pipeline before
    "1f1b": lambda stage, m: stage.ranks - stage.rank,
}


def lesson(rank: int, store: str) -> None:
    """Run on each of the four processes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
    inputs, targets = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    expected = squared_error(run_layers(model, inputs, first=True), targets, BATCH)
    mine = model[rank * LAYERS // RANKS : (rank + 1) * LAYERS // RANKS]
    weights = [p for layer in mine for p in layer.parameters()]
    expected_grads = torch.autograd.grad(expected, weights)
    if rank == 0:
        say("One process: loss {loss:.6f}\n", loss=expected.item())
    rows: list[tuple[str, object, object]] = []
    for name, keep in KEEP.items():
        m = 1 if name == "naive" else MICROBATCHES
        microbatches = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
        for work_s in (0.0, FORWARD_S):  # once to warm up
            stage = Stage(mine, BATCH, work_s)
            for weight in weights:
                weight.grad = None
            dist.barrier()
            began = time.perf_counter()
            train(stage, microbatches, keep(stage, m))
            dist.barrier()
        took = time.perf_counter() - began
        torch.testing.assert_close([w.grad for w in weights], list(expected_grads))
        dist.broadcast(loss := torch.tensor(stage.loss), RANKS - 1)
        bubble, predicted = 1 - 3 * FORWARD_S * BATCH / took, (RANKS - 1) / (m + RANKS - 1)
        kept = {"naive": 1, "gpipe": m, "1f1b": RANKS}[name]
        rows += [(t("{name}: bubble", name=name), f"{predicted:.1%}", f"{bubble:.1%}"),
                 (t("{name}: microbatches kept by stage 0", name=name), kept, stage.most_kept),
                 (t("{name}: loss", name=name), f"{expected.item():.6f}", f"{loss.item():.6f}")]  # fmt: skip
    if rank == 0:
        show(rows)
        with_weft()
        say("\nThe gradients of all three equal the single process's.")
    dist.destroy_process_group()


def with_weft() -> None:
    """Weft's schedules of the same pipeline, and the Gantt charts of two."""
    from weft.planner.schedules.gantt import gantt_text
    from weft.planner.schedules.known_schedules import make_schedule
    from weft.planner.schedules.simulate import Costs, simulate

    say("\nWeft's schedules for {ranks} ranks and {m} microbatches:", ranks=RANKS, m=8)
    lines = {}
    for name in ("naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1"):
        schedule = make_schedule(name, RANKS, 8)
        stages = schedule.stages
        lines[name] = simulate(schedule, Costs((RANKS / stages,) * stages, (2 * RANKS / stages,) * stages))
    formula = (RANKS - 1) / (8 + RANKS - 1)
    predicted = {"naive": (RANKS - 1) / RANKS, "gpipe": formula, "1f1b": formula}
    show([(n, f"{predicted[n]:.1%}" if n in predicted else "", f"{line.bubble:.1%}") for n, line in lines.items()],
         ("formula", "Weft"))  # fmt: skip
    for name in ("gpipe", "1f1b"):
        print(f"\n{name}\n{gantt_text(lines[name], 80)}", end="")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lesson, args=(f"{folder}/store",), nprocs=RANKS)

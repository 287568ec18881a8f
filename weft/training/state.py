"""All that a run is at one step, as named tensors and a little JSON: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.optim.build_optimizers import Optimizers
from weft.optim.ema import Ema
from weft.parallel.data.local_sgd import EveryStep
from weft.parallel.fp8 import FP8
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.spread_model import SpreadModel
from weft.planner.plan import Plan
from weft.precision import LossScale

OWED = ("residual.", "powersgd.", "dice.")
"""Names of what compression keeps between steps."""

LARGEST = 2**62
"""Of any count in a checkpoint."""


@dataclass
class State:
    """The moving parts of a run. Everything else follows from the job, the plan and `step`."""

    model: SpreadModel | Pipelined
    optimizers: Optimizers
    ema: Ema
    scale: LossScale
    mesh: Mesh
    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples read, and so the number of the next one: the whole state of the data."""
    tokens: int = 0
    """Valid targets learned from."""
    rounds: EveryStep = field(default_factory=EveryStep)
    """How replicas come together between steps."""
    skipped_steps: set[int] = field(default_factory=set)
    """Steps whose samples are read and not learned from: what they did to the run was undone."""

    def tensors(self) -> dict[str, Tensor]:
        """By name, whatever the layout. The random state is each rank's own."""
        out = {f"model.{n}": m.detach() for n, m in (self.model.master_params | self.model.frozen).items()}
        out |= {f"buffer.{n}": b for n, b in self.model.buffers().items()}
        out |= {f"optim.{n}": t for n, t in self.optimizers.state().items()}
        out |= {f"ema.{n}": t for n, t in self.ema.averages.items()} | self.model.maxima()
        return out | self.model.owed() | self._dice() | self.rounds.tensors() | self._random()

    @torch.no_grad()
    def shards(self) -> dict[str, Tensor]:
        """This rank's part of every tensor, plain: what a snapshot copies; in place but for what compression owes."""
        out = {f"model.{n}": local_of(m) for n, m in (self.model.master_params | self.model.frozen).items()}
        out |= {f"buffer.{n}": local_of(b) for n, b in self.model.buffers().items()}
        out |= {f"optim.{n}": local_of(t) for n, t in self.optimizers.shards().items()}
        out |= {f"ema.{n}": local_of(t) for n, t in self.ema.averages.items()} | self.model.maxima()
        out |= {n: local_of(t) for n, t in (self.model.owed() | self._dice() | self.rounds.tensors()).items()}
        return out | self._random()

    def recall(self, shards: dict[str, Tensor], counts: dict[str, Any]) -> None:
        """Continue from the shards of a snapshot, which were just read."""
        self.adopt(shards, counts)
        self.adopt_owed({n: t for n, t in shards.items() if n.startswith(OWED)})
        self.model.recall_maxima()

    def adopt_owed(self, held: dict[str, Tensor]) -> None:
        """Take in what compression owes, and how often its dice were rolled."""
        self.model.adopt_owed(held)
        if (dice := held.get(f"dice.{self.mesh.rank}")) is not None:
            for compressor, rolls in zip(self.model.compressors, dice.tolist(), strict=True):
                compressor.dice.rolls = rolls

    def _dice(self) -> dict[str, Tensor]:
        rolls = [c.dice.rolls for c in self.model.compressors]
        return {f"dice.{self.mesh.rank}": torch.tensor(rolls)} if rolls else {}

    def _random(self) -> dict[str, Tensor]:
        out = {f"random.{self.mesh.rank}": torch.get_rng_state()}
        if self.mesh.device.type == "cuda":
            out[f"random_cuda.{self.mesh.rank}"] = torch.cuda.get_rng_state(self.mesh.device)
        return out

    @torch.no_grad()
    def agree(self) -> None:
        """Make the buffers of a person's own module the same on ranks that read different samples.

        Numbers become their mean over those ranks, for running statistics are linear in the samples: the mean of the
        ranks' averages is the average of their means, whenever it is taken. Counters and flags become the first rank's.
        """
        axes = [axis for name in ("dp_replicate", "dp_shard") if (axis := self.mesh.axis(name)) is not None]
        for buffer in self.model.buffers().values():
            for axis in axes:
                if buffer.is_floating_point():
                    mean = axis.all_reduce(buffer.double()) / axis.size  # in doubles what is equal stays as it is
                    buffer.copy_(mean)
                else:
                    axis.broadcast(buffer, 0)

    def counts(self) -> dict[str, Any]:
        """What is no tensor."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.samples,
            "skipped_steps": sorted(self.skipped_steps),
            "scale": self.scale.state(),
            "sync": self.rounds.meta(),
            "experts": {} if self.model.load is None else self.model.load.told(),
        }

    def meta(self, job: Job, plan: Plan) -> dict[str, Any]:
        return {**self.counts(), "job": job.model_dump(mode="json"), "plan": plan.to_json()}

    def empty_like(self, saved_world: int) -> dict[str, Tensor]:
        """Tensors to read a checkpoint into, that every one has. A random state only fits the world that wrote it; what
        compression owes and fp8's maxima are read apart (training/optional_state.py): they may be missing or others."""
        self.optimizers.allocate()
        apart = (*OWED, FP8, "outer.", *(() if saved_world == self.mesh.world else ("random",)))
        return {n: t for n, t in self.tensors().items() if not n.startswith(apart)}

    def own(self, meta: dict[str, Any]) -> dict[str, Tensor]:
        """By its name in a checkpoint, what is read after that: what this rank or its replica alone left there."""
        tensors = self.tensors()
        same = meta["plan"]["world"] == self.mesh.world
        random = {n: t for n, t in tensors.items() if n.startswith("random") and same}
        return random | self.rounds.own(meta.get("sync", {}), tensors)

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the tensors, under names and with values that a run of any kind can go on from."""
        return self.rounds.saved(self.tensors())

    def adopt(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Continue from tensors that were just read in place."""
        self.step, self.tokens, self.samples = meta["step"], meta["tokens"], meta["samples"]
        self.skipped_steps = set(meta.get("skipped_steps", ()))
        self.scale.restore(meta["scale"])
        if (cpu := tensors.get(f"random.{self.mesh.rank}")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := tensors.get(f"random_cuda.{self.mesh.rank}")) is not None:
            torch.cuda.set_rng_state(cuda.cpu(), self.mesh.device)
        for compressor in self.model.compressors:
            compressor.steps = self.step
        self.rounds.adopt(meta.get("sync", {}))
        if self.model.load is not None:
            self.model.load.recall(meta.get("experts", {}))
        self.model.refresh()


def meta_problem(meta: dict[str, Any]) -> str | None:
    """Why a run cannot continue from what a checkpoint says of itself; None when it can."""
    try:
        counts = [meta["step"], meta["tokens"], meta["samples"], *meta.get("skipped_steps", ())]
        if not all(type(n) is int and 0 <= n < LARGEST for n in counts):
            raise ValueError("its counts are no counts")
        if not 0 < float(meta["scale"]["value"]) < LARGEST or not 0 <= int(meta["scale"]["quiet"]) < LARGEST:
            raise ValueError("its loss scale is no number")
        if not all(_is_copies(told) for told in meta.get("experts", {}).get("copies", {}).values()):
            raise ValueError("its copies of experts are none")
        sections = [meta["job"][section] for section in ("model", "data", "train")]
        if not 0 < Plan.from_json(meta["plan"]).world < LARGEST or not all(isinstance(s, dict) for s in sections):
            raise ValueError("its plan or job is none")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"what it says of itself is not what a run says ({type(error).__name__}: {error})"
    return None


def _is_copies(told: Any) -> bool:
    """Whether this is what ExpertLoad.told() says of a block."""
    return all(len(pair) == 2 and all(type(n) is int and 0 <= n < LARGEST for n in pair) for pair in told)

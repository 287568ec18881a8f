"""The state of a run at one step: named tensors and counters, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.data.growing import Rounds
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.optim.applied_update import AppliedUpdate
from weft.optim.build_optimizers import Optimizers
from weft.optim.ema import Ema
from weft.parallel.data.local_sgd import EveryStep
from weft.parallel.expert.expert_load import LOAD_PREFIX
from weft.parallel.fp8 import FP8_PREFIX
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.spread_model import SpreadModel
from weft.planner.plan import Plan
from weft.precision import LossScale

COMPRESSION = ("residual.", "powersgd.", "dice.")
"""Prefixes of the state that compression keeps between steps."""

RANK_BUFFER = "rank_buffer."
"""Prefix of buffers as one rank has them, in a checkpoint between two that were due."""

MAX_COUNT = 2**62
"""Upper bound of any counter in a checkpoint."""


@dataclass
class State:
    """What changes while a run trains. Everything else follows from the job, the plan and `step`."""

    model: SpreadModel | Pipelined
    optimizers: Optimizers
    ema: Ema
    scale: LossScale
    mesh: Mesh
    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples read, which is the index of the next one: the whole state of the data."""
    tokens: int = 0
    """Valid targets trained on."""
    rounds: EveryStep = field(default_factory=EveryStep)
    """How replicas are synchronized between steps."""
    skipped_steps: set[int] = field(default_factory=set)
    """Steps whose samples are read and not trained on, because the run was rolled back before them."""
    data_rounds: Rounds = field(default_factory=list)
    """The shards of a growing source (data/growing.py), or the counted parts of streamed ones
    (data/formats/streamed_files.py)."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a name that does not depend on the layout. Each rank has its own random state."""
        out = {f"model.{n}": m.detach() for n, m in self._weights().items()}
        out |= self._tables() | {f"buffer.{n}": b for n, b in self.model.buffers().items()}
        out |= {f"optim.{n}": t for n, t in self.optimizers.state().items()}
        out |= {f"ema.{n}": t for n, t in self.ema.averages.items()} | self.model.maxima()
        out |= self.model.residuals() | self._dice() | self.rounds.tensors() | self.expert_counts()
        return out | self._random()

    @torch.no_grad()
    def shards(self) -> dict[str, Tensor]:
        """This rank's shard of every tensor, for a snapshot: the tensors themselves, except compression residuals."""
        out = {f"model.{n}": local_of(m) for n, m in self._weights().items()}
        out |= {n: local_of(t) for n, t in self._tables().items()}
        out |= {f"buffer.{n}": local_of(b) for n, b in self.model.buffers().items()}
        out |= {f"optim.{n}": local_of(t) for n, t in self.optimizers.shards().items()}
        out |= {f"ema.{n}": local_of(t) for n, t in self.ema.averages.items()} | self.model.maxima()
        out |= {n: local_of(t) for n, t in (self.model.residuals() | self._dice() | self.rounds.tensors()).items()}
        return out | self.expert_counts() | self._random()

    def last_update(self) -> AppliedUpdate | None:
        """The last update, if the shards after it follow from those before it: no other tensor is as large, and the
        next step does not overwrite the gradients."""
        model = self.model
        if type(model) is not SpreadModel or self.ema.averages or self.rounds.tensors() or not model.new_gradients:
            return None
        return self.optimizers.last_update()

    def restore_snapshot(self, shards: dict[str, Tensor], counts: dict[str, Any]) -> None:
        """Continue from the shards of a snapshot that were just read in place."""
        self.restore(shards, counts)
        self.restore_compression({n: t for n, t in shards.items() if n.startswith(COMPRESSION)})
        self.model.restore_maxima()

    def restore_compression(self, held: dict[str, Tensor]) -> None:
        """Restore compression residuals, and how many random numbers were drawn for rounding."""
        self.model.load_residuals(held)
        if (dice := held.get(f"dice.{self.mesh.rank}")) is not None:
            for compressor, draws in zip(self.model.compressors, dice.tolist(), strict=True):
                compressor.rounding.draws = draws

    def _weights(self) -> dict[str, Tensor]:
        return self.optimizers.masters() | self.optimizers.frozen(self.model.frozen)

    def _tables(self) -> dict[str, Tensor]:
        """The embedding tables and their optimizer states."""
        if (tables := self.model.tables) is None:
            return {}
        return {f"model.{n}": t for n, t in tables.weights().items()} | {
            f"optim.{n}": t for n, t in tables.state().items()
        }

    def expert_counts(self) -> dict[str, Tensor]:
        """The load of experts since they were last moved, in place; equal on all ranks."""
        return {} if self.model.load is None else self.model.load.tensors()

    def _dice(self) -> dict[str, Tensor]:
        draws = [c.rounding.draws for c in self.model.compressors]
        return {f"dice.{self.mesh.rank}": torch.tensor(draws)} if draws else {}

    def _random(self) -> dict[str, Tensor]:
        out = {f"random.{self.mesh.rank}": torch.get_rng_state()}
        if self.mesh.device.type == "cuda":
            out[f"random_cuda.{self.mesh.rank}"] = torch.cuda.get_rng_state(self.mesh.device)
        return out

    @torch.no_grad()
    def agree(self) -> None:
        """Make the buffers of a user's module equal on ranks that read different samples.

        Floating-point buffers become the mean over those ranks: running statistics are linear in the samples, so the
        mean of the ranks' averages is the average over all samples. Counters and flags become the first rank's.
        """
        axes = [axis for name in ("dp_replicate", "dp_shard") if (axis := self.mesh.axis(name)) is not None]
        for buffer in self.model.buffers().values():
            for axis in axes:
                if buffer.is_floating_point():
                    mean = axis.all_reduce(buffer.double()) / axis.size  # in float64, so that equal values stay equal
                    buffer.copy_(mean)
                else:
                    axis.broadcast(buffer, 0)

    def rank_buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's copy of the model, by names that no other rank has."""
        return {f"{RANK_BUFFER}{self.mesh.rank}.{n}": b for n, b in self.model.buffers().items()}

    @contextmanager
    def agreed(self) -> Iterator[dict[str, Tensor]]:
        """Make the buffers equal for the context only. Gives this rank's values of those that differ from it, so that a
        run that was stopped continues as if it had not been."""
        before = {name: buffer.clone() for name, buffer in self.rank_buffers().items()}
        self.agree()
        changed = {n for n, b in self.rank_buffers().items() if not torch.equal(b, before[n])}
        yield {name: before[name] for name in changed}
        for name, buffer in self.rank_buffers().items():
            buffer.copy_(before[name])

    @property
    def no_snapshots(self) -> str:
        """Why steps are not copied to memory; empty: they are."""
        if self.model.tables is not None:
            return "embedding tables are too large to copy; the run continues from checkpoints"
        return self.optimizers.no_snapshots or self.rounds.no_snapshots

    def counts(self) -> dict[str, Any]:
        """The counters, for JSON."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.samples,
            "skipped_steps": sorted(self.skipped_steps),
            "scale": self.scale.state(),
            "sync": self.rounds.meta(),
            **({"data_rounds": self.data_rounds} if self.data_rounds else {}),
            "experts": {} if self.model.load is None else self.model.load.placement(),
        }

    def meta(self, job: Job, plan: Plan) -> dict[str, Any]:
        return {**self.counts(), "job": job.model_dump(mode="json"), "plan": plan.to_json()}

    def loadable_tensors(self, saved_world: int) -> dict[str, Tensor]:
        """Tensors that every checkpoint has, to load it into. The random state only where `saved_world` is this world;
        compression residuals, fp8's amax history and the load of experts are loaded separately
        (training/optional_state.py)."""
        self.optimizers.allocate()
        apart = (
            *COMPRESSION,
            FP8_PREFIX,
            LOAD_PREFIX,
            "outer.",
            *(() if saved_world == self.mesh.world else ("random",)),
        )
        return {n: t for n, t in self.tensors().items() if not n.startswith(apart)}

    def replica_tensors(self, meta: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors to load after those, by their name in a checkpoint: what only this rank or its replica saved."""
        tensors = self.tensors()
        same = meta["plan"]["world"] == self.mesh.world
        random = {n: t for n, t in tensors.items() if n.startswith("random") and same}
        return random | self.rounds.replica_tensors(meta.get("sync", {}), tensors)

    def saved(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, with names and values that a run with any train.sync can resume from."""
        return self.rounds.saved(self.tensors())

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Continue from tensors that were just loaded in place."""
        self.step, self.tokens, self.samples = meta["step"], meta["tokens"], meta["samples"]
        self.skipped_steps = set(meta.get("skipped_steps", ()))
        self.data_rounds = meta.get("data_rounds", [])
        self.scale.restore(meta["scale"])
        if (cpu := tensors.get(f"random.{self.mesh.rank}")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := tensors.get(f"random_cuda.{self.mesh.rank}")) is not None:
            torch.cuda.set_rng_state(cuda.cpu(), self.mesh.device)
        for compressor in self.model.compressors:
            compressor.steps = self.step
        self.rounds.restore(meta.get("sync", {}))
        if self.model.load is not None:
            self.model.load.restore(meta.get("experts", {}))
        self.optimizers.restore(tensors)
        self.model.refresh()


def meta_problem(meta: dict[str, Any]) -> str | None:
    """Why a run cannot resume from a checkpoint with this metadata; None when it can."""
    try:
        counts = [meta["step"], meta["tokens"], meta["samples"], *meta.get("skipped_steps", ())]
        counts += [meta.get("experts", {}).get("steps", 0)]
        if not all(type(n) is int and 0 <= n < MAX_COUNT for n in counts):
            raise ValueError("invalid counters")
        if not 0 < float(meta["scale"]["value"]) < MAX_COUNT or not 0 <= int(meta["scale"]["quiet"]) < MAX_COUNT:
            raise ValueError("invalid loss scale")
        if not all(_is_copies(value) for value in meta.get("experts", {}).get("copies", {}).values()):
            raise ValueError("invalid copies of experts")
        for shard in (shard for each in meta.get("data_rounds", []) for shard in each):
            if not isinstance(shard["name"], str) or type(shard["samples"]) is not int or shard["samples"] < 0:
                raise ValueError("invalid shards of the data")
        sections = [meta["job"][section] for section in ("model", "data", "train")]
        if not 0 < Plan.from_json(meta["plan"]).world < MAX_COUNT or not all(isinstance(s, dict) for s in sections):
            raise ValueError("invalid plan or job")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"its metadata is not that of a run ({type(error).__name__}: {error})"
    return None


def _is_copies(value: Any) -> bool:
    """Whether this is one block of ExpertLoad.placement()."""
    return all(len(pair) == 2 and all(type(n) is int and 0 <= n < MAX_COUNT for n in pair) for pair in value)

"""What each rank holds of every weight of a model, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weft.job.optim import WeightShard
from weft.job.schema import Model
from weft.planner.model.weight_table import Weight, weights_of
from weft.planner.plan import Plan
from weft.planner.schedules.known_schedules import make_schedule


@dataclass(frozen=True)
class ParamShard:
    """What one rank holds of a weight."""

    weight: Weight
    whole: int
    """Elements on this rank of tp before dp_shard cuts them."""
    padded: int
    """Elements of the shard with the padding that makes all ranks' shards equal."""
    held: int
    """Elements of the shard."""
    ways: int = 1
    """Ranks among which it is cut."""

    @property
    def for_optimizer(self) -> WeightShard:
        return WeightShard(self.weight.shape, self.held, self.weight.in_block)

    @property
    def gathered(self) -> int:
        """Elements where all shards are brought together, with their padding."""
        return self.padded * self.ways if self.ways > 1 else self.whole


def coords_of(plan: Plan, rank: int) -> dict[str, int]:
    """Coordinates of a rank on each axis; the last axis of the mesh varies fastest."""
    out: dict[str, int] = {}
    for axis, degree in reversed(plan.axes.items()):
        rank, out[axis] = divmod(rank, degree)
    return out


def stages_of(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The stages of a rank of the pipeline; the whole model is stage 0."""
    if plan.pp == 1:
        return (0,)
    return make_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages).stages_of(pp_rank)


def stage_range(model: Model, plan: Plan, stage: int) -> tuple[int, int, bool, bool]:
    """First block, end, whether the stage begins the model and whether it ends it."""
    if plan.pp == 1:
        return 0, model.layers or 0, True, True
    first, end = plan.split[stage]
    return first, end, stage == 0, stage == len(plan.split) - 1


def stage_weights(model: Model, plan: Plan, stage: int) -> list[Weight]:
    """The weights of a stage in the order of the model."""
    first, end, begins, ends = stage_range(model, plan, stage)
    return list(weights_of(model, plan.sequence, first, end, begins, ends))


def unit_weights(model: Model, sequence: bool) -> dict[str, list[Weight]]:
    """Weights by kind of unit: before the blocks, a dense block or one of an encoder, one with experts and its experts
    or one of a decoder, after the blocks."""
    layers = model.layers or 0

    def block(i: int) -> list[Weight]:
        return list(weights_of(model, sequence, i, i + 1, False, False)) if 0 <= i < layers else []

    if model.takes_vectors:
        return {"column": block(0), "row": block(1), "whole": block(layers - 1) if layers % 2 else []}
    dense = layers if model.first_blocks is None else model.first_blocks
    routed = block(dense)
    end = list(weights_of(model, sequence, 0, 0, False, True))
    return {
        "begin": list(weights_of(model, sequence, 0, 0, True, False)),
        "dense": block(0) if dense else [],
        "routed": [w for w in routed if not w.experts],
        "experts": [w for w in routed if w.experts],
        "norm": [w for w in end if w.name != "head.weight"],
        "head": [w for w in end if w.name == "head.weight"],
    }


def shard_count(plan: Plan) -> int:
    """Ranks among which weights are cut: those of dp_shard, and of cp with them, which see other tokens."""
    return plan.dp_shard * plan.cp if plan.dp_shard > 1 else 1


def param_shards(model: Model, plan: Plan, stage: int, coords: dict[str, int]) -> list[ParamShard]:
    """What a rank holds of each weight of one of its stages."""
    out = []
    ways, place = shard_count(plan), coords["dp_shard"] * plan.cp + coords["cp"]
    for weight in stage_weights(model, plan, stage):
        if weight.experts and plan.ep > 1:
            own = prod(weight.shape) // plan.ep
            rest = plan.dp_shard * plan.cp * plan.tp // plan.ep if plan.dp_shard > 1 else 1
            out.append(ParamShard(weight, own, -(-own // rest), -(-own // rest), rest))
            continue
        shape = weight.on_tp(plan.tp, coords["tp"])
        rows, row = shape[0], prod(shape[1:])
        chunk = -(-rows // ways)
        held = max(0, min(chunk, rows - place * chunk)) if ways > 1 else rows
        out.append(ParamShard(weight, rows * row, chunk * row, held * row, ways))
    return out

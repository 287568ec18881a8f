"""FLOPs of one rank in a step, counted exactly for one plan. `weft dryrun` finds the same numbers."""

from __future__ import annotations

from math import prod

from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.model.counts import attention_share
from weft.planner.model.parameters import coords_of, param_shards, stage_range, stages_of
from weft.planner.plan import Plan
from weft.planner.time.traffic import replica_axes


def flops_of(job: Job, plan: Plan, rank: int = 0) -> float:
    """Products of one rank in a step, a multiplication and an addition each 2 by the usual count; causal attention
    counts the half that is needed, and what recompute does again is counted again."""
    model, coords = job.model, coords_of(plan, rank)
    samples = plan.microbatch * plan.accumulation
    seq = model.sample_positions(job.data.seq_len)
    total = 0.0
    for stage in stages_of(plan, coords["pp"]):
        first, end, begins, ends = stage_range(model, plan, stage)
        shards = list(param_shards(model, plan, stage, coords))
        # selective recompute repeats no products
        recomputed = 0 if plan.recompute == "selective" else plan.recomputed(first, end, model.layers or 1)
        again = set(list(dict.fromkeys(s.weight.unit for s in shards if s.weight.unit))[:recomputed])
        # the last product runs again only where something follows it
        plain = model.ends_with_product and model.lora is None
        for shard in shards:
            name, size = shard.weight.name, prod(shard.weight.on_tp(plan.tp, coords["tp"]))
            if shard.weight.experts and model.experts is not None:  # each token meets a few; load is taken as even
                each = prod(shard.weight.shape[1:]) * model.experts.top_k
                passes = (3.0 if shard.weight.trained else 2.0) + (shard.weight.unit in again)
                total += 2.0 * passes * samples * seq * each / plan.cp / plan.tp
                continue
            if len(shard.weight.shape) != 2 or name.startswith(
                ("positions.", "types.", "encoder_bias.", "decoder_bias.")
            ):
                continue
            if name == "embed.weight" and not model.takes_patches:
                if model.tied and ends:
                    total += (6.0 if shard.weight.trained else 4.0) * samples * seq * size / plan.cp
                continue
            passes = 3.0
            if not shard.weight.unit:
                tokens = samples * (1 if name.startswith("head.") and model.labels_samples else seq)
                passes = 2.0 if name == "embed.weight" else 3.0  # patches need no gradient
            else:
                tokens = samples * seq
                passes += shard.weight.unit in again and not (plain and name.endswith("mlp.down.weight"))
                if name.endswith("router.weight"):  # each rank routes its own tokens
                    tokens //= plan.tp
                if model.takes_vectors:
                    passes = 2.0 if begins and shard.weight.unit == "layers.0" else 3.0
            passes -= 0.0 if shard.weight.trained else 1.0
            total += 2.0 * passes * tokens * size / plan.cp
        if not model.takes_vectors:
            scores = 4.0 * samples * seq * seq * (model.heads or 0) * (model.head_dim or 0) / plan.tp / plan.cp
            passes_of = {i: 4.0 if i < first + recomputed else 3.0 for i in range(first, end)}
            total += scores * sum(passes * attention_share(model, seq, i) for i, passes in passes_of.items())
        for shard in shards:
            if not shard.weight.trained:
                continue
            entry = OPTIMIZERS[job.optim.name].of(shard.for_optimizer)
            turns = prod(replica_axes(plan, shard.weight).values()) if entry.takes_turns else 1
            total += entry.flops(shard.for_optimizer) / turns
    return total

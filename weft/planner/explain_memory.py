"""`weft plan --explain memory`: the arithmetic of a rank's memory, component by component."""

from __future__ import annotations

from weft.hardware.probe import GIB
from weft.job.schema import Job
from weft.planner.describe import recompute_text
from weft.planner.memory.engine_memory import EngineMemory, Place
from weft.planner.memory.states import low_half_bytes
from weft.planner.model.counts import count_parameters, count_trained
from weft.planner.number_format import human_count
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts


def explain_memory(job: Job, plan: Plan, limit_gib: float) -> str:
    """One line for each component of the fullest rank: its GiB, and the terms it is made of."""
    memory, layouts = EngineMemory(job, plan), Layouts.one(plan)
    ranks = [memory.rank(layouts, Place(index)) for index in range(plan.pp)]
    totals = [sum(float(held[0]) for held in parts.values()) for parts in ranks]
    index = totals.index(max(totals))
    parts = {part: float(held[0]) / GIB for part, held in ranks[index].items()}
    terms = _terms(job, plan, memory, index)
    rows = [f"  {part:14} {gib:9.3f} GiB   {terms[part]}".rstrip() for part, gib in parts.items()]
    where = f" of pipeline rank {index}, the fullest," if plan.pp > 1 else ""
    total = sum(parts.values())
    head = f"memory of a rank{where} when it holds most"
    return "\n".join([head, *rows, f"  {'total':14} {total:9.3f} GiB   of {limit_gib:.3f} usable"])


def _terms(job: Job, plan: Plan, memory: EngineMemory, index: int) -> dict[str, str]:
    group = memory.group(Layouts.one(plan), Place(index))
    states = {name: float(held[0]) for name, held in group.states(group.held).items()}
    whole_here, held_here, count = (
        float(group.held.whole[0]),
        float(group.held.held[0]),
        float(group.rank.counts.blocks[0]),
    )
    counts = count_parameters(job.model)
    every = human_count(counts.total if counts else 0)
    cuts = [f"{axis} {degree}" for axis, degree in (("tp", plan.tp), ("pp", plan.pp), ("ep", plan.ep)) if degree > 1]
    here = human_count(whole_here)
    held = f"{every} parameters" + (f", {here} on this rank of {' × '.join(cuts)}" if cuts else "")
    shards = plan.dp_shard * plan.cp_cut
    cut = f" / {shards} shards" if shards > 1 else ""
    if shards > 1 and plan.ep > 1:  # experts have fewer shards than the rest
        cut = f", {human_count(held_here)} of them in its shard"
    computed = "fp16" if plan.precision == "fp16" else "bf16"
    master = "4 B (fp32 master)" + ("" if shards > 1 or plan.precision == "fp32" else f" + 2 B ({computed} copy)")
    if plan.split_master:
        master = f"2 B (bf16 weight) + {low_half_bytes(plan.states):g} B (low half of the fp32 master)"
    average = " + 4 B (ema)" if job.train.ema else ""
    whole = shards > 1 and plan.zero == 1 and plan.accumulation > 1
    width = 2 if group.flags["alone"] else 4
    own = human_count(held_here) if plan.ep > 1 and shards > 1 else f"{here}{cut}"
    gradients = f"{here if whole else own} × {width} B"
    gradients += ": whole until the last microbatch is done" if whole else ", as far as they exist at the peak"
    state = states["optimizer"] / max(held_here, 1.0)
    tokens = plan.microbatch * (job.model.sample_positions(job.data.seq_len)) / plan.cp
    stored = "in fp8, " if plan.activations == "fp8" else ""
    kept = float(group.kept()[0]) / max(count, 1) / GIB
    blocks = f"{count:.0f} blocks × {kept:.3f} GiB kept ({tokens:,.0f} tokens, {stored}recompute "
    flight = f" × {group.rank.in_flight[0]:g} microbatches in flight" if plan.pp > 1 else ""
    width = plan.compute_bytes
    stay = f" + {here} × {width} B (gathered for the step)" if shards > 1 and group.flags["zero"] < 3 else ""
    moved = {
        "weights of the blocks being gathered": shards > 1, "gradients being reduced": shards > 1,
        "messages between stages": plan.pp > 1, "residuals of compression": plan.compression != "none",
    }  # fmt: skip
    parameters = f"{held}{cut} × ({master}{average}){stay}"
    compiled = "scratch of cuBLAS and cuDNN in compiled blocks" if group.flags["compiled"] else "none"
    runtime = compiled if plan.device == "cuda" else "torch and its libraries"
    optimizer = f"{job.optim.name}: {human_count(held_here)} × {state:.3g} B"
    if job.model.lora is not None:
        trained = f"{human_count(count_trained(job.model))} in adapters"
        parameters = f"{held}{cut}, frozen × {width} B, and {trained} × ({master}{average}){stay}"
        gradients, optimizer = f"of {trained}", f"{job.optim.name}, of {trained}"
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": f"{blocks}{recompute_text(job, plan)}){flight}, and the step's data",
        "communication": ", ".join(words for words, used in moved.items() if used) or "none",
        "temporary": "tensors of the operator that runs at the peak, such as the logits of the loss",
        "runtime": runtime,
    }  # fmt: skip

"""Calibrations: the efficiency of a software stack, as shares of what the hardware can do.

The time and memory models are the same for every stack; only these numbers differ. They are
fitted to published runs by bench/fit_planner.py and live as JSON in weft/hardware/calibrations.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import weft.hardware
from weft.job.errors import JobError

CALIBRATION_FOLDER = Path(weft.hardware.__file__).parent / "calibrations"


@dataclass(frozen=True)
class Calibration:
    """One stack of software. Shares are of what the hardware was measured to reach."""

    name: str = "default"
    # time: matrix products
    matmul: float = 0.92
    """Share of the device's best matrix product that a large one gets."""
    wave: float = 0.35
    """Loss of a product that fills the device once; one that fills it n times loses 1/n of it."""
    depth: float = 100.0
    """Inner length at which half of a product's time is filling and draining."""
    odd: float = 0.1
    """Loss of a product whose sides are not multiples of 64, the tile size of the devices."""
    low_precision: float = 0.75
    """Share of its peak that fp8 reaches with casts and scales, over the share that bf16 reaches."""
    # time: attention and the rest of a block
    fused: float = 1.0
    """1: attention in one kernel that skips masked blocks; 0: scores are written to memory, all of them."""
    attention: float = 0.55
    """Share of the peak that fused attention reaches."""
    traffic: float = 1.0
    """Bytes that norms, activations, residuals and casts move, over what a fused kernel for each would."""
    selective: float = 0.0
    """Share of a block's memory-bound work that selective recompute repeats where attention is fused."""
    selective_products: float = 0.0
    """The same share of a block's matrix products: 0.5 where every second one is saved."""
    host_us: float = 150.0
    """Time the host needs to launch one block's forward pass."""
    host_backward: float = 1.0
    """The same for its backward pass, over the forward pass."""
    host_moe_us: float = 60.0
    """What each expert on a rank adds to that: routing, sorting, small products."""
    host_routing_us: float = 0.0
    """What routing adds, however many experts there are."""
    host_selective_us: float = 0.0
    """What selective recompute of experts adds to a block in both passes: they run one operation at a time."""
    host_fp8: float = 1.0
    """The same where the block multiplies in fp8, over bf16: casts and scales."""
    host_adapters: float = 1.0
    """The same where the block's weights are frozen and have adapters."""
    host_blend: float = 4.0
    """How well host and device overlap: 1 adds their times, a large number takes the longer one."""
    score_batch: float = 0.0
    """Heads × samples that the score kernel processes at once; other counts use slower kernels. 0: any."""
    head_whole: float = 1.0
    """What the head's product keeps where tp does not cut (and pad) the vocabulary."""
    head_again: float = 0.0
    """1 where full recompute repeats the head and the loss too."""
    step_ms: float = 10.0
    """Once a step: logging, the batch, clipping, synchronisation."""
    experts: float = 0.8
    """What grouped products of experts keep over one product of the same size."""
    grouped: float = 0.0
    """1 where the products of a rank's experts are one kernel and fill the device together, 0 where each fills it
    alone."""
    low_experts: float = 1.0
    """1 where routed experts multiply in fp8 as other layers do, 0 where they stay in bf16."""
    # time: links
    link: float = 0.75
    """Share of the links inside a node that a large collective gets (nccl-tests: 232 of 300 GB/s on A100)."""
    network: float = 0.85
    """The same between nodes (nccl-tests: 24 of 25 GB/s a NIC alone, less while computing)."""
    latency: float = 1.0
    """Latency of a collective's steps, over the catalog's."""
    overlap_tp: float = 0.0
    overlap_dp: float = 0.5
    overlap_cp: float = 0.7
    overlap_pp: float = 0.3
    overlap_ep: float = 0.0
    """Share of each axis' communication that hides behind computing, where there is computing to hide behind."""
    optimizer: float = 1.3
    """Bytes the optimizer moves, over one pass of its state."""
    sum_bytes: float = 0.0
    """Bytes moved for each weight when a microbatch's gradients are added to those before, where it is a pass of its
    own."""
    jitter: float = 0.01
    """Share of a step that each doubling of nodes adds, waiting for the slowest."""
    profile: tuple[tuple[float, float, float, float], ...] = ()
    """Measured blocks: tokens, width, tp, and the time over the formulas'. Shapes close to one take its ratio."""
    # memory
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    reduce_bytes: float = 4.0
    """Bytes per gradient value in collectives."""
    master_bytes: float = 4.0
    """Bytes of the fp32 copy of a weight; 0 where there is none."""
    moment_bytes: float = 8.0
    activation: float = 1.0
    """Bytes kept for the backward pass, over the count of the formulas."""
    stream: float = 4.0
    """Values per token and model dimension that the norms and residuals of a block keep; tp does not cut them. Fused
    norms keep 4 in all, norms made of several fp32 operators more."""
    gathered_inputs: float = 0.0
    """1 where products keep their inputs as tp has gathered them (DTensor), rather than each rank's part of the
    sequence."""
    accumulates_whole: float = 0.0
    """1 where ZeRO 3 reduces gradients after the last of several microbatches: until then whole gradients are kept and
    weights stay gathered (FSDP's no_sync)."""
    logits: float = 10.0
    """Bytes for each logit at the loss (bf16 logits, fp32 copy and its gradient)."""
    logits_whole: float = 0.0
    """Bytes for each logit that the loss gathers from the ranks of tp; 0 where it works on what each rank has. Then
    the gather and the whole logits take time too."""
    loss_chunk: float = 0.0
    """Logits held at once, where the loss works through them in chunks; 0: all of a microbatch."""
    gather_limit: float = 0.0
    """Elements of weights that ZeRO 3 gathers at once; 0: two blocks."""
    loads_whole: float = 0.0
    """1 where every rank loads the whole model before ZeRO 3 shards it."""
    host_checkpoints: float = 0.0
    """1 where ZeRO 3 keeps the inputs of recomputed blocks in host memory."""
    experts_over_tp: float = 0.0
    """1 where tp cuts the matrices of experts too."""
    context_gib: float = 1.0
    """Driver, libraries and communication buffers, outside the allocator."""
    fragment: float = 0.05
    """Share of reserved memory lost to fragmentation."""
    usable: float = 1.0
    """Share of the device's memory a run may fill before it fails."""
    # what is not known
    spread: float = 0.15
    """Half the width of the range: nine of ten runs were within it."""

    def with_(self, **changed: Any) -> Calibration:
        return Calibration(**{**asdict(self), **changed})


def calibration_names() -> list[str]:
    """Names of the calibrations that come with Weft."""
    return sorted(path.stem for path in CALIBRATION_FOLDER.glob("*.json"))


def read_calibration(name: str) -> dict[str, Any]:
    """The JSON of a calibration, by name or path; a JobError where it is not a calibration."""
    path = Path(name) if name.endswith(".json") else CALIBRATION_FOLDER / f"{name}.json"
    if not path.is_file():
        raise JobError(
            f"no calibration is named {name!r}; known: {', '.join(calibration_names())}, or the path of a .json"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise JobError(f"the calibration {name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise JobError(f'the calibration {name} is {values!r:.40}; it must be an object such as {{"matmul": 0.8}}')
    numbers = {f.name for f in fields(Calibration)} - {"name", "profile"}
    for key, value in values.items():
        if key in numbers and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise JobError(f"the calibration {name}: {key} is {value!r}; it must be a number")
    return {**values, "name": str(values.get("name", path.stem))}


@cache
def load_calibration(name: str) -> Calibration:
    """A calibration by its name, or from a JSON file."""
    values = read_calibration(name)
    known = {f.name for f in fields(Calibration)}
    values["profile"] = tuple(tuple(point) for point in values.get("profile", ()))
    return Calibration(**{k: v for k, v in values.items() if k in known})

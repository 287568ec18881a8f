"""`memory`: recompute, offload to host memory and disk, and chunks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section, limits

Home = Literal["device", "host", "disk"]


class Memory(Section):
    """How activations are saved for the backward pass, and where states live."""

    recompute: int | Literal["auto", "none", "selective", "full"] = "auto"
    """What is recomputed in the backward pass instead of saved: nothing (none), everything except the outputs of matrix
    products and attention (selective), a number of whole blocks, or every block (full). auto recomputes the least that
    fits into memory."""
    budget_gib: float | None = Field(None, gt=0)
    """Memory budget of a rank, from which the layout and recompute: auto are chosen. Default: 94 % of the device's
    memory."""
    offload: Literal["none", "activations", "states", "all", "auto"] = "none"
    """What lives outside of the device. activations moves the saved inputs and attention outputs of each block to host
    memory until its backward pass, and recomputes the rest of the block. states keeps the optimizer's moments and the
    low halves of the master weights in host memory, and copies them to the device for each update; the run is the
    same, bit for bit. all is both, and gradients and weights of blocks if they do not fit. auto offloads as little as
    makes the job fit."""
    offload_fraction: float | Literal["auto"] = "auto"
    """Share of the states that is offloaded, spread evenly over the model. auto: all of them with offload: states or
    all, and as many as do not fit with offload: auto."""
    split_master: bool | Literal["auto"] = "auto"
    """Hold a master weight as the bf16 weight and 16 more bits: 12 bytes a parameter with AdamW instead of 14. For one
    rank with precision bf16 or fp8. auto: where states are offloaded, or where offload: auto needs the memory."""
    states: Literal["exact", "bf16", "8bit", "24bit-master"] = "exact"
    """How the optimizer's moments are stored between updates: in fp32 (exact), in bf16, in 8 bits with a scale for 128
    elements of a row, or in 8 bits with master weights of 24 bits (24bit-master, which needs split master weights).
    Values are rounded at random, by seed, step, parameter and element, so every layout rounds alike. Nothing but
    exact is used without being asked for. Vectors are always exact."""
    activations: Literal["exact", "fp8"] = "exact"
    """How the activations that blocks save for the backward pass are stored: as they are (exact), or in fp8 (e4m3) with
    a scale for 128 elements. Statistics of rows, ids, masks and weights stay exact. The forward pass is the same, and
    gradients have a rounding error. Not used without being asked for."""
    device_gib: float | None = Field(None, gt=0)
    """Memory of a device that a rank may use, if less than it has. It also applies to CPU ranks."""
    disk: str | None = None
    """Folder for states that do not fit into host memory, on a local NVMe disk. Left out: nothing is kept on disk."""
    homes: dict[
        Literal["moments", "master", "averages", "weights", "gradients"],
        Literal["device", "host", "disk", "released"] | dict[Home, float],
    ] = Field(default_factory=dict)
    """Where states of a kind live, instead of what the planner chooses: {moments: host}, or shares such as
    {moments: {host: 0.5, disk: 0.25}}, the rest on the device. master are the low halves of split master weights.
    weights are those of blocks: in host memory, a block's are fetched before its forward and its backward pass.
    gradients of blocks leave the device as the backward pass makes them (host), all or none, or are released: each
    block is updated in the backward pass, which needs optim.clip: 0, one microbatch and one rank."""
    disk_gib: float | None = Field(None, gt=0)
    """Space in memory.disk for each rank. Default: 90 % of what is free, divided by the ranks of a node."""
    disk_tbw: float | None = Field(None, gt=0)
    """Endurance of the disk of memory.disk in TB written (TBW), from its data sheet. Default: 600 for each TB of its
    size."""
    chunk: int | Literal["auto"] = "auto"
    """Process the norms, projections and feed-forward layers of a block in chunks of this many tokens, and recompute
    them chunk by chunk; 0 turns this off. auto is 0 up to 65,536 tokens per rank, and where recompute
    is neither auto nor full."""
    host_gib: float | None = Field(None, ge=0)
    """Host memory of a rank for offloaded states and activations. Default: 70 % of the machine's memory, or of the
    container's limit, divided by its ranks."""

    _check_homes = limits(
        "homes",
        valid=lambda homes: all(
            (home != "released" or kind == "gradients")
            if isinstance(home, str)
            else all(0 <= share <= 1 for share in home.values()) and sum(home.values()) <= 1
            for kind, home in homes.items()
        ),
        must="device, host, disk or shares from 0 to 1 of them, such as {moments: {host: 0.5}}, for each kind; "
        "gradients may be released",
    )
    _check_fraction = limits(
        "offload_fraction", valid=lambda share: 0 < share <= 1, must="a share above 0 up to 1, or auto"
    )
    _check_chunk = limits(
        "chunk", valid=lambda tokens: tokens >= 0, must="a number of tokens, 0 for all at once, or auto"
    )
    _check_recompute = limits(
        "recompute", valid=lambda n: n >= 0, must="a number of blocks from 0 up, or auto, none, selective or full"
    )

"""The Plan: the layout of a job over its devices. Immutable, printable, and made without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first. ep is laid over dp_shard × cp × tp."""
DEGREES = (*AXES, "nodes", "ep", "virtual_stages", "microbatch", "accumulation")
"""Fields of a plan that are whole numbers from 1."""


@dataclass(frozen=True)
class Plan:
    """The degree of every axis and every choice that follows from the job."""

    device: str
    """cpu or cuda: the kind of device that the ranks use."""
    device_name: str
    """The catalog's name of the device, for peaks and memory."""
    backend: str
    nodes: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    ep_hop: int = 1
    """Ranks of ep on one node for the two-hop exchange (inside the node, then between nodes); 1 sends directly."""
    ep_overlap: bool = False
    """Tokens are sent to experts in two halves, so that sending overlaps with computing."""
    ep_rebalance: float = 0.0
    """At a checkpoint experts move to other ranks if that lowers the highest load by this share; 0: never."""
    ep_moves: bool = True
    """Whether experts may move; false where routing groups depend on expert numbers."""
    ep_copies: int = 0
    """Copies of other ranks' experts that a rank may compute, in each block."""
    ep_copy_rows: float = 0.0
    """Rows by which a copy must lower the highest load to be worth its cost."""
    zero: int = 3
    sequence: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    cp_style: str = "ring"
    cp_group: int = 1
    """Ranks of cp that exchange heads by Ulysses; the groups form a ring."""
    zigzag: bool = False
    """Each group of the ring holds a chunk from the front of the sequence and one from its end."""
    split: tuple[tuple[int, int], ...] = ()
    """The blocks of each stage, from … up to but not including; empty without a pipeline."""
    microbatch: int = 1
    accumulation: int = 1
    precision: str = "fp32"
    fp8: dict[str, Any] = field(default_factory=dict)
    """The job's fp8 section, where the precision is fp8."""
    recompute: str | int = "none"
    """none, selective, full, or how many blocks are recomputed in full."""
    activations: str = "exact"
    """How saved activations are stored (memory.activations)."""
    compile: bool = False
    """Blocks are compiled, one after the other."""
    offload: str = "none"
    chunk: int = 0
    """Tokens of a sequence that pass through a block's linear layers at once; 0: all of them."""
    host_gib: float = 0.0
    """Host memory for offloaded activations."""
    split_master: bool = False
    """The compute weights in bf16 are the upper half of the master weights, whose lower half is a state."""
    states: str = "exact"
    """How states are stored (memory.states)."""
    host_share: float = 0.0
    """Share of the states (moments, low halves, moving averages) that lives in host memory."""
    disk_share: float = 0.0
    """Share of the states that lives on disk."""
    home_shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shares in host memory and on disk of the kinds of states whose homes the job pins (memory.homes)."""
    weight_share: float = 0.0
    """Share of the blocks' weights that lives in host memory; a block's are fetched before each of its passes."""
    gradient_home: str = "device"
    """Where gradients of blocks live: device; host, which those of matrices go to as the backward pass makes them; or
    released, if a block is updated in the backward pass and its gradients are freed."""
    disk: str = ""
    """Folder of the states on disk."""
    stream_gib: float = 0.0
    """Device memory for states on their way."""
    homes: tuple[dict[str, Any], ...] = ()
    """What lives where: a row for each kind and home, with GiB and the GiB that are copied in a step."""
    tables: tuple[dict[str, Any], ...] = ()
    """Where each embedding table is (planner/table_placement.py)."""
    table_optim: dict[str, Any] = field(default_factory=dict)
    """The optimizer of the tables, with its rate as a multiple of that of the rest."""
    towers: tuple[dict[str, Any], ...] = ()
    """The layout of each tower of parallel.towers (planner/tower_layout.py)."""
    tower_costs: tuple[dict[str, Any], ...] = ()
    """Parameters, memory and time of each tower (planner/tower_costs.py)."""
    compression: str = "none"
    compression_warmup: int = 0
    """Steps at the start of a run in which gradients are sent as int8."""
    placement: str = "shards-near"
    """The order of ranks: shards on neighbouring ranks after tp and cp, as in the mesh."""
    bucket_mb: float = 25.0
    allreduce: str = "auto"
    """How replicas sum their gradients."""
    sync: str = "step"
    """When replicas synchronise: every step, or as train.sync sets."""
    sync_every: int = 1
    """Steps between exchanges."""
    reasons: tuple[str, ...] = ()
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of weights and activations while they compute."""
        return 4 if self.precision == "fp32" else 2

    def recomputed(self, first: int, end: int, layers: int) -> int:
        """How many of a stage's blocks run again, in whole or in part: the first of them, as in memory/recompute.py."""
        again = {"none": 0, "selective": layers, "full": layers}.get(str(self.recompute), self.recompute)
        assert isinstance(again, int)
        return end * again // layers - first * again // layers

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def alone(self) -> bool:
        """Whether replicas train independently between exchanges."""
        return self.sync in ("local", "diloco")

    @property
    def joint_axis(self) -> str:
        """The axis over which gradients are summed, and weights sharded: ranks of cp see other tokens, as data-parallel
        ranks do. Empty if there is none."""
        data = "dp_shard" if self.dp_shard > 1 else "dp_replicate" if self.dp_replicate > 1 and not self.alone else ""
        return data if self.cp == 1 else f"{data}_cp" if data else "cp"

    @property
    def cp_cut(self) -> int:
        """Ranks of cp among which weights are cut: with shards, they are cut over both."""
        return self.cp if self.dp_shard > 1 else 1

    @property
    def rings(self) -> tuple[int, int]:
        """Groups in the ring of cp, and ranks in each."""
        return self.cp // self.cp_group, self.cp_group

    @property
    def long(self) -> bool:
        """Whether blocks run chunked (memory/chunked_block.py) or with their inputs offloaded to the host."""
        return self.chunk > 0 or self.offloads_activations

    @property
    def offloads_activations(self) -> bool:
        """Whether the saved inputs of blocks go to host memory."""
        return self.offload in ("activations", "all")

    @property
    def tiered(self) -> bool:
        """Whether states or weights live outside of the device, states in fewer bytes, or master weights are split."""
        return self.split_master or self.states != "exact" or self.offloads_states or self.away

    @property
    def away(self) -> bool:
        """Whether weights live in host memory, or gradients are not kept on the device."""
        return self.weight_share > 0 or self.gradient_home != "device"

    @property
    def offloads_states(self) -> bool:
        """Whether states live outside of the device."""
        return self.host_share + self.disk_share > 0 or any(sum(own.values()) for own in self.home_shares.values())

    def shares_of(self, kind: str) -> dict[str, float]:
        """Shares in host memory and on disk of a kind of states: moments, master or averages."""
        return self.home_shares.get(kind, {"host": self.host_share, "disk": self.disk_share})

    @property
    def lazy_update(self) -> bool:
        """Whether a unit is updated right before its next forward pass. Stages of a pipeline, and replicas that are
        synchronised between steps, read the weights in between."""
        return self.pp == 1 and self.sync == "step"

    @property
    def axes(self) -> dict[str, int]:
        """Degrees by axis, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}

    def layout(self) -> str:
        """A short form of the layout, such as `dp_shard 2 (zero 3) × tp 2`."""
        words = []
        for axis, degree in self.axes.items():
            if degree > 1:
                note = {
                    "dp_shard": f" (zero {self.zero})", "pp": f" ({self.schedule})", "cp": f" ({self.cp_style})"
                }.get(axis, "")  # fmt: skip
                words.append(f"{axis} {degree}{note}")
        notes = [f"ep {self.ep}"] if self.ep > 1 else []
        notes += (
            [f"{self.sync} every {self.sync_every}" if self.sync_every > 1 else self.sync]
            if self.sync != "step"
            else []
        )
        notes += [row["layout"] for row in self.towers]
        return ", ".join([" × ".join(words) or "1 rank", *notes])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": list(self.reasons), "world": self.world, "axes": self.axes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        for name in DEGREES:
            if type(value := known.get(name, 1)) is not int or value < 1:
                raise ValueError(f"a plan with {name} {value!r}; whole numbers from 1 are possible")
        split = tuple((a, b) for a, b in known.get("split", ()))
        lists = {key: tuple(known.get(key, ())) for key in ("reasons", "homes", "tables", "towers", "tower_costs")}
        return cls(**{**known, **lists, "split": split})

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"

"""`cluster`: devices, topology, failure rates and price."""

from __future__ import annotations

import itertools
import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from weft.job.launch.launch_settings import LaunchSettings
from weft.job.section import Section, limits

MAX_DEVICES_PER_NODE = 4096


class TopologyLevel(Section):
    """One level of the cluster's topology: the link of a rank to ranks outside the level below."""

    name: str
    """Name of the level, such as socket, node, rack or pod."""
    size: int = Field(ge=2, le=10**9)
    """Ranks in one group of this level; for the outermost level, all ranks."""
    gb_s: float = Field(gt=0)
    """Bandwidth per rank in one direction, when all ranks send at once and the link is not oversubscribed."""
    latency_us: float = Field(5.0, ge=0)
    """Latency of a small message across this level."""
    oversubscription: float = Field(1.0, ge=1)
    """Factor by which the bandwidth drops when all ranks of a group send to other groups at once."""


class DeviceGroup(Section):
    """Additional nodes with another device."""

    device: str
    """A device of the catalog."""
    nodes: int = Field(1, ge=1, le=10**6)
    """Number of these nodes."""
    devices_per_node: int = Field(8, ge=1, le=MAX_DEVICES_PER_NODE)
    """Devices on each of them."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of one device, if it differs from the catalog."""


class Failures(Section):
    """How often the cluster fails and what a failure costs; the plan chooses the checkpoint interval accordingly."""

    device_hours: float = Field(50_000.0, gt=0)
    """Mean device hours between interruptions of the run. Llama 3 405B: 419 in 54 days on 16,384 GPUs."""
    restart_s: float = Field(300.0, ge=0)
    """Time from a failure to the next step: detection, start and loading."""
    checkpoint_gb_s: float = Field(2.0, gt=0)
    """Write bandwidth of one node to the file system."""
    preemptions_per_day: float = Field(0.0, ge=0)
    """Preemptions per node and day; the run is interrupted whenever one of its nodes is preempted."""


class Cluster(LaunchSettings):
    """The devices to train on or plan for, and how `weft launch` reaches them. Default: this machine."""

    device: str = "auto"
    """cpu, cuda, or a device of the catalog such as h100-sxm; auto uses the GPUs if there are any."""
    nodes: int = Field(1, ge=1, le=10**6)
    """Number of nodes (machines). 2..8 is an elastic run: it starts with 2, or more if they are there, grows up to 8
    when nodes appear and continues without those that go."""
    max_nodes: int | None = Field(None, ge=1, le=10**6)
    """Most nodes of an elastic run; nodes: 2..8 sets both."""
    devices_per_node: int | Literal["auto"] = "auto"
    """Devices, and therefore ranks, on each node."""
    share_devices: bool = False
    """Let several ranks share a GPU over NCCL where there are more ranks than GPUs: for testing, not for speed."""
    network: str = "auto"
    """Network between nodes, such as ib-ndr or roce-400; auto is the usual one for the device."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of one device, if it differs from the catalog."""
    catalog: str | None = None
    """YAML file with your own devices, networks and prices, in the form of weft/hardware/catalog.yaml; its entries are
    added to Weft's."""
    levels: list[TopologyLevel] = Field(default_factory=list)
    """Topology, from the innermost level outwards. Default: the links inside a node, then the network."""
    also: list[DeviceGroup] = Field(default_factory=list)
    """Additional nodes with other devices. Supported by the planner, not in training."""
    failures: Failures = Failures()
    """Failure rates, and the cost of restarts and checkpoints."""
    price_usd_hour: float | None = Field(None, ge=0)
    """Price of one device per hour. Default: the catalog's."""

    @model_validator(mode="before")
    @classmethod
    def _read_range(cls, value: Any) -> Any:
        """`nodes: 2..8` is nodes: 2 and max_nodes: 8."""
        found = re.fullmatch(r"(\d+)\.\.(\d+)", value["nodes"]) if _has_text_nodes(value) else None
        return {**value, "nodes": int(found[1]), "max_nodes": int(found[2])} if found else value

    @field_validator("nodes", mode="before")
    @classmethod
    def _check_nodes(cls, value: Any) -> Any:
        if isinstance(value, str) and ".." in value:
            raise ValueError("must be a number, or a range such as 2..8")
        return value

    @field_validator("max_nodes")
    @classmethod
    def _check_range(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("nodes", 1):
            raise ValueError(f"must be at least cluster.nodes={info.data['nodes']}: write nodes: 2..8")
        return value

    @field_validator("device", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        """YAML reads 4090 as a number."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("levels")
    @classmethod
    def _check_order(cls, value: list[TopologyLevel]) -> list[TopologyLevel]:
        for inner, outer in itertools.pairwise(value):
            if outer.size <= inner.size:
                raise ValueError(
                    f"must go from the innermost level outwards, each larger: {outer.name} has {outer.size} ranks and "
                    f"{inner.name} below it {inner.size}"
                )
        return value

    _check_devices = limits(
        "devices_per_node",
        valid=lambda n: 1 <= n <= MAX_DEVICES_PER_NODE,
        must=f"from 1 to {MAX_DEVICES_PER_NODE}, or auto",
    )


def _has_text_nodes(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("nodes"), str)

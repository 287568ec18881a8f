"""The section of a job that says what it runs on: devices, topology, failures, price."""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section


class TopologyLevel(Section):
    """One level of a cluster's topology: what a rank has to ranks outside the level below."""

    name: str
    """socket, node, rack, pod, or what it is called."""
    size: int = Field(ge=2)
    """Ranks inside one group of this level; the last level may be left open with the number of all ranks."""
    gb_s: float = Field(gt=0)
    """One way, a rank, when all talk at once and nothing is oversubscribed."""
    latency_us: float = Field(5.0, ge=0)
    """A small message across this level."""
    oversubscription: float = Field(1.0, ge=1)
    """How many times less than gb_s is there when all ranks of a group talk to other groups at once."""


class DeviceGroup(Section):
    """More machines, of another kind."""

    device: str
    """A name of the catalog."""
    nodes: int = Field(1, ge=1)
    """Machines of this kind."""
    devices_per_node: int = Field(8, ge=1)
    """Devices on each."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of one device, when it differs from the catalog's."""


class Failures(Section):
    """What goes wrong on the cluster, and what it costs; the plan chooses the checkpoint interval by it."""

    device_hours: float = Field(50_000.0, gt=0)
    """Mean hours one device runs between stops of the whole run. Llama 3: 419 unplanned stops in 54 days of 16,384."""
    restart_s: float = Field(300.0, ge=0)
    """From a stop to the first step again: noticing it, starting, loading."""
    checkpoint_gb_s: float = Field(2.0, gt=0)
    """What one node writes to the file system."""
    preemptions_per_day: float = Field(0.0, ge=0)
    """How often a spot machine is taken away; the run stops each time one of its nodes is."""


class Cluster(Section):
    """The devices. Left out: this machine."""

    device: str = "auto"
    """cpu, cuda, or a name of the catalog such as h100-sxm; auto takes the GPUs if there are any."""
    nodes: int = Field(1, ge=1)
    """Machines."""
    devices_per_node: int | Literal["auto"] = "auto"
    """Devices, and so ranks, on each machine."""
    network: str = "auto"
    """The link between nodes, such as ib-ndr or roce-400; auto is the usual one for the device."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of one device, when it differs from the catalog's."""
    catalog: str | None = None
    """A YAML file with devices, networks and prices of your own; it is read over Weft's, weft/hardware/catalog.yaml."""
    levels: list[TopologyLevel] = Field(default_factory=list)
    """The topology from the innermost level outwards. Left out: the node's links, then the network."""
    also: list[DeviceGroup] = Field(default_factory=list)
    """Machines of other kinds beside these. They can be planned for, but not trained on yet."""
    failures: Failures = Failures()
    """Failure rate, restart and checkpoint cost."""
    price_usd_hour: float | None = Field(None, ge=0)
    """Price of one device. Left out: the catalog's usual price."""

    @field_validator("device", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """YAML reads 4090 as a number."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("levels")
    @classmethod
    def _rising(cls, value: list[TopologyLevel]) -> list[TopologyLevel]:
        for inner, outer in itertools.pairwise(value):
            if outer.size <= inner.size:
                raise ValueError(
                    f"must go from the innermost level outwards, each larger: {outer.name} has {outer.size} ranks and "
                    f"{inner.name} below it {inner.size}"
                )
        return value

    @field_validator("devices_per_node")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

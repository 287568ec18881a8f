"""Facts of the cluster that the cost of a layout depends on: speeds of its devices and links.

Every number may be an array with one entry per candidate, so that a table's rows are estimated together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weft.hardware.catalog import DTYPES, Device, find_device, find_network
from weft.hardware.prices import price_of
from weft.job.schema import Job
from weft.planner.model.model_facts import Size


@dataclass(frozen=True)
class Level:
    """One level of the topology: the ranks that share it, and the speed of its links."""

    name: str
    size: Size
    """Ranks inside one group of this level."""
    gb_s: Size
    """One-way bandwidth of a rank to ranks outside the level below."""
    latency_us: Size
    oversubscription: Size = 1.0


@dataclass(frozen=True)
class ClusterFacts:
    """The devices and the levels of their topology, innermost first."""

    world: Size
    levels: tuple[Level, ...]
    peak_tflops: dict[str, Size]
    """Dense peak by precision."""
    reach: Size
    """Share of that peak which the best measured matrix product reaches."""
    memory_gib: Size
    memory_gb_s: Size
    units: Size
    """Cores (streaming multiprocessors)."""
    watts: Size = 0.0
    price_usd_hour: Size = None
    host_gb_s: Size = 25.0
    """Between the device and its host's memory."""
    host_gib: Size = 256.0
    """Host memory for each device."""
    device: Device | None = field(default=None)
    allreduce: str = "auto"
    """How replicas sum their gradients (comm.allreduce)."""

    @property
    def node_size(self) -> Size:
        return self.levels[0].size


UNKNOWN_TFLOPS = 0.05
"""Peak of a device without a published one: a core of a CPU."""
NODE_LATENCY_US = 4.0
"""Latency of a collective's step between two devices of a node (NCCL tests on A100 and H100 nodes)."""


def make_cluster(
    device: Device, world: int, per_node: int, network_gb_s: float, latency_us: float, memory_gib: float | None = None
) -> ClusterFacts:
    """A cluster of equal nodes; `network_gb_s` is what one device has to other nodes."""
    inside = device.nvlink_domain or per_node
    return ClusterFacts(
        world=world,
        levels=(
            Level("node", min(inside, max(world, 1)), device.link_gb_s, NODE_LATENCY_US),
            Level("network", world, network_gb_s, latency_us),
        ),
        peak_tflops={name: device.tflops_of(name) or UNKNOWN_TFLOPS for name in DTYPES},
        reach=device.matmul_share,
        units=device.units,
        memory_gib=memory_gib or device.memory_gib,
        memory_gb_s=device.memory_tb_s * 1000,
        watts=device.tdp_w,
        price_usd_hour=price_of(device.name),
        device=device,
    )


def cluster_facts(job: Job, world: int, device: Device | None = None, memory_gib: float | None = None) -> ClusterFacts:
    """Facts of a job's cluster with `world` ranks."""
    own = job.cluster.catalog
    device = device or find_device("cpu" if job.cluster.device == "auto" else job.cluster.device, own)
    nodes = job.cluster.nodes
    network = find_network(device.network if job.cluster.network == "auto" else job.cluster.network, own)
    per_node = max(1, world // nodes)
    # one NIC a device is usual behind GPUs that NVLink joins; elsewhere the ranks of a node share one
    share = 1 if device.kind != "cpu" and device.link_gb_s > 100 else per_node
    memory = memory_gib or job.cluster.memory_gib
    made = make_cluster(device, world, per_node, network.gb_s / share, network.latency_us, memory)
    price = job.cluster.price_usd_hour
    return replace(
        made, levels=_levels(job, made), price_usd_hour=made.price_usd_hour if price is None else price,
        allreduce=job.comm.allreduce,
    )  # fmt: skip


def _levels(job: Job, made: ClusterFacts) -> tuple[Level, ...]:
    """The job's topology; the network connects groups of its last level."""
    levels = [
        Level(level.name, min(level.size, made.world), level.gb_s, level.latency_us, level.oversubscription)
        for level in job.cluster.levels
    ]
    if not levels:
        return made.levels
    return (*levels, made.levels[-1]) if levels[-1].size < made.world else tuple(levels)

"""Plan → one mesh of ranks with named axes. The only place where process groups are made."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.comm.agreement import all_gather_json
from weft.comm.axis import Axis
from weft.comm.dtensor_internals import flatten_mesh, join_meshes
from weft.comm.encrypted_gloo import encrypted_store
from weft.comm.fake_internals import join_fake_group
from weft.comm.gloo_internals import ENCRYPTED, is_gloo
from weft.comm.meter import Meter
from weft.comm.rendezvous import await_all, rendezvous
from weft.comm.shards import sharded_axes
from weft.hardware.network import export_interface
from weft.hardware.rank_environment import launcher_backend, rank_info
from weft.hardware.shared_devices import act_as_own_host, memory_fraction, ranks_per_device, use_many_queues
from weft.job.comm import BACKENDS
from weft.job.errors import MachineError
from weft.job.import_by_name import find_object
from weft.planner.plan import Plan
from weft.wire.tunnel import Tunnel

JOINT: dict[str, tuple[str, str]] = {"dp_shard_cp": ("dp_shard", "cp"), "dp_replicate_cp": ("dp_replicate", "cp")}
"""Joint axes of data and cp: the ranks of a cp group hold the same weights and different tokens, so their gradients are
summed too."""

REPLICATED = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes over which a weight may be replicated: those that do not shard it."""
REPLICATED_EXPERTS = ("dp_replicate", "ep_shard", "ep")
"""The same for experts that are sharded over ep."""

EXPERT_MESH_AXES = ("pp", "dp_replicate", "ep_shard", "ep")
"""The mesh of the experts, over dp_shard × cp × tp: neighbours hold different experts (ep), ranks that are ep apart the
same ones (ep_shard). ep_shard with dp_replicate is expert_replicate."""
PARTS_OF_AXIS: dict[str, tuple[str, ...]] = {
    **JOINT, "ep": ("dp_shard", "cp", "tp"), "ep_shard": ("dp_shard", "cp", "tp"),
    "expert_replicate": ("dp_replicate", "dp_shard", "cp", "tp"),
}  # fmt: skip
"""For an axis made of others, the axes along which its ranks may differ."""


@dataclass
class Mesh:
    """The ranks of a run, their axes, and this rank's coordinates. With one rank there is no process group."""

    rank: int
    world: int
    device: torch.device
    device_mesh: DeviceMesh | None
    axes: dict[str, Axis]
    """The axes with more than one rank, and the joint axis of data and cp (JOINT)."""
    everyone: Axis | None
    host_group: dist.ProcessGroup | None
    """A Gloo group for small values between steps: that of `everyone`, if it is one."""
    disk_group: dist.ProcessGroup | None
    """A Gloo group for checkpoints, which are saved by a thread of their own during training."""
    coords: dict[str, int] = field(default_factory=dict)
    joined: DeviceMesh | None = None
    """The mesh of the joint axis."""
    meter: Meter = field(default_factory=Meter)
    """Counts this rank's waits for others."""

    def every_axis(self) -> list[Axis]:
        """The named axes and everyone."""
        return [*self.axes.values(), *([self.everyone] if self.everyone else [])]

    folded: DeviceMesh | None = None
    """The mesh of the experts (EXPERT_MESH_AXES), if they are sharded over ep."""
    alone: bool = False
    """Whether replicas train on their own between exchanges (train.sync)."""
    store: dist.Store | None = None
    """The rendezvous store."""
    tunnel: Tunnel | None = None
    """Encrypts the messages of Gloo between hosts."""
    towers: dict[str, Mesh] = field(default_factory=dict)
    """The meshes of the towers that this rank holds (parallel.towers), by name."""
    held_by: dict[int, tuple[Tensor, Mesh]] = field(default_factory=dict)
    """By id, tensors of towers and the mesh of their tower."""

    def assign(self, tensors: Iterable[Tensor], tower: Mesh) -> None:
        """Remember that these tensors are spread over a tower's mesh."""
        self.held_by |= {id(tensor): (tensor, tower) for tensor in tensors}

    def axis(self, name: str) -> Axis | None:
        """The axis, or None if it has one rank."""
        return self.axes.get(name)

    def submesh(self, *names: str) -> DeviceMesh:
        """The part of the device mesh with these axes, without those of one rank."""
        assert self.device_mesh is not None
        found = [n for n in names if n in self.axes]
        if self.joined is None or found[-1] not in JOINT:
            return self.device_mesh[tuple(found)]
        return join_meshes([*(self.device_mesh[n] for n in found[:-1]), self.joined])

    def coord(self, name: str) -> int:
        axis = self.axes.get(name)
        return 0 if axis is None else axis.rank

    def dp_rank(self, plan: Plan) -> int:
        """The index of this rank's share of the global batch."""
        return self.coord("dp_replicate") * plan.dp_shard + self.coord("dp_shard")

    @property
    def position(self) -> str:
        """This rank's coordinates as text, such as `dp_shard1 tp0`."""
        return " ".join(f"{name}{i}" for name, i in self.coords.items()) or "alone"

    def all_gather_json(self, value: object) -> list[Any]:
        """A small JSON value from every rank, in rank order."""
        with self.meter.inside("everyone", "all_gather_json") if self.everyone is not None else nullcontext():
            return all_gather_json(value, self.host_group)

    def replica_axes(self, tensor: Tensor) -> list[Axis]:
        """The axes along which other ranks hold the same shard of a tensor."""
        if (held := self.held_by.get(id(tensor))) is not None:
            return held[1].replica_axes(tensor)
        sharded = sharded_axes(tensor)
        names = REPLICATED_EXPERTS if {"ep", "ep_shard"}.intersection(sharded) else REPLICATED
        others = {axis for name in sharded for axis in JOINT.get(name, (name,))}
        others |= {"dp_replicate"} if self.alone else set()
        return [self.axes[name] for name in names if name in self.axes and name not in others]

    def holds_first(self, tensor: Tensor) -> bool:
        """Whether this rank is the first of those that hold the same shard of a tensor."""
        return all(axis.rank == 0 for axis in self.replica_axes(tensor))

    def sum_over_model(self, value: Tensor) -> Tensor:
        """Sum in place over all ranks that train the same weights: all, or those of one replica that trains alone."""
        if self.everyone is not None and not self.alone:
            return self.everyone.all_reduce(value)
        for name in (*REPLICATED, "pp"):
            if name in self.axes and name != "dp_replicate":
                self.axes[name].all_reduce(value)
        return value

    def barrier(self) -> None:
        if self.everyone is not None:
            with self.meter.inside("everyone", "barrier"):
                dist.barrier(group=self.host_group)

    def create_communicators(self) -> None:
        """Create the NCCL communicator of every group, by a first collective on each, in the same order on all ranks.

        Otherwise each is created by its first operation, which may be a message between two of its ranks while others
        wait in another collective.
        """
        assert self.device_mesh is not None
        of_towers = [tower.device_mesh for tower in self.towers.values()]
        meshes = [self.device_mesh, *(m for m in (self.joined, self.folded, *of_towers) if m is not None)]
        groups = [g for mesh in meshes for g in mesh.get_all_groups()]
        groups += [axis.group for mesh in (self, *self.towers.values()) for axis in mesh.every_axis()]
        one = torch.ones(1, device=self.device)
        for group in {g.group_name: g for g in groups if g.size() > 1}.values():
            dist.all_reduce(one, group=group)
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.everyone is not None:
            dist.destroy_process_group()
        if self.tunnel is not None:
            self.tunnel.close()


CONTEXT_GIB = 2.0
"""Upper bound of the GPU memory of a process that only waits."""


def local_device(plan: Plan, local_rank: int) -> torch.device:
    """The device of a rank; several ranks may share a GPU."""
    if plan.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(
            "the plan is for cuda, but torch sees no GPU here; use cluster.device=cpu or run weft doctor"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def open_device(plan: Plan) -> None:
    """Initialise CUDA before this process is needed as a rank: the driver, and where there is only one GPU, which needs
    to have room for it, its context and the library of matrix products. Otherwise this is part of every recovery."""
    if plan.device != "cuda" or not torch.cuda.is_available():
        return
    use_many_queues()
    torch.cuda.init()
    if torch.cuda.device_count() > 1:
        return
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    if plan.predicted.get("memory_gib", total) + CONTEXT_GIB < total:
        for dtype in (torch.float32, torch.bfloat16):
            one = torch.ones(16, 16, device="cuda", dtype=dtype)
            (one @ one).sum().item()


def connect(
    plan: Plan, timeout_s: float = 600.0, store: dist.Store | None = None, tunnel: Tunnel | None = None
) -> Mesh:
    """Join the ranks of a plan, at a store if one is given; Gloo's messages pass through the tunnel if there is one.

    The rank is read from the environment (weft.hardware.rank_environment). The rendezvous is the file WEFT_STORE if it
    is set (one machine: no port is needed), else MASTER_ADDR:MASTER_PORT, else MPI.
    """
    here = rank_info()
    if here.world != plan.world:
        raise MachineError(f"the plan needs {plan.world} ranks, but {here.world} were started")
    if plan.device == "cuda":
        use_many_queues()
    device = local_device(plan, here.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        sharing = ranks_per_device(here.local_world, torch.cuda.device_count())
        torch.cuda.set_per_process_memory_fraction(memory_fraction(sharing) if sharing > 1 else 1.0, device)
        if sharing > 1 and plan.backend == "nccl":
            act_as_own_host(one_node=here.local_world == here.world)
    if here.world == 1:
        return Mesh(0, 1, device, None, {}, None, None, None)
    timeout = datetime.timedelta(seconds=timeout_s)
    if here.local_world < here.world:
        export_interface()
    library = BACKENDS[plan.backend]
    if library.launcher and launcher_backend() != library.name:
        raise MachineError(
            f"comm.backend={library.name}: start the ranks by {library.launcher} -n {plan.world}, or use "
            f"comm.backend={library.other}"
        )
    if library.register:
        find_object(library.register, "comm.backend")()
    store, backend, host_backend = store or rendezvous(timeout), library.torch_name, library.host
    if tunnel is not None:
        store = encrypted_store(store or next(dist.rendezvous("env://"))[0], tunnel)
        backend = host_backend = ENCRYPTED
    if store is not None:
        await_all(store, here.world, timeout)
    try:
        dist.init_process_group(backend, store=store, rank=here.rank if store else -1,
                                world_size=here.world if store else -1, timeout=timeout)  # fmt: skip
    except RuntimeError as error:
        if not re.search("Unable to find (interface|address)", str(error)):
            raise
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        raise MachineError(
            f"GLOO_SOCKET_IFNAME={name} is no network interface with an address; `ip address` lists them"
            if name else "the ranks have no network interface; is the loopback interface up (`ip link set lo up`)?"
        ) from None  # fmt: skip
    mesh = mesh_of(plan, device, timeout, host_backend)
    mesh.store, mesh.tunnel = store, tunnel  # torch keeps only the C++ object of a store alive
    if plan.backend == "nccl":
        mesh.create_communicators()
    return mesh


def fake_mesh(plan: Plan, rank: int) -> Mesh:
    """The mesh of one rank of a plan, with peers that do not exist: nothing is sent or received."""
    device = torch.device("cpu")
    if plan.world == 1:
        return Mesh(0, 1, device, None, {}, None, None, None)
    join_fake_group(rank, plan.world)
    return mesh_of(plan, device, datetime.timedelta(seconds=60), host_backend="fake")


def ranks_of_a_node(plan: Plan) -> int:
    """Ranks per node, which are in order: as many as were started on this one, or fewer if the plan has fewer."""
    here = rank_info()
    started = here.local_world if here.world == plan.world else plan.world
    return max(1, min(plan.world // plan.nodes, started))


def axis_of(name: str, group: dist.ProcessGroup | None, per_node: int, meter: Meter) -> Axis:
    """A group of ranks as an axis, with the node of each rank."""
    assert group is not None
    nodes = tuple(r // per_node for r in dist.get_process_group_ranks(group))
    between = nodes if len(set(nodes)) > 1 else ()
    return Axis(name, group, len(nodes), dist.get_rank(group), nodes=between, meter=meter)


def mesh_of(plan: Plan, device: torch.device, timeout: datetime.timedelta, host_backend: str = "gloo") -> Mesh:
    """The mesh of a plan over a default process group that exists already."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wide = {name: degree for name, degree in plan.axes.items() if degree > 1}
    device_mesh = init_device_mesh(device.type, tuple(wide.values()), mesh_dim_names=tuple(wide))
    coords = dict(zip(wide, device_mesh.get_coordinate() or (), strict=True))
    per_node, meter = ranks_of_a_node(plan), Meter(cuda=device.type == "cuda")
    axes = {n: axis_of(n, device_mesh.get_group(n), per_node, meter) for n in wide}
    everyone = axis_of("everyone", dist.group.WORLD, per_node, meter)
    joined = None
    if (joint := plan.joint_axis) in JOINT:
        joined = flatten_mesh(device_mesh[JOINT[joint]], joint)
        axes[joint] = axis_of(joint, joined.get_group(), per_node, meter)
    folded = None
    if plan.ep > 1:
        shape = (plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp * plan.tp // plan.ep, plan.ep)
        folded = init_device_mesh(device.type, shape, mesh_dim_names=EXPERT_MESH_AXES)
        parts = {name: folded[name] for name in ("ep_shard", "ep")}
        parts["expert_replicate"] = flatten_mesh(folded["dp_replicate", "ep_shard"], "expert_replicate")
        if 1 < plan.ep_hop < plan.ep:
            nodes = (plan.world // plan.ep, plan.ep // plan.ep_hop, plan.ep_hop)
            hops = init_device_mesh(device.type, nodes, mesh_dim_names=("ep_groups", "ep_far", "ep_near"))
            parts |= {name: hops[name] for name in ("ep_far", "ep_near")}
        axes |= {n: axis_of(n, part.get_group(), per_node, meter) for n, part in parts.items() if part.size() > 1}
    if plan.sync == "predict" and plan.dp_replicate > 1:  # in a group of their own: small messages do not queue behind
        axes["late_sum"] = axis_of("late_sum", dist.new_group(timeout=timeout), per_node, meter)
    disk_group = dist.new_group(backend=host_backend, timeout=timeout)
    if is_gloo():  # each group has a thread that polls a hundred times a second
        host_group = everyone.group
    else:
        host_group = dist.new_group(backend=host_backend, timeout=timeout)
    mesh = Mesh(
        rank, world, device, device_mesh, axes, everyone, host_group, disk_group, coords, joined, meter, folded,
        plan.alone,
    )  # fmt: skip
    found = {row["name"]: tower_mesh(mesh, row, per_node, timeout) for row in plan.towers}
    mesh.towers = {name: tower for name, tower in found.items() if tower is not None}
    return mesh


def tower_mesh(mesh: Mesh, row: dict[str, Any], per_node: int, timeout: datetime.timedelta) -> Mesh | None:
    """The mesh of one row of a plan's towers; None on ranks that do not hold it. Collective over all ranks."""
    ranks = list(range(row["first"], row["first"] + row["ranks"]))
    wide = {name: row[name] for name in TOWER_AXES if row[name] > 1}
    everyone, device_mesh = mesh.everyone, None
    if len(ranks) < mesh.world:
        group = dist.new_group(ranks, timeout=timeout)
        inside = mesh.rank in ranks and len(ranks) > 1
        everyone = axis_of(f"{row['name']}.everyone", group, per_node, mesh.meter) if inside else None
    if wide:
        device_mesh = DeviceMesh(mesh.device.type, torch.tensor(ranks).view(*wide.values()), mesh_dim_names=tuple(wide))
    if mesh.rank not in ranks:
        return None
    axes, coords = {}, {}
    if device_mesh is not None:
        axes = {n: axis_of(f"{row['name']}.{n}", device_mesh.get_group(n), per_node, mesh.meter) for n in wide}
        coords = dict(zip(wide, device_mesh.get_coordinate() or (), strict=True))
    return Mesh(
        ranks.index(mesh.rank), len(ranks), mesh.device, device_mesh, axes, everyone, mesh.host_group,
        mesh.disk_group, coords, meter=mesh.meter,
    )  # fmt: skip


TOWER_AXES = ("dp_replicate", "dp_shard", "tp")
"""The axes of a tower's mesh, outermost first."""

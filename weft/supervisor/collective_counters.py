"""Progress of a mesh's collectives, read by the heartbeat thread."""

from __future__ import annotations

import torch.distributed as dist

from weft.mesh import Mesh
from weft.supervisor.process_group_internals import backend_of, sequence_number


class CollectiveCounters:
    """Reads the progress of a mesh's collectives from the heartbeat thread, outside the training thread."""

    def __init__(self, mesh: Mesh):
        self.meter = mesh.meter
        everyone = {} if mesh.everyone is None else {"everyone": mesh.everyone}
        groups = {name: axis.group for name, axis in {**mesh.axes, **everyone}.items()}
        self.backends = [backend_of(group, mesh.device) for group in groups.values()]
        self.group_index = {name: i + 1 for i, name in enumerate(groups)}
        self.members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}

    def __call__(self) -> tuple[int, int, list[int]]:
        counts = [sequence_number(backend) for backend in self.backends]
        return self.meter.number, self.group_index.get(self.meter.axis, 0), counts

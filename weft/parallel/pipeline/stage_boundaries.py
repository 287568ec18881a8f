"""What passes between the stages of a pipeline, for each shape of batches."""

from __future__ import annotations

from typing import Any

import torch

from weft.job.errors import JobError
from weft.parallel.pipeline.boundary import Boundary, message_layout, pack, unpack
from weft.parallel.pipeline.messages import StageLinks
from weft.parallel.spread_model import Batch, LossOf, SpreadModel
from weft.planner.schedules.actions import Schedule


class StageBoundaries:
    """The boundaries between stages, by the shapes of a batch.

    Weft's models pass one tensor whose shape follows from the batch. What a module of your own passes is found by a
    forward pass through all stages, once for each shape of batches, in which each stage describes it to the next one.
    """

    def __init__(
        self, stages: dict[int, SpreadModel], schedule: Schedule, links: StageLinks, sequence_cut: int,
        dtype: torch.dtype,
    ):  # fmt: skip
        self.stages, self.schedule, self.links = stages, schedule, links
        self.sequence_cut, self.dtype = sequence_cut, dtype
        self.last = schedule.stages - 1
        self.known: dict[Any, list[Boundary]] = {}

    def of(self, batch: Batch, loss_of: LossOf) -> list[Boundary]:
        """The boundary after each stage but the last. All ranks of a pipeline call this with the same batches."""
        module: Any = next(iter(self.stages.values())).module
        if not hasattr(module, "stage"):
            return [Boundary.single(module.hidden_shape(batch, self.sequence_cut), self.dtype)] * self.last
        key = module.training, tuple((name, tuple(t.shape)) for name, t in batch.items())
        if key not in self.known:
            self.known[key] = self._find(batch, loss_of, module.training)
        return self.known[key]

    @torch.no_grad()
    def _find(self, batch: Batch, loss_of: LossOf, training: bool) -> list[Boundary]:
        links, device = self.links, self.links.device
        modules: list[Any] = [stage.module for stage in self.stages.values()]
        for module in modules:
            module.eval()  # statistics of batch norms do not change
            module.stage.mode = training
        found, value = [Boundary(None, ())] * self.last, None
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for index in range(self.last):
                source, target = self.schedule.rank_of[index], self.schedule.rank_of[index + 1]
                if source == links.axis.rank:
                    value = loss_of(self.stages[index].module, batch, value)
                    found[index], tensors = Boundary.of(value)
                    if target != source:
                        head = torch.frombuffer(bytearray(found[index].to_bytes()), dtype=torch.uint8)
                        for part in (torch.tensor([len(head)]), head, pack(tensors)):
                            links.send_alone(target, part)
                elif target == links.axis.rank:
                    size = int(links.receive_alone(source, ((1,), torch.int64)))
                    head = links.receive_alone(source, ((size,), torch.uint8))
                    found[index] = Boundary.from_bytes(bytes(head.tolist()))
                    message = links.receive_alone(source, message_layout(found[index].tensors))
                    value = found[index].value(unpack(message, found[index].tensors))
        for stage in self.stages.values():
            stage.data.after_evaluation()
        for module in modules:
            module.stage.mode = None
            module.train(training)
        return found


def check_boundary(expected: Boundary, found: Boundary, stage: int) -> None:
    """Refuse what differs between batches of the same shape."""
    if expected != found:
        raise JobError(
            f"stage {stage} of the pipeline gave {found.tensors} with {found.tree}, and {expected.tensors} with "
            f"{expected.tree} for a batch of the same shape before; what passes between stages must depend on shapes "
            "alone: choose a parallel.split that keeps this inside a stage"
        )

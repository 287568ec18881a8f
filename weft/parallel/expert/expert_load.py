"""The experts' load: counted in every step, written to the metrics, and used to update routers that balance by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.axis import Axis, Pending
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.parallel.expert.expert_parallel import ExpertDispatch
from weft.parallel.expert.replication import ExpertCopies

MAX_LOGGED_COUNTS = 4096
"""Most numbers of tokens by block and expert in a step's metrics; larger models record their sums over blocks."""


LOAD_PREFIX = "expert_load."
"""Prefix of the names of these counts in a checkpoint."""

Pairs = tuple[tuple[int, int], ...]
"""Experts and ranks of ep."""


def mixtures(model: nn.Module) -> dict[int, MixtureOfExperts]:
    """A model's mixtures of experts, by the number of their block."""
    return {int(n.split(".")[1]): m for n, m in model.named_modules() if isinstance(m, MixtureOfExperts)}


class ExpertLoad:
    """The mixtures of experts on this rank, and the load of the last step over all ranks.

    Every rank holds other tokens or other blocks, so a sum over all ranks counts each token once.
    """

    def __init__(self, model: nn.Module, device: torch.device, everyone: Axis | None, ep: int = 1):
        """`model` is the whole one, before it is split into stages."""
        found = mixtures(model)
        self.blocks, self.everyone, self.ep = sorted(found), everyone, ep
        width = max((len(m.tally) for m in found.values()), default=0)
        self.table = torch.zeros((len(found), width), dtype=torch.float64, device=device)
        """[blocks with experts, experts + 3], as MixtureOfExperts.tally has it."""
        self.since = torch.zeros_like(self.table)
        """The sum of the tables since experts were last moved, or could have been."""
        self.steps = 0
        """Steps in `since`."""
        self.work: Pending | None = None
        self.parts: dict[int, MixtureOfExperts] = {}
        self.copies: dict[int, Pairs] = {}
        """By block, the experts with copies on other ranks, and those ranks of ep."""

    def watch(self, *stages: nn.Module) -> None:
        """Set the stages that this rank holds."""
        self.parts = {i: m for stage in stages for i, m in mixtures(stage).items()}

    def place(self, copies: dict[int, Pairs]) -> None:
        """Replace the copies of experts by these."""
        self.copies = {block: tuple(sorted(pairs)) for block, pairs in copies.items() if pairs}
        for index, part in self.parts.items():
            if isinstance(part.layout, ExpertDispatch):
                pairs = self.copies.get(index)
                own = part.options.count // self.ep
                part.layout.copies = None if pairs is None else ExpertCopies(own, self.ep, pairs)

    def tensors(self) -> dict[str, Tensor]:
        """The counts since experts were last moved, in place, for snapshots and checkpoints."""
        return {f"{LOAD_PREFIX}since": self.since} if self.ep > 1 and self.blocks else {}

    def forget(self) -> None:
        """Count from here on."""
        self.since.zero_()
        self.steps = 0

    def placement(self) -> dict[str, Any]:
        """The placement of copies and the steps in `since`, for snapshots and checkpoints."""
        pairs = {str(block): [list(pair) for pair in pairs] for block, pairs in self.copies.items()}
        return {"ep": self.ep, "copies": pairs, "steps": self.steps} if self.tensors() else {}

    def restore(self, placement: dict[str, Any]) -> None:
        """Place copies as placement() returned them, if ep has the same size; else there are none."""
        found = placement.get("copies", {}) if placement.get("ep") == self.ep else {}
        self.steps = placement.get("steps", 0)
        self.place({int(block): tuple((expert, rank) for expert, rank in pairs) for block, pairs in found.items()})

    def begin(self, scale: float) -> None:
        """Call before a step's backward passes."""
        for part in self.parts.values():
            part.unit.fill_(scale)

    @torch.no_grad()
    def gather(self) -> None:
        """Call after the last of them: starts to sum the counts of all ranks."""
        if not self.blocks:
            return
        self.table.zero_()
        for index, part in self.parts.items():
            self.table[self.blocks.index(index)] = part.tally
            part.tally.zero_()
        self.work = None if self.everyone is None else self.everyone.start_all_reduce(self.table)

    def figures(self) -> Tensor:
        """The last step's table, on the device; empty without experts."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.table.clone()

    @torch.no_grad()
    def after_step(self, taken: bool | Tensor = True) -> None:
        """Call after a step: updates the routers by its load, equally on every rank, if it was taken."""
        table = self.figures()
        if taken is False:
            return
        self.since += table
        self.steps += 1
        for index, part in self.parts.items():
            e = part.options
            load = table[self.blocks.index(index), : e.count]
            if part.bias is not None and part.router.weight.requires_grad:  # Wang et al. 2024, algorithm 1
                part.bias.add_(torch.sign(load.mean() - load) * taken, alpha=e.bias_rate)
            if part.past is not None:
                new = (load / load.mean().clamp(min=1)).to(part.past.dtype)
                part.past.copy_(new if taken is True else torch.where(taken, new, part.past))

    def metrics(self, values: list[float], tokens: int) -> dict[str, Any]:
        """The fields of a step's metrics, from its table read by the host."""
        if not self.blocks:
            return {}
        table = torch.tensor(values, dtype=torch.float64).view(self.table.shape)
        counts = table[:, :-3]  # [blocks, experts]
        routed = counts.sum(1, keepdim=True).clamp(min=1)
        share = counts / routed
        entropy = -torch.xlogy(share, share).sum(1) / torch.tensor(float(counts.shape[1])).log().clamp(min=1e-9)
        uneven = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
        few = counts if counts.numel() <= MAX_LOGGED_COUNTS else counts.sum(0, keepdim=True)
        return {
            "experts": {
                "max_over_mean": float(uneven.max()),
                "max_over_mean_by_block": [round(x, 4) for x in uneven.tolist()],
                "entropy": float(entropy.mean()),
                "dropped": int(table[:, -3].sum()),
                "dropped_share": float(table[:, -3].sum() / routed.sum()),
                "aux_loss": float(table[:, -2].sum()) / max(1, tokens),
                "z_loss": float(table[:, -1].sum()) / max(1, tokens),
                "blocks": self.blocks,
                "counts": [[int(n) for n in row] for row in few.tolist()],
            }
        }

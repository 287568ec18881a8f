"""Records the routing of the reference run and replays it in each layout, so that both compute the same.

Where two experts' scores differ only by rounding, another order of sums may send a token to another expert, and the
gradients of both change. That is not an error of the layout, and must not hide one. So a layout uses the reference's
choices, its routers' scores are compared like gradients, and the share of choices it would have made differently is
reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.mesh import Mesh
from weft.parallel.expert.expert_load import ExpertLoad

FILE = "routes.pt"
MIN_SPREAD = 1e-2
"""Differences of scores are relative to their spread, or to this share of their size if all are nearly equal."""

Routes = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""By block and sample: the scores of its tokens [seq, experts], and the chosen experts [seq, k]."""


@dataclass(frozen=True)
class Routing:
    """How the routing of a replayed run differs from the reference."""

    apart: float
    """Share of the tokens' experts that it would have chosen differently."""
    scores: float
    """Difference of the scores in the worst block, relative to their spread."""


class RoutingReplay:
    """Records the choices of this rank's routers in the reference run, and replays them in other runs."""

    def __init__(self, load: ExpertLoad | None, folder: str, reference: str | None):
        self.file = Path(folder if reference is None else reference) / FILE
        self.blocks = [] if load is None else load.blocks
        self.routes: Routes = torch.load(self.file, weights_only=True) if reference is not None and self.blocks else {}
        self.recording = reference is None
        self.seen = torch.zeros(len(self.blocks), 6, dtype=torch.float64)
        """Sums by block: other choices, squared differences of the scores, scores, their squares, and both counts."""
        for block, part in ({} if load is None else load.parts).items():
            part.routing_override = partial(self._record if self.recording else self._replay, block)

    def _record(self, block: int, ranked: Tensor, chosen: Tensor, samples: Tensor | None, rows: Tensor) -> Tensor:
        assert samples is not None
        for sample, scores, experts in zip(samples.tolist(), ranked.cpu(), chosen.cpu(), strict=True):
            self.routes[block, sample] = scores.clone(), experts.clone()
        return chosen

    def _replay(self, block: int, ranked: Tensor, chosen: Tensor, samples: Tensor | None, rows: Tensor) -> Tensor:
        assert samples is not None
        known = [self.routes[block, sample] for sample in samples.tolist()]
        scores, experts = (torch.stack(x).to(ranked.device) for x in zip(*known, strict=True))
        real = rows < scores.shape[1]  # the others are padding
        place = torch.where(real, rows, 0)
        chosen_there = experts[:, place]
        others = (chosen.unsqueeze(3) != chosen_there.unsqueeze(2)).all(3)[:, real]
        theirs = scores[:, place[real]].double()
        off = ranked[:, real].double() - theirs
        sums = torch.stack([others.sum().double(), off.square().sum(), theirs.sum(), theirs.square().sum()]).cpu()
        sizes = torch.tensor([others.numel(), off.numel()], dtype=torch.float64)
        self.seen[self.blocks.index(block)] += torch.cat([sums, sizes])
        return chosen_there

    def end(self, mesh: Mesh) -> Routing | None:
        """Call after the last step, on all ranks. Returns the differences from the reference."""
        if self.recording:
            torch.save(self.routes, self.file)
            return None
        if not self.blocks:
            return None
        seen = self.seen.to(mesh.device)
        if mesh.everyone is not None:
            mesh.everyone.all_reduce(seen)
        otherwise, off, total, squares, choices, number = seen.cpu().unbind(1)
        spread = torch.maximum(squares - total.square() / number, MIN_SPREAD**2 * squares)
        return Routing(
            float(otherwise.sum() / choices.sum()), float((off / spread).sqrt().max().nan_to_num(float("inf")))
        )

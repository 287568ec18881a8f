"""Where one process sends its tokens, so that each layout is held against it on the same way.

Routing is a decision: where two experts' scores are equal but for rounding, another order of sums sends a token to
another expert, and the gradients of both are different ones. That is no fault of a layout, and it must not hide one. So
a layout is led where one process went, its routers' scores are held to those of one process as gradients are, and the
share of choices that it would have made otherwise is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.mesh import Mesh
from weft.parallel.expert.load import ExpertLoad

FILE = "routes.pt"
LEAST_SPREAD = 1e-2
"""Scores are compared to how far they lie from their mean, or to this share of their size where all are alike."""

Routes = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""By block and sample: how its tokens rank the experts [seq, experts], and what they chose [seq, k]."""


@dataclass(frozen=True)
class Routing:
    """What a run that was led would have done by itself."""

    apart: float
    """Share of the tokens' experts that it would have chosen otherwise."""
    scores: float
    """Difference of the scores in the worst block, relative to their spread."""


class Guided:
    """The routers of one rank, watched: those of the reference write down where tokens go, the others are led there."""

    def __init__(self, load: ExpertLoad | None, folder: str, reference: str | None):
        self.file = Path(folder if reference is None else reference) / FILE
        self.blocks = [] if load is None else load.blocks
        self.routes: Routes = torch.load(self.file, weights_only=True) if reference is not None and self.blocks else {}
        self.leads = reference is None
        self.seen = torch.zeros(len(self.blocks), 6, dtype=torch.float64)
        """By block: other choices, squares of the scores' differences, scores, their squares; how many of each."""
        for block, part in ({} if load is None else load.parts).items():
            part.routing_override = partial(self._lead if self.leads else self._follow, block)

    def _lead(self, block: int, ranked: Tensor, chosen: Tensor, samples: Tensor | None, rows: Tensor) -> Tensor:
        assert samples is not None
        for sample, scores, experts in zip(samples.tolist(), ranked.cpu(), chosen.cpu(), strict=True):
            self.routes[block, sample] = scores.clone(), experts.clone()
        return chosen

    def _follow(self, block: int, ranked: Tensor, chosen: Tensor, samples: Tensor | None, rows: Tensor) -> Tensor:
        assert samples is not None
        known = [self.routes[block, sample] for sample in samples.tolist()]
        scores, experts = (torch.stack(x).to(ranked.device) for x in zip(*known, strict=True))
        real = rows < scores.shape[1]  # the others fill up, and go nowhere
        place = torch.where(real, rows, 0)
        way = experts[:, place]
        others = (chosen.unsqueeze(3) != way.unsqueeze(2)).all(3)[:, real]
        theirs = scores[:, place[real]].double()
        off = ranked[:, real].double() - theirs
        sums = torch.stack([others.sum().double(), off.square().sum(), theirs.sum(), theirs.square().sum()]).cpu()
        sizes = torch.tensor([others.numel(), off.numel()], dtype=torch.float64)
        self.seen[self.blocks.index(block)] += torch.cat([sums, sizes])
        return way

    def end(self, mesh: Mesh) -> Routing | None:
        """After the last step, on all ranks together."""
        if self.leads:
            torch.save(self.routes, self.file)
            return None
        if not self.blocks:
            return None
        seen = self.seen.to(mesh.device)
        if mesh.everyone is not None:
            mesh.everyone.all_reduce(seen)
        otherwise, off, total, squares, choices, number = seen.cpu().unbind(1)
        spread = torch.maximum(squares - total.square() / number, LEAST_SPREAD**2 * squares)
        return Routing(
            float(otherwise.sum() / choices.sum()), float((off / spread).sqrt().max().nan_to_num(float("inf")))
        )

"""Metrics of an evaluation: sums that are exact over any split of the samples, and the figures computed from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.model_parts.loss_settings import NamedLoss
from weft.job.schema import Model
from weft.job.train import RETRIEVAL_METRICS
from weft.models.user.named_losses import IGNORED, Batch, main_output, named_output, named_target
from weft.models.user.retrieval import retrieval_figures, retrieval_rows
from weft.models.user.sample_tree import unflatten

HIT_RATE_AT = 10
"""A hit is a right candidate among so many with the highest scores."""
MAX_ORDER = 4
"""Longest n-grams of BLEU."""


@dataclass(frozen=True)
class Metric:
    """A metric: how many sums it has, their values for a batch, and the figure that they give."""

    size: int
    sums: Callable[[Tensor, Tensor, Tensor], Tensor]
    """From outputs, targets and a mask of the targets that count: the sums, [size]."""
    figure: Callable[[Sequence[float]], float]


def _ratio(sums: Sequence[float]) -> float:
    return sums[0] / sums[1] if sums[1] else 0.0


def _hits(outputs: Tensor, targets: Tensor, mask: Tensor, k: int) -> Tensor:
    """Targets among the k largest outputs, and all targets."""
    best = outputs.topk(min(k, outputs.shape[-1]), dim=-1).indices
    hit = (best == targets.unsqueeze(-1)).any(-1) & mask
    return torch.stack([hit.sum(), mask.sum()])


def _accuracy(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    if outputs.shape == targets.shape:  # one score for two classes
        hit = ((outputs > 0) == (targets > 0.5)) & mask
        return torch.stack([hit.sum(), mask.sum()])
    return _hits(outputs, targets, mask, 1)


def _hit_rate(scores: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Samples whose right candidate has fewer than HIT_RATE_AT others with the same or a higher score, and all samples.
    Targets are its number, or 1 for it and 0 for the others."""
    right, counts = (targets.argmax(-1), mask.any(-1)) if targets.shape == scores.shape else (targets, mask)
    ahead = (scores >= scores.gather(-1, right.unsqueeze(-1))).sum(-1) - 1
    return torch.stack([((ahead < HIT_RATE_AT) & counts).sum(), counts.sum()])


def _bleu_sums(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Matching and all n-grams of each order, and the lengths of both texts (Papineni et al., 2002)."""
    if targets.dim() != 2:
        raise JobError(
            f"train.metrics=bleu compares texts, targets [batch, length], and these are {list(targets.shape)}; "
            "accuracy would work"
        )
    found = outputs.argmax(-1) if outputs.dim() > targets.dim() else outputs
    counts = [0] * (2 * MAX_ORDER + 2)
    for said, wanted, inside in zip(found.tolist(), targets.tolist(), mask.tolist(), strict=True):
        ours, reference = ([t for t, used in zip(text, inside, strict=True) if used] for text in (said, wanted))
        for n in range(1, MAX_ORDER + 1):
            grams, known = _grams(ours, n), _grams(reference, n)
            counts[n - 1] += (grams & known).total()
            counts[MAX_ORDER + n - 1] += grams.total()
        counts[-2] += len(ours)
        counts[-1] += len(reference)
    return torch.tensor(counts)


def _grams(tokens: list[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _bleu(sums: Sequence[float]) -> float:
    matches, grams, (ours, reference) = sums[:MAX_ORDER], sums[MAX_ORDER : 2 * MAX_ORDER], sums[2 * MAX_ORDER :]
    if not ours or not all(matches):
        return 0.0
    mean = sum(math.log(m / g) for m, g in zip(matches, grams, strict=True)) / MAX_ORDER
    return 100 * math.exp(mean + min(0.0, 1 - reference / ours))


METRICS: dict[str, Metric] = {
    "accuracy": Metric(2, _accuracy, _ratio),
    "top5": Metric(2, lambda outputs, targets, mask: _hits(outputs, targets, mask, 5), _ratio),
    "hit_rate": Metric(2, _hit_rate, _ratio),
    "bleu": Metric(2 * MAX_ORDER + 2, _bleu_sums, _bleu),
}
"""Metrics with sums. `perplexity` follows from the loss, `auc` from all scores, those of retrieval.py from all vectors,
your own function from its values."""


DISTANCES = ("mse", "l1", "smooth_l1")
"""Losses of numbers, which have no metrics of classes."""
OF_CLASSES = ("top5", "bleu")
"""Metrics of outputs with several classes."""
OF_SEQUENCES = ("bleu",)
"""Metrics that compare whole sequences of tokens."""
VECTORS = "vectors of both towers"
"""Key of the rows of vectors, which is no name of a loss."""


@dataclass
class EvalMetrics:
    """The metrics of a job, over the batches of one evaluation."""

    model: Model
    names: Sequence[str]
    task: tuple[str, NamedLoss] | None = None
    """Name and loss of the task whose samples are evaluated, of several tasks of your own module."""
    join: Callable[[Batch, Tensor], Tensor] | None = None
    """Where ranks have parts of a sequence: from a batch and tensors [..., tokens] to those of the whole sequences, and
    to zeros on all ranks but one."""

    def __post_init__(self) -> None:
        several = self.model.loss if isinstance(self.model.loss, dict) else {}
        if self.task is not None and self.task[1].function in DISTANCES:
            self.names = [name for name in self.names if name == "perplexity" or ":" in name]
        self.losses = list(several)
        """Names of several losses, whose own values are written too."""
        self.parts = [name for name, loss in several.items() if loss.function not in DISTANCES] if several else [""]
        """Several losses have their metrics each, if they compare classes; otherwise there is one unnamed part."""
        self.rows: dict[str, list[Tensor]] = {}
        """Of metrics that need every score: by part a row [number, score, target] for each target, and by VECTORS one
        for each sample (retrieval.py)."""
        self.retrieves = bool({*self.names} & {*RETRIEVAL_METRICS})

    @property
    def plain(self) -> bool:
        """Whether the loss alone gives every figure."""
        return not self.losses and not set(self.names) - {"perplexity"}

    @property
    def size(self) -> int:
        """Number of sums."""
        own = sum(2 for name in self.names if ":" in name)
        known = sum(METRICS[name].size * len(self._parts(name)) for name in self.names if name in METRICS)
        return 1 + 2 * len(self.losses) + own + known

    def _parts(self, metric: str) -> list[str]:
        """The parts that have a metric: those of classes, of several losses, only where there is a score for each."""
        if metric in ("perplexity", *RETRIEVAL_METRICS):
            return []
        several = self.model.loss if isinstance(self.model.loss, dict) else {}
        return [p for p in self.parts if metric not in OF_CLASSES or not several or several[p].function != "bce"]

    def all_rows(self, device: torch.device) -> dict[str, Tensor]:
        """The rows of each part's scores and of the samples' vectors; empty on ranks without a pipeline's last
        stage."""
        none = torch.zeros(0, 3, dtype=torch.float64, device=device)
        wanted = [*(self.parts if "auc" in self.names else ()), *([VECTORS] if self.retrieves else ())]
        return {part: torch.cat(self.rows[part]) if part in self.rows else none for part in wanted}

    def sums(self, losses: dict[str, Tensor], outputs: Any, batch: Batch) -> Tensor:
        """The sums of one batch: the loss, each of several losses, then each metric's."""
        found = [losses["loss"].double().reshape(1)]
        found += [torch.stack([losses[n].double(), batch["valid"].sum().double()]) for n in self.losses]
        if self.retrieves:
            self.rows.setdefault(VECTORS, []).append(retrieval_rows(outputs, batch, self._label()))
        for name in self.names:
            if ":" in name:
                found.append(self._own(name, outputs, batch))
                continue
            for part in self._parts(name):
                output, target, mask = self._part(part, outputs, batch, name)
                if name == "auc" and part and output.dim() == target.dim() + 1 and output.shape[-1] > 2:
                    continue  # of several losses, one of more than two classes
                if name == "auc":
                    self.rows.setdefault(part, []).append(_scores(output, target, mask, batch["ids"], self._label()))
                else:
                    self._check_classes(name, output, target)
                    if name in OF_SEQUENCES and self.join is not None:
                        parts = torch.stack([output.argmax(-1), target, mask.long()])
                        output, target, mask = self.join(batch, parts).unbind(0)
                    found.append(METRICS[name].sums(output, target, mask).to(output.device).double())
        return torch.cat(found)

    def figures(self, sums: Sequence[float], count: float, rows: dict[str, Tensor]) -> dict[str, float]:
        """val_loss, each of several losses and each metric, from the sums over all ranks and the rows of all ranks."""
        out = {"val_loss": sums[0] / max(1.0, count)}
        at = 1
        for name in self.losses:
            out[f"val_loss_{name}"] = sums[at] / max(1.0, sums[at + 1])
            at += 2
        for name in self.names:
            if name == "perplexity":
                out["val_perplexity"] = math.exp(min(out["val_loss"], 700.0))
                continue
            if ":" in name:
                out[f"val_{name.partition(':')[2]}"] = _ratio(sums[at : at + 2])
                at += 2
                continue
            for part in self._parts(name):
                key = f"val_{name}_{part}" if part else f"val_{name}"
                if name == "auc":
                    out |= {key: area_under_curve(rows[part])} if len(rows[part]) or not part else {}
                else:
                    out[key] = METRICS[name].figure(sums[at : at + METRICS[name].size])
                    at += METRICS[name].size
        return out | (retrieval_figures(rows[VECTORS], self.names) if self.retrieves else {})

    def _label(self) -> str:
        return self.model.module or str(self.model.family)

    def _part(self, part: str, outputs: Any, batch: Batch, metric: str) -> tuple[Tensor, Tensor, Tensor]:
        """The output and target that a metric compares, and which targets count."""
        if isinstance(self.model.loss, dict):
            loss = self.model.loss[part]
            output, target = named_output(part, loss, outputs, self.model), named_target(part, loss, batch, self.model)
        elif self.task is not None:
            output = named_output(*self.task, outputs, self.model)
            target = named_target(*self.task, batch, self.model)
        else:
            output, target = main_output(outputs, self.model), unflatten(batch, "targets")
            if not isinstance(target, Tensor):
                raise JobError(f"train.metrics={metric} needs one target, and the samples have {_shown(target)}")
        valid = batch["valid"]
        mask = valid.view(*valid.shape, *[1] * (target.dim() - valid.dim())).expand_as(target)
        if not target.is_floating_point():
            mask = mask & (target != IGNORED)
        if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
            output = output.squeeze(-1)
        elif output.dim() == target.dim() + 1 and output.shape[:-1] != target.shape:
            output = output.movedim(1, -1)
        return output.detach().float(), target, mask

    def _check_classes(self, name: str, output: Tensor, target: Tensor) -> None:
        if name == "hit_rate" and output.dim() < 2:
            raise JobError(
                f"train.metrics=hit_rate ranks the scores of several candidates of a sample, and {self._label()} gave "
                "one; yield items of shape [candidates] and a label for each, or leave it out"
            )
        if (target.is_floating_point() and output.shape != target.shape) or output.dim() < target.dim():
            raise JobError(
                f"train.metrics={name} compares outputs [..., classes] with integer targets, and {self._label()} gave "
                f"outputs of shape {list(output.shape)} for {str(target.dtype).removeprefix('torch.')} targets of "
                f"shape {list(target.shape)}; leave it out, or write a package.module:function"
            )

    def _own(self, name: str, outputs: Any, batch: Batch) -> Tensor:
        """The sum and the count of your own function's values."""
        found = find_object(name, "train.metrics")(outputs, unflatten(batch, "targets"))
        if isinstance(found, tuple) and len(found) == 2:
            return torch.stack([torch.as_tensor(x, device=batch["ids"].device).double() for x in found])
        valid = batch["valid"]
        if not isinstance(found, Tensor) or found.shape not in (valid.shape, valid.shape[:1]):
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise JobError(
                f"train.metrics={name} returned {shown}; return one value for each of the targets {list(valid.shape)} "
                "or samples, or (sum, count)"
            )
        mask = valid if found.shape == valid.shape else valid.flatten(1).any(1)
        return torch.stack([torch.where(mask, found.double(), 0.0).sum(), mask.sum().double()])


def _shown(target: Any) -> str:
    return "none" if target is None else "several"


def _scores(output: Tensor, target: Tensor, mask: Tensor, ids: Tensor, module: str) -> Tensor:
    """A row [number of the target, score, target] for each target that counts."""
    if output.dim() == target.dim() + 1 and output.shape[-1] == 2:
        output = output[..., 1] - output[..., 0]
    if output.shape != target.shape:
        raise JobError(
            f"train.metrics=auc needs one score for each target or two classes, and {module} gave outputs of shape "
            f"{list(output.shape)} for targets of shape {list(target.shape)}"
        )
    each = target[0].numel()
    numbers = ids.view(-1, *[1] * (target.dim() - 1)) * each + torch.arange(each, device=ids.device).view(
        1, *target.shape[1:]
    )
    return torch.stack([x.expand_as(target)[mask].double() for x in (numbers, output, target)], dim=-1)


def area_under_curve(rows: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive has a higher score than a negative; ties count half."""
    _, first = torch.unique(rows[:, 0], return_inverse=True)
    order = torch.full((int(first.max()) + 1 if len(first) else 0,), len(rows), dtype=torch.long)
    rows = rows[
        order.scatter_reduce(0, first, torch.arange(len(rows)), "amin")
    ]  # ranks of tp and cp have the same rows
    positive = rows[:, 2] > 0.5
    count = int(positive.sum()) * int((~positive).sum())
    if not count:
        return 0.5
    _, which, sizes = torch.unique(rows[:, 1], return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0).double()
    rank = (ends - (sizes - 1) / 2)[which]
    positives = int(positive.sum())
    return float((rank[positive].sum() - positives * (positives + 1) / 2) / count)

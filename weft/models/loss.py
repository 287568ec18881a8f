"""Linear + cross-entropy in chunks of tokens, so that the logits of a batch are never stored at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.planner.engine_constants import ALIGNED_BYTES, LOGITS_BYTES, PADDED_VOCAB

Record = Callable[[Tensor], None]
"""Called with the losses of a batch's targets [targets], 0 where they are masked."""


class VocabSplit(Protocol):
    """How the vocabulary is sharded: the first row of this rank, and sums and maxima over all ranks."""

    start: int
    vocab: int

    def sum(self, x: Tensor) -> Tensor: ...
    def max(self, x: Tensor) -> Tensor: ...


class WholeVocab:
    """The whole vocabulary on this rank."""

    def __init__(self, vocab: int):
        self.start, self.vocab = 0, vocab

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x


class HeadProducts:
    """The three products of a head, chunk by chunk, in the dtype of its input."""

    times = 1.0
    """Scale of the gradient of the logits before rounding; the products divide by it."""

    def __init__(self, x: Tensor, weight: Tensor, rows: int):
        self.x, self.weight, self.rows = x, weight, rows
        self.dw: Tensor | None = None

    def logits(self, part: slice) -> Tensor:
        return self.x[part] @ self.weight.t()

    def room(self, logits: Tensor) -> Tensor:
        """Buffer for the gradient of these logits; it may overwrite them."""
        return logits

    def rounded(self, dlogits: Tensor) -> Tensor:
        return dlogits.to(self.x.dtype)

    def to_input(self, dlogits: Tensor, out: Tensor) -> None:
        torch.mm(dlogits, self.weight, out=out)

    def to_weight(self, dlogits: Tensor, part: slice) -> None:
        """Add dlogitsᵀ @ x to the weight gradient, in fp32 where there are several chunks."""
        a, b = dlogits.t(), self.x[part]
        if self.rows >= len(self.x):
            self.dw = a @ b
            return
        if self.dw is None:
            self.dw = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
        if a.dtype == torch.float32:
            self.dw.addmm_(a, b)
        elif a.is_cuda:  # accumulates in fp32 before rounding
            torch.addmm(self.dw, a, b, out_dtype=torch.float32, out=self.dw)
        else:
            self.dw += a @ b

    def weight_gradient(self) -> Tensor:
        """The accumulated gradient in the dtype of the weight."""
        return torch.zeros_like(self.weight) if self.dw is None else self.dw.to(self.weight.dtype)


class PaddedHeadProducts(HeadProducts):
    """The same with rows of zeros after the weight's: a GPU's products of unaligned rows (GPT-2's vocabulary of 50,257)
    are several times slower."""

    def __init__(self, x: Tensor, weight: Tensor, rows: int):
        self.vocab = len(weight)
        super().__init__(x, F.pad(weight, (0, 0, 0, -self.vocab % PADDED_VOCAB)), rows)
        self.buffer = x.new_empty(min(rows, len(x)), len(self.weight))
        """Logits of a chunk, or their gradient; those of the padding are 0."""

    def logits(self, part: slice) -> Tensor:
        chunk = self.x[part]
        torch.mm(chunk, self.weight.t(), out=self.buffer[: len(chunk)])
        return self.buffer[: len(chunk), : self.vocab]

    def rounded(self, dlogits: Tensor) -> Tensor:
        return self.buffer[: len(dlogits), : self.vocab].copy_(dlogits)

    def to_input(self, dlogits: Tensor, out: Tensor) -> None:
        super().to_input(self.buffer[: len(dlogits)], out)

    def to_weight(self, dlogits: Tensor, part: slice) -> None:
        super().to_weight(self.buffer[: len(dlogits)], part)

    def weight_gradient(self) -> Tensor:
        return super().weight_gradient()[: self.vocab]


def head_products(x: Tensor, weight: Tensor, rows: int) -> HeadProducts:
    """The products of a head in the dtype of its input."""
    padded = x.is_cuda and len(weight) * x.element_size() % ALIGNED_BYTES
    return (PaddedHeadProducts if padded else HeadProducts)(x, weight, rows)


HeadProductsFactory = Callable[[Tensor, Tensor, int], HeadProducts]
"""Products of x [tokens, dim] with weight [rows of the vocabulary, dim], so many tokens at a time."""


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient by `x` is already known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (known,) = ctx.saved_tensors
        return known.mul_(grads[0].to(known.dtype)), None, None


@torch.no_grad()
def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, valid: Tensor, smoothing: float, split: VocabSplit,
    want: tuple[bool, bool], make: HeadProductsFactory, bias: Tensor | None = None, record: Record | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The loss is linear in its upstream gradient, so all gradients are computed with it, chunk by chunk."""
    # x [tokens, dim], weight [local vocab, dim], targets [tokens] or [tokens, vocab], valid [tokens]
    rows = rows_at_once(x, weight)
    products = make(x, weight, rows)
    fused = x.is_cuda and isinstance(split, WholeVocab) and not targets.is_floating_point()
    chunk = _fused_chunk if fused else partial(_chunk, split=split)
    dx = torch.empty_like(x) if want[0] else None
    db = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and want[1] else None
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    recorded: list[Tensor] = []
    for i in range(0, x.shape[0], rows):
        part = slice(i, i + rows)
        logits = products.logits(part)
        if bias is not None:
            logits += bias
        losses, dlogits = chunk(logits, targets[part], valid[part], smoothing, any(want), products)
        del logits
        total += (losses * valid[part]).sum()
        if record is not None:
            recorded.append(losses)
        if dx is not None and dlogits is not None:
            products.to_input(dlogits, dx[part])
        if want[1] and dlogits is not None:
            products.to_weight(dlogits, part)
            if db is not None:
                db += dlogits.sum(0, dtype=torch.float32)
        del dlogits  # before the logits of the next chunk
    if record is not None:
        record(torch.cat(recorded))
    return total, dx, products.weight_gradient() if want[1] else None, db


def rows_at_once(x: Tensor, weight: Tensor) -> int:
    """Tokens per chunk: as many as LOGITS_BYTES allows, in chunks of equal size."""
    width = 4 if x.device.type == "cpu" else x.element_size()
    most = max(1, LOGITS_BYTES.get(x.device.type, LOGITS_BYTES["cuda"]) // (max(1, weight.shape[0]) * width))
    chunks = -(-x.shape[0] // most)
    return max(1, -(-x.shape[0] // max(1, chunks)))


def _fused_chunk(
    logits: Tensor, targets: Tensor, valid: Tensor, smoothing: float, grad: bool, products: HeadProducts
) -> tuple[Tensor, Tensor | None]:
    """As _chunk of a whole vocabulary, with loss and gradient from one kernel."""
    from weft.models.loss_kernels import cross_entropy

    room = products.room(logits) if grad else None
    return cross_entropy(logits, targets, valid, smoothing, room, products.times), room


def _chunk(
    logits: Tensor, targets: Tensor, valid: Tensor, smoothing: float, grad: bool, products: HeadProducts,
    split: VocabSplit,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Losses of a chunk's valid targets, 0 for others, and the gradient of their weighted sum by the logits as the
    products take it."""
    logits = logits.float()  # [rows, local vocab]
    vocab = logits.shape[1]
    mixed = targets.is_floating_point()
    index, share = _shares(targets, split.start, vocab)
    if vocab == 0:  # more ranks than vocabulary rows
        peak, picked = logits.new_full((len(logits), 1), float("-inf")), logits.new_zeros(len(logits))
    else:
        peak = logits.amax(1, keepdim=True)
        picked = ((logits if mixed else logits.gather(1, index)) * share).sum(1)
    peak = split.max(peak)
    exp = (logits - peak).exp_()
    denominator, target_logit, logit_sum = split.sum(torch.stack([exp.sum(1), picked, logits.sum(1)]))
    lse = denominator.log() + peak.squeeze(1)
    if mixed:  # probabilities need not add up to 1
        mass = (1 - smoothing) * targets.float().sum(1) + smoothing
        lse = lse * mass
    loss = lse - (1 - smoothing) * target_logit - (smoothing / split.vocab) * logit_sum
    losses = torch.where(valid > 0, loss, 0.0)
    if not grad:
        return losses, None
    dlogits = exp.div_(denominator.unsqueeze(1))
    if mixed:
        dlogits.mul_(mass.unsqueeze(1))
    if smoothing:
        dlogits -= smoothing / split.vocab
    if mixed:
        dlogits.sub_(share, alpha=1.0 - smoothing)
    elif vocab:
        dlogits.scatter_add_(1, index, share * -(1.0 - smoothing))
    dlogits.mul_(valid.unsqueeze(1))
    return losses, products.rounded(dlogits)


def _shares(targets: Tensor, start: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Of this rank's rows of the vocabulary: the target's, and 1 or 0 for whether it is one of them; of targets that
    are probabilities, those of all these rows."""
    if targets.is_floating_point():
        return targets, targets[:, start : start + vocab].float()
    local = targets - start
    mine = (local >= 0) & (local < vocab)
    return torch.where(mine, local, 0).unsqueeze(1), mine.float().unsqueeze(1)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, valid: Tensor | None = None, smoothing: float = 0.0,
    split: VocabSplit | None = None, products: HeadProductsFactory = head_products, bias: Tensor | None = None,
    record: Record | None = None,
) -> Tensor:  # fmt: skip
    """Sum over valid targets of the cross-entropy of `x @ weight.T + bias`, in fp32.

    x [..., dim], weight [vocab rows of this rank, dim], bias [vocab rows of this rank], targets and valid [...].
    Targets may be probabilities [..., vocab]. `valid` may be the weights of targets. `record` is called with the loss
    of each target, without its weight.
    """
    targets = targets.reshape(-1, targets.shape[-1]) if targets.is_floating_point() else targets.reshape(-1)
    valid = torch.ones(len(targets), dtype=torch.bool, device=x.device) if valid is None else valid.reshape(-1)
    flat = x.reshape(-1, x.shape[-1])
    split = split or WholeVocab(weight.shape[0])
    grad = torch.is_grad_enabled()
    want = (grad and flat.requires_grad, grad and weight.requires_grad)
    loss, dx, dw, db = _loss_and_gradients(flat, weight, targets, valid, smoothing, split, want, products, bias, record)
    if dx is not None:
        loss = _KnownGradient.apply(flat, dx, loss)
    if dw is not None:
        loss = loss + _KnownGradient.apply(weight, dw, torch.zeros_like(loss))
    if db is not None and bias is not None:
        loss = loss + _KnownGradient.apply(bias, db.to(bias.dtype), torch.zeros_like(loss))
    return loss

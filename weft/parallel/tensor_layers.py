"""Layers whose weights are split over the tensor-parallel ranks, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.comm.autograd import copy_in, gather_along, reduce_out, scatter_along, sum_up
from weft.comm.axis import Axis
from weft.comm.shards import local_of
from weft.models.attention import TokenInfo
from weft.models.dropout import Dropout
from weft.models.lora import adapted
from weft.models.loss import linear_cross_entropy
from weft.models.norms import WideRMSNorm
from weft.models.transformer import Head

SEQ = 1  # activations are [batch, seq, dim]


@dataclass
class TensorSplit:
    """The tp axis, whether activations are sharded along the sequence, and the parameters with partial gradients."""

    axis: Axis
    mesh: DeviceMesh
    sequence: bool
    partial: set[str] = field(default_factory=set)
    """Parameters that every rank holds whole but that see a part of the data: their gradients are summed over tp."""

    def enter(self, x: Tensor) -> Tensor:
        """Enter a region of sharded matrices: every rank gets every token."""
        return gather_along(x, self.axis, SEQ) if self.sequence else copy_in(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        """Leave it: partial sums are summed."""
        return scatter_along(x, self.axis, SEQ) if self.sequence else reduce_out(x, self.axis)

    def whole_head(self, x: Tensor, heads: int) -> Tensor:
        """The one of `heads` heads that this rank's queries read, from the ranks' parts x [batch, seq, part]."""
        whole = gather_along(x, self.axis, x.dim() - 1)
        width = whole.shape[-1] // heads
        return whole.narrow(-1, self.axis.rank * heads // self.axis.size * width, width).contiguous()

    def shard(self, size: int) -> tuple[int, int]:
        """The start and length of this rank's shard of a dim of `size`; the last shards may be shorter."""
        step = -(-size // self.axis.size)
        start = min(self.axis.rank * step, size)
        return start, min(step, size - start)

    def cut(self, model: nn.Module, module: nn.Module, key: str, dim: int) -> None:
        """Keep this rank's shard of module.key along dim; modules that share the parameter share the shard."""
        whole = getattr(module, key)
        if isinstance(whole, DTensor) or whole is None:
            return
        start, length = self.shard(whole.shape[dim])
        shard = whole.detach().narrow(dim, start, length).contiguous().clone()
        param = nn.Parameter(
            DTensor.from_local(
                shard, self.mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
            ),
            requires_grad=whole.requires_grad,
        )
        for owner in model.modules():
            for name, other in list(owner.named_parameters(recurse=False)):
                if other is whole:
                    owner.register_parameter(name, param)


class ColumnLinear(nn.Linear):
    """A linear layer of which each rank holds some outputs."""

    split: TensorSplit
    in_region: bool
    multiply = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.in_region else copy_in(x, self.split.axis)
        y = self.multiply(x, local_of(self.weight), None if self.bias is None else local_of(self.bias))
        return adapted(self, x, y)


class FusedLinear(nn.Linear):
    """A linear layer whose outputs are several parts, such as queries, keys and values, of each of which a rank
    computes its share. Its shard of the weight is contiguous, so that checkpoints and ZeRO need not know the parts: the
    weight is gathered, and the rank's rows are taken."""

    split: TensorSplit
    count: int
    """The number of parts."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self._rows(self.bias)
        return F.linear(copy_in(x, self.split.axis), self._rows(self.weight), bias)

    def _rows(self, param: Tensor) -> Tensor:
        axis = self.split.axis
        whole = gather_along(local_of(param), axis, 0)
        return whole.unflatten(0, (self.count, axis.size, -1))[:, axis.rank].flatten(0, 1)


class RowLinear(nn.Linear):
    """A linear layer of which each rank holds some inputs; its outputs are partial sums that are then summed."""

    split: TensorSplit
    in_region: bool
    multiply = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        y = adapted(self, x, self.multiply(x, local_of(self.weight)))
        y = self.split.leave(y) if self.in_region else reduce_out(y, self.split.axis)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Embedding):
    """An embedding of which each rank holds some rows, and returns zeros for other tokens."""

    split: TensorSplit

    def forward(self, tokens: Tensor) -> Tensor:
        table = local_of(self.weight)
        start, length = self.split.shard(self.num_embeddings)
        mine = (tokens >= start) & (tokens < start + length)
        index = torch.where(mine, tokens - start, 0)
        rows = F.embedding(index, table) if length else table.new_zeros((*tokens.shape, table.shape[1]))
        return self.split.leave(rows * mine.unsqueeze(-1))


class VocabHead(Head):
    """A head of which each rank computes the logits of some of the vocabulary; no rank has all of them."""

    split: TensorSplit

    def forward(
        self, x: Tensor, targets: Tensor | None, valid: Tensor | None, smoothing: float, info: TokenInfo | None = None
    ) -> Tensor:
        x = self.split.enter(x)
        x = self.pooled(x, info)
        weight, bias = local_of(self.weight), None if self.bias is None else local_of(self.bias)
        if targets is None:
            return self._whole(F.linear(x, weight, bias))
        start, _ = self.split.shard(self.weight.shape[0])
        vocab = SplitVocab(self.split.axis, start, self.weight.shape[0])
        return linear_cross_entropy(x, weight, targets, valid, smoothing, vocab, self.products, bias, self.record)

    def _whole(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary; the shards of the last ranks may be shorter and are padded."""
        vocab, size = self.weight.shape[0], self.split.axis.size
        padded = F.pad(logits, (0, -(-vocab // size) - logits.shape[-1]))
        return gather_along(padded, self.split.axis, padded.dim() - 1)[..., :vocab]


class SplitRMSNorm(WideRMSNorm):
    """A norm over all heads, of which each rank has some."""

    split: TensorSplit

    def mean_square(self, x: Tensor) -> Tensor:
        return sum_up(x.square().sum(-1, keepdim=True), self.split.axis) / self.normalized_shape[0]

    def local_weight(self) -> Tensor:
        return local_of(self.weight)


class SplitVocab:
    """Sums and maxima over the ranks' parts of the vocabulary."""

    def __init__(self, axis: Axis, start: int, vocab: int):
        self.axis, self.start, self.vocab = axis, start, vocab

    def sum(self, x: Tensor) -> Tensor:
        return self.axis.all_reduce(x)

    def max(self, x: Tensor) -> Tensor:
        return self.axis.all_reduce(x, dist.ReduceOp.MAX)


class SequenceDropout(Dropout):
    """Dropout on this rank's part of the sequence."""

    split: TensorSplit

    def forward(self, x: Tensor, keys: Tensor | None, rows: Tensor, first: int = 0) -> Tensor:
        return super().forward(x, keys, self.split.axis.narrow(rows, 0), first)

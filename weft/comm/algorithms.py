"""Collectives composed of messages: ring, recursive halving and doubling, tree, and two levels, in pipelined chunks.

Each is a generator that starts the messages of a round and yields them; the caller waits and continues. A tensor is
split into chunks with a generator each, which take turns: while one waits for a round, the next is sent. Messages
between two ranks are ordered by round, then by chunk, on both sides, so they need no tags; a rank without messages in a
round yields an empty one, so that several sums can run at once.

A sum is computed in one order and sent to all, or symmetrically, so all ranks end with the same bits. Ring and halving
send 2 (n - 1) / n of the tensor from each rank, which is optimal; tree and doubling send more in log n rounds; two
levels send little between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import Axis, Exchange, Pending

Rounds = Iterator[Exchange]
Op = dist.ReduceOp.RedOpType

CHUNK_BYTES, MAX_CHUNKS = 2**20, 8
"""A tensor is sent in chunks of this size, but not in more than so many."""

COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


class MessageFormat:
    """How tensors are sent while they are summed: as they are, or encoded (compression/encoded_rounds.py)."""

    def pack(self, x: Tensor) -> Tensor:
        """The message of a tensor."""
        return x

    def buffer(self, x: Tensor) -> Tensor:
        """Where the message of a tensor of this shape is received."""
        return torch.empty_like(x)

    def combine(self, x: Tensor, received: Tensor, op: Op) -> None:
        """Reduce a received message into x."""
        x.copy_(COMBINE[op](x, received))


PLAIN = MessageFormat()


class RunningRounds:
    """Running generators; wait() runs them to their end."""

    def __init__(self, chunks: list[Rounds], after: Callable[[], object] | None = None):
        self.running = [(rounds, next(rounds)) for rounds in chunks]
        self.after = after

    def wait(self) -> None:
        """Advance the chunks in turn, round by round, until all are done."""
        while self.running:
            going = []
            for rounds, exchange in self.running:
                exchange.wait()
                following = next(rounds, None)
                if following is not None:
                    going.append((rounds, following))
            self.running = going
        if self.after is not None:
            self.after()


def cut(flat: Tensor, parts: int) -> list[Tensor]:
    """Views of nearly equal size; some are empty if there are fewer elements than parts."""
    count = flat.numel()
    return [flat[i * count // parts : (i + 1) * count // parts] for i in range(parts)]


def cut_chunks(flat: Tensor, chunks: int | None = None) -> list[Tensor]:
    """The chunks in which a tensor is sent; by default a number by its size."""
    if chunks is None:
        chunks = min(MAX_CHUNKS, max(1, flat.numel() * flat.element_size() // CHUNK_BYTES))
    return [part for part in cut(flat, chunks) if part.numel()]


def start_round(axis: Axis, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Exchange:
    """One round; empty tensors are not sent."""
    return axis.start_exchange([(to, t) for to, t in sends if t.numel()], [(of, t) for of, t in receives if t.numel()])


def ring_reduce_scatter(
    axis: Axis, shards: list[Tensor], op: Op, members: Sequence[int], messages: MessageFormat = PLAIN
) -> Rounds:
    """Member i ends with the whole sum of shards[i]; its other shards hold sums of some members."""
    n, me = len(members), members.index(axis.rank)
    for step in range(n - 1):
        mine, theirs = ring_places(me, step, n)
        packed, received = messages.pack(shards[mine]), messages.buffer(shards[theirs])
        yield start_round(axis, [(members[(me + 1) % n], packed)], [(members[(me - 1) % n], received)])
        messages.combine(shards[theirs], received, op)


def ring_all_gather(axis: Axis, shards: list[Tensor], members: Sequence[int]) -> Rounds:
    """Member i begins with shards[i] and ends with all of them."""
    n, me = len(members), members.index(axis.rank)
    for step in range(n - 1):
        mine, theirs = ring_places(me + 1, step, n)
        yield start_round(axis, [(members[(me + 1) % n], shards[mine])], [(members[(me - 1) % n], shards[theirs])])


def ring_places(me: int, step: int, n: int) -> tuple[int, int]:
    """Which shard a member of the ring sends at a step of a reduce-scatter, and which it receives."""
    return (me - 1 - step) % n, (me - 2 - step) % n


def ring(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
    """All-reduce as a reduce-scatter and an all-gather."""
    shards = cut(flat, len(members))
    yield from ring_reduce_scatter(axis, shards, op, members)
    yield from ring_all_gather(axis, shards, members)


def halving(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
    """Recursive halving, then doubling (Rabenseifner): the bytes of a ring in 2 log n rounds."""
    yield from _with_extra_ranks(axis, flat, op, members, 1 << (len(members).bit_length() - 1), _halving)


def _halving(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
    n, me, count = len(members), members.index(axis.rank), flat.numel()
    low, high = 0, n
    passed: list[tuple[int, Tensor, Tensor]] = []
    while high - low > 1:
        middle = (low + high) // 2
        halves = (flat[low * count // n : middle * count // n], flat[middle * count // n : high * count // n])
        upper = me >= middle
        kept, given = halves[upper], halves[not upper]
        other = members[me ^ (high - middle)]
        received = torch.empty_like(kept)
        yield start_round(axis, [(other, given)], [(other, received)])
        kept.copy_(COMBINE[op](kept, received))
        passed.append((other, kept, given))
        low, high = (middle, high) if upper else (low, middle)
    for other, kept, given in reversed(passed):
        yield start_round(axis, [(other, kept)], [(other, given)])


def doubling(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
    """Recursive doubling: the whole tensor to a partner twice as far each round; the fewest rounds, for small
    tensors."""
    yield from _with_extra_ranks(axis, flat, op, members, 1 << (len(members).bit_length() - 1), _doubling)


def _doubling(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
    me, distance = members.index(axis.rank), 1
    while distance < len(members):
        other = members[me ^ distance]
        received = torch.empty_like(flat)
        yield start_round(axis, [(other, flat)], [(other, received)])
        flat.copy_(COMBINE[op](flat, received))
        distance *= 2


def tree(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
    """Up a binomial tree to the first member, and down again."""
    yield from tree_reduce(axis, flat, op, members)
    yield from tree_broadcast(axis, flat, members)


def tree_reduce(axis: Axis, flat: Tensor, op: Op, members: Sequence[int], messages: MessageFormat = PLAIN) -> Rounds:
    """The first member ends with the sum; the others with sums of some members."""
    n, me, distance = len(members), members.index(axis.rank), 1
    while distance < n:
        if me % (2 * distance) == distance:
            yield start_round(axis, [(members[me - distance], messages.pack(flat))], [])
        elif me % (2 * distance) == 0 and me + distance < n:
            received = messages.buffer(flat)
            yield start_round(axis, [], [(members[me + distance], received)])
            messages.combine(flat, received, op)
        else:
            yield start_round(axis, [], [])
        distance *= 2


def tree_broadcast(axis: Axis, flat: Tensor, members: Sequence[int]) -> Rounds:
    """All members end with what the first has."""
    n, me = len(members), members.index(axis.rank)
    for distance in (1 << i for i in reversed(range((n - 1).bit_length()))):
        if me % (2 * distance) == distance:
            yield start_round(axis, [], [(members[me - distance], flat)])
        elif me % (2 * distance) == 0 and me + distance < n:
            yield start_round(axis, [(members[me + distance], flat)], [])


def hierarchical(axis: Axis, flat: Tensor, op: Op, members: Sequence[int], near: int) -> Rounds:
    """Two levels: a reduce-scatter among `near` neighbours, rings between them, an all-gather among neighbours."""
    near = max(1, min(near, len(members)))
    core = len(members) // near * near

    def levels(axis: Axis, flat: Tensor, op: Op, members: Sequence[int]) -> Rounds:
        me = members.index(axis.rank)
        inside = members[me // near * near :][:near]
        shards = cut(flat, near)
        yield from ring_reduce_scatter(axis, shards, op, inside)
        yield from ring(axis, shards[me % near], op, members[me % near :: near])
        yield from ring_all_gather(axis, shards, inside)

    yield from _with_extra_ranks(axis, flat, op, members, core, levels)


def _with_extra_ranks(
    axis: Axis, flat: Tensor, op: Op, members: Sequence[int], core: int,
    algorithm: Callable[[Axis, Tensor, Op, Sequence[int]], Rounds],
) -> Rounds:  # fmt: skip
    """Run an algorithm on the first `core` members; each of the others sends its tensor to one of them first."""
    me = members.index(axis.rank)
    if me >= core:
        other = members[me - core]
        yield start_round(axis, [(other, flat)], [])
        yield start_round(axis, [], [(other, flat)])
        return
    served = me + core < len(members)
    if served:
        received = torch.empty_like(flat)
        yield start_round(axis, [], [(members[me + core], received)])
        flat.copy_(COMBINE[op](flat, received))
    elif core < len(members):
        yield start_round(axis, [], [])
    yield from algorithm(axis, flat, op, members[:core])
    if served:
        yield start_round(axis, [(members[me + core], flat)], [])


ALGORITHMS = ("native", "ring", "halving", "doubling", "tree", "hierarchical")
_FLAT = {"ring": ring, "halving": halving, "doubling": doubling, "tree": tree}


def start_all_reduce(
    axis: Axis, tensor: Tensor, algorithm: str, op: Op = dist.ReduceOp.SUM, near: int = 1, chunks: int | None = None
) -> Pending:
    """Start to reduce in place; call wait() on the results of an axis in the order in which they were started.

    `near` is the number of ranks of the axis on a node (hierarchical); `chunks` defaults to a number by size.
    """
    if algorithm == "native":
        assert op == dist.ReduceOp.SUM
        return axis.start_all_reduce(tensor)
    held = tensor.detach().contiguous()
    flat, members = held.view(-1), range(axis.size)
    parts = cut_chunks(flat, chunks) if axis.size > 1 else []
    if algorithm == "hierarchical":
        rounds = [hierarchical(axis, part, op, members, near) for part in parts]
    else:
        rounds = [_FLAT[algorithm](axis, part, op, members) for part in parts]
    return RunningRounds(rounds, None if tensor.is_contiguous() else lambda: tensor.detach().copy_(held))


def all_reduce(
    axis: Axis, tensor: Tensor, algorithm: str, op: Op = dist.ReduceOp.SUM, near: int = 1, chunks: int | None = None
) -> Tensor:
    """Reduce in place by an algorithm, and return the tensor."""
    start_all_reduce(axis, tensor, algorithm, op, near, chunks).wait()
    return tensor


def reduce_scatter(axis: Axis, tensor: Tensor, op: Op = dist.ReduceOp.SUM) -> Tensor:
    """By a ring: this rank's shard, of cut(), of the flat sum. The input is not changed."""
    shards = cut(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1), axis.size)
    if axis.size > 1:
        RunningRounds([ring_reduce_scatter(axis, shards, op, range(axis.size))]).wait()
    return shards[axis.rank]


def all_gather(axis: Axis, shard: Tensor, count: int) -> Tensor:
    """By a ring: the flat tensor of `count` elements of which each rank has its shard, of cut()."""
    whole = shard.new_empty(count)
    shards = cut(whole, axis.size)
    shards[axis.rank].copy_(shard.reshape(-1))
    if axis.size > 1:
        RunningRounds([ring_all_gather(axis, shards, range(axis.size))]).wait()
    return whole


def ranks_on_node(axis: Axis, per_node: int) -> int:
    """The largest number of ranks of an axis on one node, if nodes have `per_node` ranks in order."""
    ranks = dist.get_process_group_ranks(axis.group)
    return max(sum(1 for r in ranks if r // per_node == node) for node in {r // per_node for r in ranks})


Start = Callable[[Tensor], Pending]
"""Starts to sum a tensor over the ranks, in place."""


def summing(axis: Axis, algorithm: str, per_node: int) -> Start:
    """The function that sums tensors over an axis, by `comm.allreduce`; nodes have `per_node` ranks in order."""
    if algorithm in ("auto", "native"):
        return axis.start_all_reduce
    near = ranks_on_node(axis, per_node)
    axis.open()
    return lambda tensor: start_all_reduce(axis, tensor, algorithm, near=near)

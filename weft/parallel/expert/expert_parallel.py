"""Expert parallelism: each rank of ep holds some experts, and tokens are sent to them.

ep is laid over dp_shard × cp × tp, so attention and experts are sharded differently on the same ranks:

    tokens of this rank ─ sorted by expert ─▶ all-to-all ─▶ its experts ─▶ all-to-all ─▶ weighted and summed
                                              └ meanwhile, the shared experts

Each rank routes its own tokens: those of its dp and cp rank, shared out among the ranks of tp. Counts are exchanged
before the tokens. The host needs them for the all-to-all, so a GPU is synchronised once per layer and pass; without ep
never."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.comm.algorithms import Start
from weft.comm.autograd import join_along, split_along
from weft.comm.axis import Axis
from weft.comm.overlapped_exchange import RowExchange
from weft.mesh import Mesh
from weft.models.experts.grouped import dispatch, known
from weft.models.experts.mixture_of_experts import (
    ExpertCompute,
    ExpertFeedForward,
    ExpertLayout,
    ExpertMatrices,
    MixtureOfExperts,
)
from weft.parallel.data.data_parallel import shard
from weft.parallel.expert.overlap import Halves
from weft.parallel.expert.permutation import by_expert, sorted_by, swapped
from weft.parallel.expert.replication import ExpertCopies
from weft.planner.plan import Plan

SEQ = 1  # activations are [batch, seq, dim]
PADDING_ROW = 2**62  # the position of padding


class ExpertDispatch(ExpertLayout):
    """Tokens sharded over tp and cp, experts over ep; each axis may be missing."""

    def __init__(
        self, tp: Axis | None, sequence: bool, cp: Axis | None, ep: Axis | None, hops: tuple[Axis, Axis] | None = None
    ):
        """`hops` are the ranks of ep on this node, and those at the same place on other nodes."""
        self.tp, self.sequence, self.cp, self.ep, self.hops = tp, sequence, cp, ep, hops
        self.halves = False
        """Whether rows are sent in two halves."""
        self.copies: ExpertCopies | None = None
        """Experts with copies on other ranks of ep."""

    def enter(self, x: Tensor) -> Tensor:
        if self.tp is None or self.sequence:
            return x
        return split_along(F.pad(x, (0, 0, 0, -x.shape[SEQ] % self.tp.size)), self.tp, SEQ)

    def leave(self, y: Tensor, length: int) -> Tensor:
        if self.tp is None or self.sequence:
            return y
        return join_along(y, self.tp, SEQ)[:, :length]

    def rows(self, rows: Tensor) -> Tensor:
        if self.tp is None:
            return rows
        return self.tp.narrow(F.pad(rows, (0, -len(rows) % self.tp.size), value=PADDING_ROW), 0)

    def total(self, counts: Tensor) -> Tensor:
        for axis in (self.tp, self.cp):
            if axis is not None:
                axis.all_reduce(counts)
        return counts

    def whole(self, chosen: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, slice]:
        size, place = len(rows), 0
        for axis in (self.tp, self.cp):
            if axis is not None:
                place += axis.rank * len(rows)
                chosen, rows = axis.all_gather(chosen, SEQ), axis.all_gather(rows, 0)
        return chosen, rows, slice(place, place + size)

    def carry(
        self, experts: nn.Module, x: Tensor, counts: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        if self.ep is None:
            return super().carry(experts, x, counts, meanwhile)
        if self.halves and self.copies is None and self.hops is None:
            halves = Halves(self.ep, counts, len(x))
            under_way = halves.start(x[: halves.routed])
            always = meanwhile()
            return _filled(experts(under_way, counts, halves.compute), len(x)), always
        route = self._route(self.ep, counts, len(x))
        on_the_way = route.start(x[: route.routed])
        always = meanwhile()
        order, inverse = by_expert(route.coming, route.total)
        rows = dispatch(route.arrive(on_the_way), order, inverse)
        y = route.back(dispatch(experts(rows, route.coming.sum(0), route.compute), inverse, order))
        return _filled(y, len(x)), always

    def _route(self, ep: Axis, counts: Tensor, most: int) -> _Direct | _TwoHops | _Divided:
        """How rows sorted by expert, `counts` of each and at most `most`, are sent to the ranks that compute them."""

        def make(leaving: Tensor, own: int | None = None) -> _Direct | _TwoHops:
            return _Direct(ep, leaving, most, own) if self.hops is None else _TwoHops(*self.hops, leaving, most, own)

        return make(counts.view(ep.size, -1)) if self.copies is None else _Divided(self.copies, ep, counts, make)


def _filled(y: Tensor, length: int) -> Tensor:
    return y if len(y) == length else F.pad(y, (0, 0, 0, length - len(y)))


def _borrowed_rows(coming: Tensor, own: int | None) -> list[Tensor]:
    """The number of rows received for copies of other ranks' experts."""
    return [] if own is None else [coming[:, own:].sum().view(1)]


class _Direct:
    """An all-to-all over ep."""

    compute: ExpertCompute | None = None

    def __init__(self, ep: Axis, leaving: Tensor, most: int, own: int | None = None):
        self.coming = ep.swap(leaving)  # [ranks, experts of this one]
        sums = [leaving.sum(1), self.coming.sum(1), *_borrowed_rows(self.coming, own)]
        found = known(torch.cat(sums), 2 * most)
        send, receive, self.borrowed = found[: ep.size], found[ep.size : 2 * ep.size], sum(found[2 * ep.size :])
        self.routed, self.total = sum(send), sum(receive)
        self.there, self.home = RowExchange(ep, send, receive), RowExchange(ep, receive, send)

    def start(self, x: Tensor) -> Tensor:
        return self.there.start(x)

    def arrive(self, x: Tensor) -> Tensor:
        return self.there.wait(x)

    def back(self, x: Tensor) -> Tensor:
        return self.home.go(x)


class _TwoHops:
    """First inside the node, to the rank with the same place as the expert's rank on its node, then between nodes.

    Each rank exchanges with one rank of each other node, so few large messages cross between nodes.
    """

    compute: ExpertCompute | None = None

    def __init__(self, near: Axis, far: Axis, leaving: Tensor, most: int, own: int | None = None):
        asked = leaving.view(far.size, near.size, -1)  # [node, place in it, expert]
        middle = near.swap(asked.transpose(0, 1))  # [from place, node, expert]
        last = far.swap(middle.transpose(0, 1))  # [from node, from place, expert]
        self.coming = last.flatten(0, 1)
        sums = [asked.sum((0, 2)), middle.sum((1, 2)), middle.sum((0, 2)), last.sum((1, 2))]
        found = known(torch.cat([*sums, *_borrowed_rows(self.coming, own)]), 4 * most)
        rest = iter(found)
        send, receive, send_far, receive_far = (list(islice(rest, axis.size)) for axis in (near, near, far, far))
        self.borrowed = sum(rest)
        self.routed, self.total = sum(send), sum(receive_far)
        self.orders = swapped(asked.sum(2), self.routed), swapped(middle.sum(2), sum(receive))
        self.there = RowExchange(near, send, receive), RowExchange(far, send_far, receive_far)
        self.home = RowExchange(far, receive_far, send_far), RowExchange(near, receive, send)

    def start(self, x: Tensor) -> Tensor:
        return self.there[0].start(dispatch(x, *self.orders[0]))

    def arrive(self, x: Tensor) -> Tensor:
        return self.there[1].go(dispatch(self.there[0].wait(x), *self.orders[1]))

    def back(self, x: Tensor) -> Tensor:
        (order, inverse), (order_far, inverse_far) = self.orders
        middle = dispatch(self.home[0].go(x), inverse_far, order_far)
        return dispatch(self.home[1].go(middle), inverse, order)


class _Divided:
    """Another route in which the rows of an expert are divided among all ranks that have it."""

    def __init__(
        self, copies: ExpertCopies, ep: Axis, counts: Tensor, make: Callable[[Tensor, int | None], _Direct | _TwoHops]
    ):
        leaving, places, shares = copies.divide(counts, ep.rank)
        self.route = make(leaving, copies.own)
        self.coming, self.routed, self.total = self.route.coming, self.route.routed, self.route.total
        self.order, self.inverse = sorted_by(places, shares, self.routed)
        self.compute: ExpertCompute | None = partial(copies.compute_with_borrowed, ep, self.route.borrowed)

    def start(self, x: Tensor) -> Tensor:
        return self.route.start(dispatch(x, self.order, self.inverse))

    def arrive(self, x: Tensor) -> Tensor:
        return self.route.arrive(x)

    def back(self, x: Tensor) -> Tensor:
        return dispatch(self.route.back(x), self.inverse, self.order)


def stacks(modules: list[tuple[str, nn.Module]]) -> list[ExpertMatrices]:
    """The stacks of expert weights among some modules."""
    return [m for _, m in modules if isinstance(m, ExpertMatrices)]


def keep_local_experts(modules: list[tuple[str, nn.Module]], mesh: Mesh) -> None:
    """Keep only this rank's experts, before they have values."""
    if (ep := mesh.axis("ep")) is None:
        return
    for stack in stacks(modules):
        stack.first = ep.rank * (len(stack.weight) // ep.size)
        for key, param in list(stack.named_parameters()):
            count, *shape = param.shape
            own = torch.empty(count // ep.size, *shape, device=param.device)
            stack.register_parameter(key, nn.Parameter(own, requires_grad=param.requires_grad))


def mark_as_sharded(modules: list[tuple[str, nn.Module]], mesh: Mesh) -> None:
    """Make the experts' weights DTensors sharded over ep."""
    if mesh.axis("ep") is None:
        return
    assert mesh.folded is not None
    for stack in stacks(modules):
        for key, param in list(stack.named_parameters()):
            value = DTensor.from_local(param.detach(), mesh.folded["ep"], [Shard(0)], run_check=False)
            stack.register_parameter(key, nn.Parameter(value, requires_grad=param.requires_grad))


def spread_experts(modules: list[tuple[str, nn.Module]], mesh: Mesh, sequence: bool, halves: bool) -> None:
    """Make mixtures of experts dispatch over the ranks of tp, cp and ep."""
    axes = {name: mesh.axis(name) for name in ("tp", "cp", "ep")}
    near, far = mesh.axis("ep_near"), mesh.axis("ep_far")
    hops = (near, far) if near is not None and far is not None else None
    for _, module in modules:
        if isinstance(module, MixtureOfExperts):
            spread = ExpertDispatch(axes["tp"], sequence, axes["cp"], axes["ep"], hops)
            spread.halves, module.layout = halves, spread


def shard_experts(modules: list[tuple[str, nn.Module]], mesh: Mesh, plan: Plan, dtype: torch.dtype) -> None:
    """Shard the experts of a rank over the ranks that hold the same ones."""
    if mesh.axis("ep") is None:
        return
    assert mesh.folded is not None
    rest = mesh.folded["dp_replicate", "ep_shard"] if plan.dp_replicate > 1 else mesh.folded["ep_shard"]
    parts = mesh.folded["ep_shard"].size()
    for _, module in modules:
        if isinstance(module, ExpertFeedForward):
            shard(module, rest, plan.zero, dtype, lambda p: Shard(_equal_parts(p, parts)))


def _equal_parts(param: Tensor, parts: int) -> int:
    """The dim along which FSDP2 shards: it needs equal parts except along the first."""
    return next((d for d in range(1, param.dim()) if param.shape[d] % parts == 0), 0)


def expert_gradient_sum(model: nn.Module, mesh: Mesh) -> tuple[frozenset[str], Start | None]:
    """Without dp_shard: the experts' weights, which are replicated on other ranks than the rest, and how they are
    summed."""
    if mesh.axis("ep") is None:
        return frozenset(), None
    stacked = [(n, m) for n, m in model.named_modules() if isinstance(m, ExpertMatrices)]
    names = frozenset(f"{n}.{key}" for n, m in stacked for key, _ in m.named_parameters())
    axis = mesh.axis("expert_replicate")
    return names, axis.start_all_reduce if axis is not None else None

"""A stage's backward pass in two halves: first the gradient of its input, later those of its weights (zero bubble).

A weight's gradient is left for later where one node of the graph needs it besides the gradient of the input: the node
runs again with the gradient it was given, and computes only what belongs to the weight. Other weights get theirs
at once: those used at several places or for an output of their own, and those of a custom autograd.Function, which
computes all its gradients together (a product in fp8, an exchange between experts, a compiled block).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Consumers = dict[Node, list[Node]]
"""The nodes of a graph, each with those that use its result."""


@dataclass
class WeightPart:
    """The weights behind one node, and the gradients that the node was given."""

    node: Node
    weights: list[nn.Parameter] = field(default_factory=list)
    grads: tuple[Tensor | None, ...] = ()

    def record(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = grads


def consumers_of(outs: Sequence[Tensor]) -> Consumers:
    todo = list(dict.fromkeys(get_gradient_edge(out).node for out in outs))
    found: Consumers = {root: [] for root in todo}
    while todo:
        node = todo.pop()
        for used, _ in node.next_functions:
            if used is None:
                continue
            if used not in found:
                found[used] = []
                todo.append(used)
            found[used].append(node)
    return found


def _reaching(end: Node, graph: Consumers, stop: frozenset[Node] = frozenset()) -> tuple[set[Node], set[Node]]:
    """The nodes from which `end` is reached, as far as those in `stop`; and which of these were met."""
    found, met, todo = {end}, set(), [end]
    while todo:
        for node in graph[todo.pop()]:
            if node in stop:
                met.add(node)
            elif node not in found:
                found.add(node)
                todo.append(node)
    return found, met


def backward_input(
    outs: list[Tensor], grads: Sequence[Tensor | None], hidden: Sequence[Tensor], weights: Iterable[nn.Parameter]
) -> tuple[list[Tensor | None], list[WeightPart]]:
    """The gradients of `hidden`, and what backward_weights() needs for the rest. `outs` is emptied, which frees the
    graph between the outputs and the nodes that run again.

    Without a `hidden` (tokens have no gradient) the pass ends at the stage's first weight.
    """
    graph = consumers_of(outs)
    edges = {w: get_gradient_edge(w) for w in weights if w.requires_grad}
    used = [w for w, edge in edges.items() if edge.node in graph]
    ends = [get_gradient_edge(h) for h in hidden]
    reached = [end for end in ends if end.node in graph]
    first = used[:1] if not reached else []
    stops = reached or [edges[w] for w in first]
    between = frozenset(node for stop in stops for node in _reaching(stop.node, graph)[0])
    roots = {get_gradient_edge(out).node for out in outs}
    at_once: list[nn.Parameter] = []
    parts: dict[Node, WeightPart] = {}
    for weight in used[len(first) :]:
        passed, met = _reaching(edges[weight].node, graph, between)
        node = next(iter(met), None)
        if node is None or len(met) > 1 or isinstance(node, BackwardCFunction) or roots & passed:
            at_once.append(weight)
        else:
            parts.setdefault(node, WeightPart(node)).weights.append(weight)
    handles = [part.node.register_prehook(part.record) for part in parts.values()]
    try:
        wanted = [*stops, *(edges[w] for w in at_once)]
        given = None if grads[0] is None else grads
        found = torch.autograd.grad(outs, wanted, given, retain_graph=bool(parts), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    outs.clear()
    for weight, value in zip([*first, *at_once], found[len(reached) :], strict=True):
        if value is not None:
            _accumulate(weight, value)
    by_node = dict(zip((end.node for end in reached), found, strict=False))
    return [by_node.get(end.node) for end in ends], list(parts.values())


def backward_weights(parts: list[WeightPart]) -> None:
    """Add the gradients of the weights that backward_input() left out to their .grad; no hook of theirs runs."""
    while parts:
        part = parts.pop()
        given = [(GradientEdge(part.node, i), g) for i, g in enumerate(part.grads) if g is not None]
        if not given:
            continue
        edges = [get_gradient_edge(w) for w in part.weights]
        found = torch.autograd.grad([e for e, _ in given], edges, [g for _, g in given])
        for weight, value in zip(part.weights, found, strict=True):
            _accumulate(weight, value)


def _accumulate(weight: Tensor, grad: Tensor) -> None:
    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)

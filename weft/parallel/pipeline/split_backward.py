"""A stage's backward pass in two halves: first the gradient of its input, later those of its weights (zero bubble).

A weight's gradient is left for later where one node of the graph needs it besides the gradient of the input: the node
runs again with the gradient it was given, and computes only what belongs to the weight. Other weights get theirs
at once: those used at several places, and those of a custom autograd.Function, which computes all its gradients
together (a product in fp8, an exchange between experts, a compiled block).
"""

from __future__ import annotations

from collections.abc import Iterable
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


def consumers_of(out: Tensor) -> Consumers:
    root = get_gradient_edge(out).node
    found: Consumers = {root: []}
    todo = [root]
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
    out: Tensor, grad: Tensor | None, hidden: Tensor | None, weights: Iterable[nn.Parameter]
) -> tuple[Tensor | None, list[WeightPart]]:
    """The gradient of `hidden`, and what backward_weights() needs for the rest.

    Without a `hidden` (tokens have no gradient) the pass ends at the stage's first weight.
    """
    graph = consumers_of(out)
    edges = {w: get_gradient_edge(w) for w in weights if w.requires_grad}
    used = [w for w, edge in edges.items() if edge.node in graph]
    end = edges[used[0]] if hidden is None else get_gradient_edge(hidden)
    between = frozenset(_reaching(end.node, graph)[0])
    at_once: list[nn.Parameter] = []
    parts: dict[Node, WeightPart] = {}
    for weight in used[hidden is None :]:
        _, met = _reaching(edges[weight].node, graph, between)
        node = next(iter(met))
        if len(met) > 1 or isinstance(node, BackwardCFunction):
            at_once.append(weight)
        else:
            parts.setdefault(node, WeightPart(node)).weights.append(weight)
    handles = [part.node.register_prehook(part.record) for part in parts.values()]
    try:
        wanted = [end, *(edges[w] for w in at_once)]
        found = torch.autograd.grad([out], wanted, None if grad is None else [grad], retain_graph=bool(parts))
    finally:
        for handle in handles:
            handle.remove()
    out.detach_()  # frees the graph between the output and the nodes that run again
    for weight, value in zip(at_once, found[1:], strict=True):
        _accumulate(weight, value)
    if hidden is None:
        _accumulate(used[0], found[0])
        return None, list(parts.values())
    return found[0], list(parts.values())


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

"""Parts of a module of your own that says none: pairs of linear layers with nothing but elementwise operations between.

The forward of every module is recorded by torch.fx, whose calls show what lies between two layers. The first ones
become `column`, the second `row`; everything else stays whole on every rank.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardswish, nn.Softplus,
    nn.Identity,
)  # fmt: skip
ELEMENTWISE_FUNCTIONS = {
    F.relu, F.relu6, F.gelu, F.silu, F.tanh, F.sigmoid, F.leaky_relu, F.elu, F.mish, F.hardswish, F.softplus,
    torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.mul, torch.pow, torch.erf, torch.exp, torch.add,
    torch.div, operator.mul, operator.pow, operator.add, operator.sub, operator.truediv, operator.neg,
}  # fmt: skip
ELEMENTWISE_METHODS = {"relu", "tanh", "sigmoid", "square", "mul", "pow", "erf", "exp", "add", "div"}
TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Layers whose forward cannot be recorded, with linear1 and linear2."""


def infer_parts(model: nn.Module) -> dict[str, str]:
    """The table of parts of a module: its pairs of linear layers by path."""
    names = {id(module): name for name, module in model.named_modules()}
    called = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear)
    found: dict[str, str] = {}
    for module in model.modules():
        for first, second in _pairs(module):
            layers = (*first, second)
            if all(called[id(layer)] == 1 and names[id(layer)] not in found for layer in layers):
                found |= {names[id(layer)]: "column" for layer in first}
                found[names[id(second)]] = "row"
    return found


def _pairs(module: nn.Module) -> list[tuple[list[nn.Linear], nn.Linear]]:
    """The linear layers of a module that feed another one elementwise, and that one."""
    if isinstance(module, TORCH_LAYERS):
        module.activation_relu_or_gelu = 0  # the fused path of evaluation reads whole weights
        return [([module.linear1], module.linear2)] if not module.dropout.p else []
    if isinstance(module, nn.Linear) or sum(1 for _ in _linears(module)) < 2:
        return []
    graph = _recorded(module)
    if graph is None:
        return []
    layers = {n: m for n in graph.nodes if n.op == "call_module" and type(m := _target(module, n)) is nn.Linear}
    uses = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
    pairs = []
    for node, layer in layers.items():
        between = _sources(module, node.args[0], layers)
        first = [n for n in between or () if n in layers]
        inside = {*(between or ()), node}
        if (
            first
            and all(set(n.users) <= inside for n in between or ())
            and all(layers[n].out_features == layer.in_features for n in first)
            and all(uses[str(n.target)] == 1 for n in (*first, node))
        ):
            pairs.append(([layers[n] for n in first], layer))
    return pairs


def _recorded(module: nn.Module) -> fx.Graph | None:
    """The calls of a module's forward; None if they depend on values. Activations of a user's own are followed, unless
    theirs do."""
    for follow_activations in (True, False):
        try:
            return _Recorder(follow_activations).trace(module)
        except Exception:  # torch.fx raises what the forward raises
            continue
    return None


def _linears(module: nn.Module) -> Any:
    """The linear layers that the forward of a module calls itself, through an nn.Sequential or from a list or dict."""
    for child in module.children():
        if isinstance(child, nn.Linear):
            yield child
        elif type(child) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            yield from _linears(child)


def _sources(module: nn.Module, node: Any, layers: dict[fx.Node, nn.Linear]) -> set[fx.Node] | None:
    """What a value is computed of, back to linear layers; None if anything but elementwise operations is between."""
    if not isinstance(node, fx.Node):
        return None
    if node in layers:
        return {node}
    elementwise = (
        (node.op == "call_function" and node.target in ELEMENTWISE_FUNCTIONS)
        or (node.op == "call_method" and node.target in ELEMENTWISE_METHODS)
        or (node.op == "call_module" and _is_elementwise(_target(module, node)))
    )
    if not elementwise or not node.all_input_nodes:
        return None
    found = {node}
    for one in node.all_input_nodes:
        if (more := _sources(module, one, layers)) is None:
            return None
        found |= more
    return found


def _is_elementwise(module: nn.Module) -> bool:
    return type(module) in ELEMENTWISE_MODULES or (isinstance(module, nn.Dropout) and not module.p)


def _target(module: nn.Module, node: fx.Node) -> nn.Module:
    return module.get_submodule(str(node.target))


class _Recorder(fx.Tracer):
    """Follows calls into every nn.Sequential and activation of a user's own; all other modules are one call."""

    def __init__(self, follow_activations: bool):
        super().__init__()
        self.follow_activations = follow_activations

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = not type(m).__module__.startswith("torch.")
        activation = self.follow_activations and own and not list(m.children()) and not list(m.parameters())
        return type(m) is not nn.Sequential and not activation

"""Attention of a user module that tensor parallelism can split by heads: fused or separate projections, and the output.

The forward of a module is recorded with the shapes it has in the model. Its linear layers before the last one are taken
to give each rank some heads, and what happens to these is followed up to the last one. Only operations that treat heads
alike are allowed on the way. Where the forward writes the number of heads or their joint width, the recorded one gets
that of a rank.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from weft.job.errors import JobError
from weft.parallel.forward_recorder_internals import ForwardRecorder, inputs_of_modules, shapes_of
from weft.parallel.inferred_parts import ELEMENTWISE_FUNCTIONS, ELEMENTWISE_METHODS, ELEMENTWISE_MODULES


class StaysWhole(Exception):
    """Why the heads of a module cannot be split."""


@dataclass(frozen=True)
class AttentionSplit:
    """How an attention module is split: the parts of each projection's outputs (3: queries, keys and values), the
    output layer, and the forward of a rank in training and in evaluation. Layers are paths in the module."""

    projections: Mapping[str, int]
    output: str
    forwards: Mapping[bool, fx.Graph]
    shapes: Mapping[str, Any] | None
    """The shapes of the inputs for which forward was recorded; None if it is one for all shapes."""

    def use(self, module: nn.Module) -> None:
        """Let a module run the forward of a rank."""
        run = {mode: MethodType(type(fx.GraphModule(module, g)).forward, module) for mode, g in self.forwards.items()}
        module.forward = _ByMode(run, self.shapes)


@dataclass
class _ByMode:
    """The forward of a rank."""

    run: Mapping[bool, MethodType]
    shapes: Mapping[str, Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.run[True].__self__
        for name, value in zip(self.shapes or (), args, strict=False):
            if (found := shapes_of(value)) != self.shapes[name]:  # type: ignore[index]
                raise JobError(
                    f"the forward of {type(module).__name__} reads sizes as numbers, so tp splits it for {name} of "
                    f"shape {self.shapes[name]}, and a batch has {found}; give all samples one size, or use tp=1"  # type: ignore[index]
                )
        return self.run[bool(module.training)](*args, **kwargs)


def infer_attention(
    model: nn.Module, given: Mapping[str, Any], taken: Mapping[str, str], ranks: int
) -> tuple[dict[str, AttentionSplit], dict[str, str]]:
    """The attention modules of a model that can be split over these ranks by path, and why others cannot. `given` are
    arguments of the model's forward; modules with layers in `taken` are left out."""
    candidates = {
        path: module for path, module in model.named_modules()
        if path and _projects(module) and not any(n == path or n.startswith(f"{path}.") for n in taken)
    }  # fmt: skip
    splits: dict[str, AttentionSplit] = {}
    whole: dict[str, str] = {}
    for path, inputs in inputs_of_modules(model, given, candidates).items():
        if any(path.startswith(f"{other}.") for other in splits):
            continue
        try:
            splits[path] = _split(candidates[path], inputs, ranks)
        except StaysWhole as error:
            whole[path] = str(error)
        except Exception:  # torch.fx raises what the forward raises
            continue
    inside = {path for path in whole if any(other != path and other.startswith(f"{path}.") for other in candidates)}
    return splits, {path: why for path, why in whole.items() if path not in inside}


def _projects(module: nn.Module) -> bool:
    """Whether a module that is not a container has linear layers of its own, or in an nn.Sequential."""
    if isinstance(module, nn.Linear | nn.Sequential | nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention):
        return False
    count = sum(
        isinstance(child, nn.Linear) or (type(child) is nn.Sequential and any(isinstance(c, nn.Linear) for c in child))
        for child in module.children()
    )
    return count >= 2


def _split(module: nn.Module, inputs: Mapping[str, Any], ranks: int) -> AttentionSplit:
    signature = inspect.signature(module.forward)
    left = {n: p.default for n, p in signature.parameters.items() if n not in inputs}
    forwards, found, used_sizes = {}, [], False
    was = module.training
    for mode in (True, False):
        module.train(mode)
        try:
            recorder = ForwardRecorder(lambda m, _: type(m) is not nn.Sequential, {}, inputs)
            graph = recorder.record(module, left)
        finally:
            module.train(was)
        if recorder.assigned or recorder.changed or recorder.constants:
            raise StaysWhole("its forward changes attributes")
        used_sizes |= recorder.used_sizes
        if left and any(n.op == "placeholder" and n.target not in inputs for n in graph.nodes):
            _drop_placeholders(graph, inputs)
        heads = _Heads(module, graph, recorder.values, ranks)
        forwards[mode] = graph
        found.append((heads.projections(), heads.output_path))
    if found[0] != found[1]:
        raise StaysWhole("its forward differs between training and evaluation")
    _same_signature(forwards, signature)
    shapes = {name: shapes_of(value) for name, value in inputs.items()} if used_sizes else None
    return AttentionSplit(*found[0], forwards, shapes)


def _drop_placeholders(graph: fx.Graph, inputs: Mapping[str, Any]) -> None:
    """Remove inputs that are not given, and the checks that they have their defaults."""
    dropped = {n for n in graph.nodes if n.op == "placeholder" and n.target not in inputs}
    for node in graph.nodes:
        if dropped.intersection(node.all_input_nodes):
            dropped.add(node)
    for node in reversed(list(graph.nodes)):
        if node in dropped:
            graph.erase_node(node)


def _same_signature(forwards: Mapping[bool, fx.Graph], signature: inspect.Signature) -> None:
    names = [str(n.target) for n in forwards[True].nodes if n.op == "placeholder"]
    if names != list(signature.parameters)[: len(names)]:
        raise StaysWhole("its forward is called with keywords")


@dataclass(frozen=True)
class _Cut:
    """A dim (counted from the last) of which a rank has a part, and the projection whose outputs it still is."""

    dim: int
    projection: fx.Node | None = None


@dataclass
class _Heads:
    """Follows the heads of a rank through a graph, and writes their number into it."""

    module: nn.Module
    graph: fx.Graph
    values: Mapping[fx.Node, Any]
    ranks: int
    cuts: dict[fx.Node, Any] = field(default_factory=dict)
    """By node: a _Cut, or a list of them for several values."""
    sizes: set[fx.Node] = field(default_factory=set)
    """Numbers that are smaller on a rank."""
    parts: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        linears = [n for n in self.graph.nodes if n.op == "call_module" and type(self.target(n)) is nn.Linear]
        if len({n.target for n in linears}) != len(linears) or len(linears) < 2:
            raise StaysWhole("it calls a linear layer twice")
        self.output = linears[-1]
        self.output_path = str(self.output.target)
        above = _ancestors(self.output)
        self.linears = [n for n in linears[:-1] if n in above]
        if len(self.linears) != len(linears) - 1 or any(_ancestors(n).intersection(linears) for n in self.linears):
            raise StaysWhole("its linear layers follow each other")
        for node in list(self.graph.nodes):
            self.visit(node)
        if self.output not in self.seen_output:
            raise StaysWhole("its last linear layer does not take all heads")

    seen_output: set[fx.Node] = field(default_factory=set)

    def projections(self) -> dict[str, int]:
        return {str(n.target): self.parts.get(n, 1) for n in self.linears}

    def target(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        value = self.values.get(node)
        if not isinstance(value, Tensor):
            raise StaysWhole("shapes in it are not known")
        return tuple(value.shape)

    def visit(self, node: fx.Node) -> None:
        if node in self.linears:
            self.cuts[node] = _Cut(-1, node)
            return
        inputs = [n for n in node.all_input_nodes if n in self.cuts]
        if any(n in self.sizes for n in node.all_input_nodes) and not inputs:
            return self.number(node)
        if not inputs:
            return
        if node is self.output:
            cut = self.cuts[inputs[0]]
            if not isinstance(cut, _Cut) or cut.dim != -1:
                raise StaysWhole("its last linear layer takes heads in another order")
            self.resolve(cut, 1)
            self.seen_output.add(node)
            return
        if node.op == "output":
            raise StaysWhole("it returns values of single heads")
        for other in node.all_input_nodes:
            value = self.values.get(other)
            if other not in self.cuts and isinstance(value, Tensor) and value.requires_grad:
                raise StaysWhole(f"{other} has a gradient from all heads")
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
        rule = self.rule(node, name)
        if rule is None:
            what = type(self.target(node)).__name__ if node.op == "call_module" else name
            raise StaysWhole(f"{what} may mix heads")
        self.cuts[node] = rule
        if rule is NUMBER:
            del self.cuts[node]

    def number(self, node: fx.Node) -> None:
        """A number computed from one that is smaller on a rank."""
        if node.op == "call_function" and node.target in NUMBER_FUNCTIONS:
            self.sizes.add(node)
        else:
            raise StaysWhole("it computes with the number of heads")

    def rule(self, node: fx.Node, name: str) -> Any:
        if node.op == "call_module":
            return self.module_rule(node)
        if node.target in ELEMENTWISE_FUNCTIONS or name in ELEMENTWISE_METHODS | KEEPING or name in COMBINING:
            return self.same(node)
        rule: Callable[[fx.Node], Any] | None = getattr(self, f"rule_{RULES.get(name, name)}", None)
        return None if rule is None else rule(node)

    def module_rule(self, node: fx.Node) -> Any:
        module = self.target(node)
        if isinstance(module, nn.Dropout):
            if module.p and module.training:
                raise StaysWhole(f"dropout of {module.p:g} on single heads")
            return self.same(node)
        if type(module) in (*ELEMENTWISE_MODULES,) or isinstance(module, nn.Identity):
            return self.same(node)
        if isinstance(module, nn.Softmax) and module.dim is not None:
            return self.along(node, module.dim)
        return None

    def first(self, node: fx.Node) -> _Cut:
        cut = self.cuts.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if not isinstance(cut, _Cut):
            raise StaysWhole(f"{node.target} of several values")
        return cut

    def resolve(self, cut: _Cut, parts: int) -> None:
        if cut.projection is not None and self.parts.setdefault(cut.projection, parts) != parts:
            raise StaysWhole("a projection is taken apart in two ways")

    def same(self, node: fx.Node) -> _Cut:
        """The heads are in the same dim of all values, and the others have no heads."""
        cuts = {self.cuts[n] for n in node.all_input_nodes if n in self.cuts}
        dims = {cut.dim for cut in cuts if isinstance(cut, _Cut)}
        if len(dims) != 1 or len(cuts) != sum(isinstance(cut, _Cut) for cut in cuts):
            raise StaysWhole("heads are in different dims")
        (dim,) = dims
        for other in node.all_input_nodes:
            value = self.values.get(other)
            if other not in self.cuts and isinstance(value, Tensor) and value.dim() >= -dim and value.shape[dim] != 1:
                raise StaysWhole(f"{other} has values of all heads")
        if len(self.shape(node)) < -dim:
            raise StaysWhole("the dim of heads is gone")
        left = {cut.projection for cut in cuts}
        if len(left) > 1:
            for cut in cuts:
                self.resolve(cut, 1)
        return _Cut(dim, left.pop() if len(left) == 1 else None)

    def along(self, node: fx.Node, dim: int) -> _Cut:
        """An operation along another dim than that of heads."""
        cut, count = self.first(node), len(self.shape(node.args[0]))
        if dim % count == cut.dim % count:
            raise StaysWhole(f"{node.target} over all heads")
        return cut

    def rule_softmax(self, node: fx.Node) -> _Cut:
        return self.along(node, _argument(node, 1, "dim"))

    def rule_transpose(self, node: fx.Node) -> _Cut:
        cut, count = self.first(node), len(self.shape(node))
        a, b = (_argument(node, i, f"dim{i - 1}") % count - count for i in (1, 2))
        self.resolve(cut, 1) if cut.dim in (a, b) else None
        return _Cut({a: b, b: a}.get(cut.dim, cut.dim), None if cut.dim in (a, b) else cut.projection)

    def rule_permute(self, node: fx.Node) -> _Cut:
        cut, order = self.first(node), _numbers(node)
        count = len(order)
        self.resolve(cut, 1)
        return _Cut([d % count for d in order].index(cut.dim % count) - count)

    def rule_matmul(self, node: fx.Node) -> _Cut:
        cuts = [self.cuts.get(n) for n in node.args]
        if len(cuts) != 2 or not all(isinstance(c, _Cut) and c.dim <= -3 for c in cuts) or cuts[0].dim != cuts[1].dim:  # type: ignore[union-attr]
            raise StaysWhole("a product over heads")
        return _Cut(cuts[0].dim)  # type: ignore[union-attr]

    def rule_scaled_dot_product_attention(self, node: fx.Node) -> _Cut:
        bound = inspect.signature(_attention).bind(*node.args, **node.kwargs).arguments
        cuts = [self.cuts.get(bound[name]) for name in ("query", "key", "value")]
        mask = bound.get("attn_mask")
        if not all(isinstance(c, _Cut) and c.dim == -3 for c in cuts):
            raise StaysWhole("heads are not the third dim from the last")
        if isinstance(mask, fx.Node) and (shape := self.shape(mask)) and len(shape) >= 3 and shape[-3] != 1:
            raise StaysWhole("its mask has values of all heads")
        if bound.get("dropout_p", 0.0):
            raise StaysWhole(f"dropout of {bound['dropout_p']:g} on single heads")
        return _Cut(-3)

    def rule_split(self, node: fx.Node) -> list[_Cut]:
        cut, value = self.first(node), self.values.get(node)
        count = len(self.shape(node.args[0]))
        chunked = node.target in ("chunk", torch.chunk)
        dim = _argument(node, 2, "dim", 0) % count - count
        if not isinstance(value, tuple | list) or len({v.shape for v in value}) != 1:
            raise StaysWhole("parts of different widths")
        if dim != cut.dim:
            return [cut] * len(value)
        if cut.projection is None:
            raise StaysWhole("heads are taken apart")
        self.resolve(cut, len(value))
        if not chunked:
            self.set(node, 1, "split_size", self.part(value[0].shape[dim]))
        return [_Cut(dim)] * len(value)

    def rule_unbind(self, node: fx.Node) -> list[_Cut]:
        cut, value = self.first(node), self.values[node]
        dim, count = _argument(node, 1, "dim", 0), len(self.shape(node.args[0]))
        dim = dim % count - count
        if dim == cut.dim:
            raise StaysWhole("heads are taken apart")
        return [_Cut(cut.dim if cut.dim > dim else cut.dim + 1)] * len(value)

    def rule_getitem(self, node: fx.Node) -> Any:
        source, index = node.args[0], node.args[1]
        cut = self.cuts[source]
        if isinstance(cut, list):
            return cut[index]
        if isinstance(cut, _Sizes):
            dims = cut.dims[index]
            if isinstance(dims, tuple):
                return _Sizes(cut.dim, dims)
            if dims == cut.dim:
                self.sizes.add(node)
            return NUMBER
        items = list(index) if isinstance(index, tuple) else [index]
        dims = sum(item is not None and item is not Ellipsis for item in items)
        if Ellipsis not in items:
            items.append(Ellipsis)
        shape = self.shape(source)
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - dims)
        before = 0
        after: list[int | None] = []
        for item in items:
            if item is None:
                after.append(None)
                continue
            if before - len(shape) == cut.dim and item != slice(None):
                raise StaysWhole("single heads are taken")
            if not isinstance(item, int):
                after.append(before - len(shape))
            if not isinstance(item, int | slice):
                raise StaysWhole("items are chosen by a tensor")
            before += 1
        return _Cut(after.index(cut.dim) - len(after), cut.projection)

    def rule_getattr(self, node: fx.Node) -> Any:
        if node.args[1] in ("shape",):
            return _Sizes.of(self.first(node), len(self.shape(node.args[0])))
        if node.args[1] in ("device", "dtype", "ndim"):
            return NUMBER
        return None

    def rule_size(self, node: fx.Node) -> Any:
        cut, shape = self.first(node), self.shape(node.args[0])
        if len(node.args) == 1:
            return _Sizes.of(cut, len(shape))
        if node.args[1] % len(shape) - len(shape) == cut.dim:
            self.sizes.add(node)
        return NUMBER

    def rule_view(self, node: fx.Node) -> _Cut:
        cut, before, after = self.first(node), self.shape(node.args[0]), self.shape(node)
        start, group = _group(before, after, cut.dim % len(before))
        if start != cut.dim % len(before):
            raise StaysWhole("heads are joined with other dims")
        place = group[0]
        if cut.projection is not None:
            parts = 1
            if len(group) > 2 and after[group[0]] in (2, 3):
                parts, place = after[group[0]], group[1]
            self.resolve(cut, parts)
        numbers = list(_numbers(node))
        if len(numbers) == len(after) and numbers[place] != -1:
            numbers[place] = self.part(after[place])
        if any(isinstance(n, fx.Node) and n in self.sizes for n in numbers):
            raise StaysWhole("it computes with the number of heads")
        self.part(after[place])
        node.args = (node.args[0], *numbers)
        node.kwargs = {}
        return _Cut(place - len(after))

    def rule_unsqueeze(self, node: fx.Node) -> _Cut:
        cut, count = self.first(node), len(self.shape(node))
        dim = _argument(node, 1, "dim") % count - count
        return _Cut(cut.dim if dim < cut.dim else cut.dim - 1, cut.projection if dim < cut.dim else None)

    def rule_view_as_complex(self, node: fx.Node) -> _Cut:
        cut = self.first(node)
        if cut.dim == -1:
            raise StaysWhole("heads are the last dim")
        return _Cut(cut.dim + 1)

    def rule_view_as_real(self, node: fx.Node) -> _Cut:
        return _Cut(self.first(node).dim - 1)

    def rule_flatten(self, node: fx.Node) -> _Cut:
        cut, before, after = self.first(node), self.shape(node.args[0]), self.shape(node)
        start, group = _group(before, after, cut.dim % len(before))
        if start != cut.dim % len(before) or len(group) != 1:
            raise StaysWhole("heads are joined with other dims")
        self.part(after[group[0]])
        return _Cut(group[0] - len(after))

    def rule_expand(self, node: fx.Node) -> _Cut:
        cut, after = self.first(node), self.shape(node)
        numbers = list(_numbers(node))
        at = cut.dim % len(after)
        if numbers[at] != -1:
            numbers[at] = self.part(after[at])
        if any(isinstance(n, fx.Node) and n in self.sizes for n in numbers):
            raise StaysWhole("it computes with the number of heads")
        node.args = (node.args[0], *numbers)
        return _Cut(cut.dim)

    def rule_rearrange(self, node: fx.Node) -> _Cut:
        """einops: `b n (h d) -> b h n d` with h, and back."""
        cut = self.first(node)
        before, after = (_tokens(side) for side in str(node.args[1]).split("->"))
        at = cut.dim % len(before)
        name, parts = before[at][0], 1
        sizes = dict(node.kwargs)
        if cut.projection is not None and len(before[at]) > 2:
            parts, name = int(sizes.get(before[at][0], 0)), before[at][1]
            if parts not in (2, 3):
                raise StaysWhole("a projection is taken apart in two ways")
        self.resolve(cut, parts)
        places = [i for i, tokens in enumerate(after) if name in tokens]
        if len(places) != 1 or after[places[0]][0] != name or "..." in (*before[at], name):
            raise StaysWhole("heads are joined with other dims")
        if name in sizes:
            sizes[name] = self.part(sizes[name])
            node.kwargs = sizes
        return _Cut(places[0] - len(after))

    def part(self, size: Any) -> int:
        """The share of a rank of a number of heads, or of their joint width."""
        if not isinstance(size, int) or size % self.ranks:
            raise StaysWhole(f"{size} heads are not a multiple of tp={self.ranks}")
        return size // self.ranks

    def set(self, node: fx.Node, index: int, key: str, value: Any) -> None:
        if len(node.args) > index:
            node.update_arg(index, value)
        else:
            name = key if key in node.kwargs else f"{key}_or_sections"
            node.update_kwarg(name, value)


class _Number:
    pass


NUMBER = _Number()
"""What a rule gives for a value that has no heads, such as a dtype."""


@dataclass(frozen=True)
class _Sizes:
    """The shape of a value with heads."""

    dim: int
    """The dim of heads, counted from the last of the value."""
    dims: tuple[int, ...]
    """Those whose sizes it has."""

    @classmethod
    def of(cls, cut: _Cut, count: int) -> _Sizes:
        return cls(cut.dim, tuple(range(-count, 0)))


NUMBER_FUNCTIONS = {operator.mul, operator.floordiv, operator.add, operator.sub}
KEEPING = {
    "contiguous",
    "clone",
    "float",
    "to",
    "type_as",
    "half",
    "bfloat16",
    "detach",
    "double",
    "abs",
    "neg",
    "sqrt",
}
COMBINING = {"masked_fill", "where", "mul_", "div_", "add_"}
RULES = {
    "swapaxes": "transpose", "chunk": "split", "reshape": "view", "__getitem__": "getitem", "bmm": "matmul",
    "_softmax": "softmax", "__matmul__": "matmul",
}  # fmt: skip


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """The arguments of F.scaled_dot_product_attention."""


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    left = list(node.all_input_nodes)
    while left:
        if (current := left.pop()) not in seen:
            seen.add(current)
            left += current.all_input_nodes
    return seen


MISSING = object()


def _argument(node: fx.Node, index: int, name: str, default: Any = MISSING) -> Any:
    value = node.args[index] if len(node.args) > index else node.kwargs.get(name, default)
    if not isinstance(value, int):
        raise StaysWhole(f"{node.target} along a dim that is not a number")
    return value


def _numbers(node: fx.Node) -> tuple[Any, ...]:
    """The numbers of view(1, 2), view((1, 2)) and permute(…)."""
    rest = node.args[1:]
    return tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else tuple(rest)


def _group(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> tuple[int, list[int]]:
    """Of the dims that a view joins and takes apart with one, the first before and all after."""
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j = i, j
        i, j = i + 1, j + 1
        while prod(before[first_i:i]) != prod(after[first_j:j]):
            if prod(before[first_i:i]) < prod(after[first_j:j]):
                i += 1
            else:
                j += 1
        if first_i <= dim < i:
            return first_i, list(range(first_j, j))
    raise StaysWhole("the dim of heads is gone")


def _tokens(side: str) -> list[list[str]]:
    """The names in each dim of one side of an einops pattern."""
    made: list[list[str]] = []
    inside = False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            inside = True
            made.append([])
        elif word == ")":
            inside = False
        elif inside:
            made[-1].append(word)
        else:
            made.append([word])
    return made

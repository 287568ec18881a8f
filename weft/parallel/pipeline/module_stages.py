"""Stages of a module of your own: its forward as a graph of calls, cut between calls of modules with weights.

torch.fx records the calls of the forward method, down to the blocks: members of an nn.Sequential or nn.ModuleList, what
`units` names, or the module's children. What happens inside a block is not recorded, so it may be anything. Two graphs
are recorded, for training and for evaluation, since a forward may depend on `self.training`. Stages share the blocks
with the module, and have copies only of the modules that contain them.
"""

from __future__ import annotations

import copy
import inspect
import random
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from weft.job.errors import JobError
from weft.job.registry import listed
from weft.memory.tensor_tracer_internals import tree_leaves
from weft.parallel.forward_recorder_internals import ForwardRecorder, shapes_of
from weft.parallel.pipeline.torch_containers import FORWARDS
from weft.planner.schedules.stage_split import split_layers

MODES = (True, False)
"""Values of `training` for which the forward is recorded."""


@dataclass(frozen=True)
class StageGraph:
    """A part of a recorded forward: values of earlier stages it takes, inputs of the module it reads, its calls, the
    values it gives to the next stage (None: the module's output), and those it keeps for the next call, by the path of
    the attribute."""

    incoming: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    outgoing: tuple[fx.Node, ...] | None
    output: Any
    kept: Mapping[str, fx.Node] = field(default_factory=dict)

    def graph(self) -> fx.Graph:
        made = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for number, node in enumerate(self.incoming):
            new[node] = made.placeholder(f"hidden_{number}")
        for node in self.inputs:
            new[node] = made.placeholder(str(node.target))
        for node in self.calls:
            new[node] = made.node_copy(node, lambda n: new[n])
        given = self.output if self.outgoing is None else tuple(self.outgoing)
        made.output(fx.node.map_arg((given, tuple(self.kept.values())), lambda n: new[n]))
        return made

    @property
    def attributes(self) -> set[str]:
        """Paths of the modules that are called, and of the parameters and buffers that are read."""
        return {str(node.target) for node in self.calls if node.op in ("call_module", "get_attr")}


@dataclass
class ModuleStage:
    """The forward of one stage, bound to a module that has only this stage's weights."""

    signature: inspect.Signature
    """Of the whole module's forward."""
    inputs: Mapping[bool, tuple[str, ...]]
    """By mode: the inputs of the module that this stage reads."""
    ends: bool
    run: Mapping[bool, MethodType]
    kept: Mapping[bool, tuple[str, ...]]
    """By mode: paths of the attributes that forward assigns."""
    shapes: Mapping[bool, Mapping[str, Any] | None]
    """By mode: the shapes of the module's inputs for which the graph was recorded; None if it is one for all shapes."""
    name: str
    mode: bool | None = None
    """The mode whose graph is run; None: that of the module."""

    def __call__(self, *hidden: Any, **inputs: Any) -> Any:
        output, kept = self.run[self.current](*hidden, **inputs)
        if self.mode is None:  # else the call only finds out what passes between the stages
            module: Any = self.run[True].__self__
            for path, value in zip(self.kept[self.current], kept, strict=True):
                owner, _, key = path.rpartition(".")
                setattr(module.get_submodule(owner), key, value)
        return output

    @property
    def current(self) -> bool:
        module: Any = self.run[True].__self__
        return bool(module.training) if self.mode is None else self.mode

    def call(self, module: nn.Module, hidden: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The outputs of the stage for the values of the stage before it and the arguments of the whole module."""
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        if (expected := self.shapes[self.current]) is not None:
            self._check_shapes(expected, {name: shapes_of(bound.arguments[name]) for name in expected})
        given = {name: bound.arguments[name] for name in self.inputs[self.current]}
        return module(*(hidden or ()), **given)

    def _check_shapes(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        if (name := next((n for n in expected if expected[n] != found[n]), None)) is not None:
            raise JobError(
                f"the forward of {self.name} reads sizes as numbers, so its pipeline stages are those for {name} of "
                f"shape {expected[name]}, and a batch has {found[name]}; give all samples one size, move what reads "
                "the sizes into one of its blocks, or use dp_shard instead of pp"
            )


class ModuleStages:
    """The cut of a module into stages."""

    def __init__(
        self, model: nn.Module, units: Sequence[str], stages: int, pinned: Sequence[tuple[int, int]] = (),
        given: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        """`units` are the paths of the module's blocks, `given` the parameters of forward that samples have (default:
        those without a default) with tensors of their shapes or None, `pinned` the parts of each stage."""
        self.model, self.count = model, stages
        self.name = f"{type(model).__module__}:{type(model).__qualname__}"
        self.signature = inspect.signature(model.forward)
        self.recorders: dict[bool, ForwardRecorder] = {}
        paths = [unit.split(".") for unit in units]
        self.containers = {".".join(path[:n]) for path in paths for n in range(1, len(path))}
        graphs = {training: self._record(given, training) for training in MODES}
        cuts = {training: _parts(model, graph) for training, graph in graphs.items()}
        self.parts = cuts[True].names
        """The module with which each part begins."""
        if cuts[True].names != cuts[False].names:
            raise self._refusal("its forward calls other blocks in training than in evaluation")
        self.units = list(dict.fromkeys(cuts[True].names))
        """Paths of the modules with weights that the forward calls."""
        split = self._split(cuts[True].costs, pinned)
        self.graphs = {t: self._cut(graph, cuts[t].calls, split, self._kept(t, graph)) for t, graph in graphs.items()}
        self._check_shared()

    def _record(self, given: Mapping[str, Any] | None, training: bool) -> fx.Graph:
        parameters = self.signature.parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise self._refusal("its forward has *args or **kwargs", "name the inputs of forward")
        left = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in (given or ())}
        taken = [p.name for p in parameters if p.name not in left]
        shapes = {name: value for name, value in (given or {}).items() if value is not None}
        before = torch.get_rng_state(), random.getstate()
        was = self.model.training
        try:
            self.model.train(training)
            recorder = ForwardRecorder(self._is_block, FORWARDS, shapes)
            graph = recorder.record(self.model, left)
            self._check_changes(recorder, graph, left, shapes)
        except JobError:
            raise
        except Exception as error:
            where = [
                at for at in traceback.extract_tb(error.__traceback__)
                if "/torch/" not in at.filename and at.filename != inspect.getfile(ForwardRecorder)
            ]  # fmt: skip
            at = f" ({where[-1].filename}:{where[-1].lineno})" if len(where) > 1 else ""
            first = str(error).split("\n")[0]
            raise self._refusal(
                f"its forward depends on values that are not known before it runs: {first}{at}",
                "move that into one of its blocks",
            ) from None
        finally:
            self.model.train(was)
        if not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate():
            raise self._refusal(
                "its forward draws random numbers outside of its blocks", "move that into one of its blocks"
            )
        self.recorders[training] = recorder
        _drop_inputs(graph, taken)
        return graph

    def _is_block(self, module: nn.Module, path: str) -> bool:
        return path not in self.containers and type(module) is not nn.Sequential

    def _check_changes(
        self, recorder: ForwardRecorder, graph: fx.Graph, left: dict[str, Any], shapes: Mapping[str, Any]
    ) -> None:
        """Refuse a forward whose later calls depend on attributes in a way that stages do not have."""
        cure = "move that into one of its blocks"
        if recorder.changed:
            raise self._refusal(f"its forward changes {listed(recorder.changed)}", cure)
        read = _attributes_read(graph)
        cached = {path: node for path, node in recorder.assigned.items() if path not in read}
        if not cached or not all(isinstance(recorder.values.get(node), Tensor) for node in cached.values()):
            return
        again = ForwardRecorder(self._is_block, FORWARDS, shapes)
        second = again.record(self.model, left, {path: recorder.values[node] for path, node in cached.items()})
        for path, node in again.assigned.items():
            if path in cached and path in _attributes_read(second) and _depends(node, path):
                raise self._refusal(
                    f"its forward computes {path} from the value of the call before",
                    f"give {path.rpartition('.')[2]} its first value in __init__",
                )

    def _kept(self, training: bool, graph: fx.Graph) -> dict[str, fx.Node]:
        """The values assigned to attributes that a later call reads."""
        read = _attributes_read(graph)
        return {path: node for path, node in self.recorders[training].assigned.items() if path in read}

    def _cut(
        self, graph: fx.Graph, parts: list[list[fx.Node]], split: Sequence[tuple[int, int]], kept: Mapping[str, fx.Node]
    ) -> list[StageGraph]:
        try:
            return _stages(graph, parts, split, kept)
        except LaterStage as error:
            raise self._refusal(
                f"its forward reads {error} in an earlier stage than it assigns it", "choose another parallel.split"
            ) from None

    def _refusal(self, why: str, cure: str = "give it one list of blocks") -> JobError:
        return JobError(f"{self.name} cannot be cut into pipeline stages: {why}; {cure}, or use dp_shard instead of pp")

    def _split(self, costs: Sequence[float], pinned: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        parts, shown = len(costs), ", ".join(self.parts[:6]) + (", …" if len(self.parts) > 6 else "")
        if parts < self.count:
            raise JobError(
                f"{self.name} has {parts} part{'s' if parts != 1 else ''} with weights ({shown or 'none'}), and "
                f"parallel.pp × parallel.virtual_stages makes {self.count} stages; put its blocks into an "
                "nn.Sequential or nn.ModuleList, name them with `units`, or use fewer stages"
            )
        if not pinned:
            return split_layers(costs, self.count)
        sizes = [b - a for a, b in pinned]
        if sum(sizes) != parts or min(sizes) < 1:
            raise JobError(
                f"parallel.split={sizes} has {sum(sizes)} parts, and {self.name} has {parts} with weights: {shown}; "
                "every stage needs one, and all of them together must be these"
            )
        return list(pinned)

    def _check_shared(self) -> None:
        """Find weights that several stages use: two may share one under two names, such as a tied embedding."""
        self.ties: dict[str, tuple[int, int]] = {}
        """By name: the stages that have and copy a weight."""
        self.aliases: dict[str, str] = {}
        owners: dict[int, tuple[str, int]] = {}
        for stage, graph in enumerate(self.graphs[True]):
            for path in sorted(graph.attributes):
                for name, value in _parameters(self.model, path):
                    first, owner = owners.setdefault(id(value), (name, stage))
                    if owner == stage:
                        continue
                    if first == name or first in self.ties:
                        raise self._refusal(
                            f"stages {owner} and {stage} both use {first}",
                            "choose a parallel.split that keeps both uses in one stage",
                        )
                    self.ties[first], self.aliases[name] = (owner, stage), first

    def elements_sent(self) -> float:
        """Elements of the tensors that the first stage sends to the second for the given inputs."""
        values = [self.recorders[True].values.get(node) for node in self.graphs[True][0].outgoing or ()]
        return float(sum(t.numel() for t in tree_leaves(values) if isinstance(t, Tensor)))

    def stage(self, index: int) -> nn.Module:
        """The module with the weights and the forward of one stage. Weights that no stage uses are in the first one;
        names do not change."""
        used = set().union(*(graphs[index].attributes for graphs in self.graphs.values()))
        if index == 0:
            others = set().union(*(g.attributes for graphs in self.graphs.values() for g in graphs))
            used |= _unused(self.model, others)
        model = _with_only(self.model, "", used, {})
        for part in model.modules():
            if getattr(part, "inplace", False) is True:  # what arrives from another stage must not be overwritten
                part.inplace = False  # type: ignore[assignment]
        for recorder in self.recorders.values():
            for name, constant in recorder.constants.items():
                setattr(model, name, constant)
        run = {}
        for training in MODES:
            made = fx.GraphModule(model, self.graphs[training][index].graph())
            run[training] = MethodType(type(made).forward, model)
        ends = index == self.count - 1
        inputs = {t: tuple(str(n.target) for n in self.graphs[t][index].inputs) for t in MODES}
        kept = {t: tuple(self.graphs[t][index].kept) for t in MODES}
        shapes = {
            t: {n: shapes_of(v) for n, v in r.inputs.items()} if r.used_sizes else None
            for t, r in self.recorders.items()
        }
        stage = ModuleStage(self.signature, inputs, ends, run, kept, shapes, self.name)
        model.stage = stage  # type: ignore[assignment]
        model.forward = stage
        model.stage_units = [u for u in self.units if u in used]  # type: ignore[assignment]
        model.aliases = {n: of for n, of in self.aliases.items() if self.ties[of][1] == index}  # type: ignore[assignment]
        for name in model.aliases:  # type: ignore[union-attr]
            owner, _, key = name.rpartition(".")
            weight = model.get_submodule(owner).get_parameter(key)
            copied = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            for part in model.modules():
                for own, value in list(part.named_parameters(recurse=False)):
                    if value is weight:
                        part.register_parameter(own, copied)
        return model


def _drop_inputs(graph: fx.Graph, taken: Sequence[str]) -> None:
    """Remove the inputs that are not given, and fx's checks that they have their defaults."""
    dropped = {node for node in graph.nodes if node.op == "placeholder" and node.target not in taken}
    for node in graph.nodes:
        if dropped.intersection(node.all_input_nodes):
            dropped.add(node)
    for node in reversed(list(graph.nodes)):
        if node in dropped:
            graph.erase_node(node)


@dataclass(frozen=True)
class _Parts:
    calls: list[list[fx.Node]]
    names: list[str]
    costs: list[float]


def _parts(model: nn.Module, graph: fx.Graph) -> _Parts:
    """The calls of a graph in parts, each beginning with a call of a module with weights; the first also has what comes
    before it. A part's cost is the number of its weights."""
    calls: list[list[fx.Node]] = []
    names: list[str] = []
    costs: list[float] = []
    before: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        weights = 0
        if node.op == "call_module":
            weights = sum(p.numel() for p in model.get_submodule(str(node.target)).parameters())
        if weights:
            calls.append([*before, node])
            before = []
            names.append(str(node.target))
            costs.append(float(weights))
        elif calls:
            calls[-1].append(node)
        else:
            before.append(node)
    return _Parts(calls or [before], names, costs)


class LaterStage(ValueError):
    """The path of an attribute that is assigned in a later stage than the one that reads it."""


def _stages(
    graph: fx.Graph, parts: list[list[fx.Node]], split: Sequence[tuple[int, int]], kept: Mapping[str, fx.Node]
) -> list[StageGraph]:
    """The graph of each stage, with the values that pass between them. A kept value is one of the stage that reads the
    attribute."""
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    calls = [[node for part in parts[a:b] for node in part] for a, b in split]
    made_in = {node: stage for stage, nodes in enumerate(calls) for node in nodes}
    last_use = dict.fromkeys(made_in, -1)
    for stage, nodes in enumerate(calls):
        for node in nodes:
            for used in node.all_input_nodes:
                if used in last_use:
                    last_use[used] = stage
    reads = {path: max(made_in[n] for n in made_in if n.op == "get_attr" and n.target == path) for path in kept}
    for path, node in kept.items():
        if made_in.get(node, 0) > reads[path]:
            raise LaterStage(path)
        if node in last_use:
            last_use[node] = max(last_use[node], reads[path])
    given: list[fx.Node] = []
    fx.node.map_arg(output, lambda n: given.append(n))
    last_use |= {n: len(calls) for n in given if n in last_use}
    last = len(calls) - 1  # what only the output uses travels to the last stage
    crossing = [tuple(n for n in made_in if made_in[n] <= stage < last_use[n]) for stage in range(last)]
    made = []
    for stage, nodes in enumerate(calls):
        ends = stage == last
        read: dict[fx.Node, None] = {}
        for node in nodes:
            read |= {n: None for n in node.all_input_nodes if n.op == "placeholder"}
        if ends:
            read |= dict.fromkeys(n for n in given if n.op == "placeholder")
        own = {path: node for path, node in kept.items() if reads[path] == stage}
        read |= dict.fromkeys(n for n in own.values() if n.op == "placeholder")
        incoming = crossing[stage - 1] if stage else ()
        made.append(StageGraph(incoming, tuple(read), tuple(nodes), None if ends else crossing[stage], output, own))
    return made


def _attributes_read(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}


def _depends(node: fx.Node, path: str) -> bool:
    """Whether a value is computed from the attribute at a path."""
    seen, left = {node}, [node]
    while left:
        if (current := left.pop()).op == "get_attr" and current.target == path:
            return True
        left += [n for n in current.all_input_nodes if n not in seen]
        seen.update(current.all_input_nodes)
    return False


def _parameters(model: nn.Module, path: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters at or below a path."""
    owner, _, key = path.rpartition(".")
    found = getattr(model.get_submodule(owner), key, None)
    if isinstance(found, nn.Parameter):
        return [(path, found)]
    if isinstance(found, nn.Module):
        return [(f"{path}.{n}", p) for n, p in found.named_parameters(remove_duplicate=False)]
    return []


def _below(path: str, paths: set[str]) -> bool:
    """Whether a path is one of these, or below one."""
    names = path.split(".")
    return any(".".join(names[:n]) in paths for n in range(1, len(names) + 1))


def _unused(model: nn.Module, used: set[str]) -> set[str]:
    """Paths of parameters and buffers that no stage uses, without other names of those that one does."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    taken = {id(t) for n, t in tensors if _below(n, used)}
    return {n for n, t in tensors if id(t) not in taken}


def _with_only(module: nn.Module, path: str, used: set[str], done: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module without the modules, parameters and buffers that are not used. The used modules are shared
    with it: what they hold, such as functions that call them, stays the same."""
    if id(module) in done:
        return done[id(module)]
    made = done[id(module)] = type(module).__new__(type(module))
    made.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    for key, child in list(module.named_children()):
        at = f"{path}{key}"
        if at in used:
            continue
        if any(name.startswith(f"{at}.") for name in used):
            made.__dict__["_modules"][key] = _with_only(child, f"{at}.", used, done)
        else:
            del made.__dict__["_modules"][key]
    for key, _ in list(module.named_parameters(recurse=False)):
        if f"{path}{key}" not in used:
            made.register_parameter(key, None)
    for key, _ in list(module.named_buffers(recurse=False)):
        if f"{path}{key}" not in used:
            made.register_buffer(key, None)
    return made

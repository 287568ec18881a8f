"""Records the forward of a user module as a torch.fx graph, in which shapes are known.

Beside each recorded value stands the same value on tensors without data. Sizes stay part of the graph, but where Python
needs one as a number or a condition (`assert t <= self.block_size`, `len(x)`, `range(n)`), its value for the given
inputs is taken. A module is as it was after it was recorded.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from weft.memory.tensor_tracer_internals import fake_tensors, quiet_tracing, tree_leaves, tree_map

NUMBER_TYPES = (bool, int, float, str)


class ForwardRecorder(fx.Tracer):
    """Records calls of modules for which `is_block` is true as one call each, and follows those of other modules."""

    proxy_buffer_attributes = True

    def __init__(
        self, is_block: Callable[[nn.Module, str], bool], forwards: Mapping[type[nn.Module], Callable[..., Any]],
        inputs: Mapping[str, Any],
    ):  # fmt: skip
        """`forwards` replaces the forwards of some types of modules, `inputs` has example tensors for the parameters of
        forward, of which only shapes and dtypes are used; without one, its shape is not known."""
        super().__init__(autowrap_functions=_einops_functions())
        self.is_block, self.forwards = is_block, forwards
        self.fake = fake_tensors()
        self.inputs = inputs
        self.values: dict[fx.Node, Any] = {}
        """Values on tensors without data. A node that is missing could not be computed without data."""
        self.used_sizes = False
        """Whether Python has read a size, so that the graph is one for inputs of these shapes."""
        self.assigned: dict[str, fx.Node] = {}
        """Values that forward assigned to attributes of modules, by the attribute's path."""
        self.changed: list[str] = []
        """Paths of attributes without tensors that forward changed."""
        self.constants: dict[str, Tensor] = {}
        """Tensors that are no attribute of a module, by the name under which the graph reads them."""
        self.paused = False

    def record(self, model: nn.Module, defaults: dict[str, Any], state: Mapping[str, Any] | None = None) -> fx.Graph:
        """The graph of a module's forward; `defaults` has the arguments that are not given, `state` the values of
        attributes that an earlier recording assigned."""
        attributes = _Attributes(model, self.fake)
        try:
            self.values_of_inputs = {n: tree_map(attributes.without_data, v) for n, v in self.inputs.items()}
            for path, value in (state or {}).items():
                attributes.set(path, value)
            with quiet_tracing(), _assignable_buffers(), _sizes_as_tuples(), _RecordedCalls(self):
                graph = self.trace(model, concrete_args=defaults)
            self.assigned, self.changed = attributes.changes()
            self.constants = attributes.constants()
        finally:
            attributes.restore()
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.is_block(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.paused else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return forward(*args, **kwargs)
        if (other := self.forwards.get(type(m))) is not None:
            return super().call_module(m, lambda *a, **k: other(m, *a, **k), args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        self._compute(proxy.node)
        return proxy

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        arg = super().create_arg(a)
        if isinstance(arg, fx.Node) and arg not in self.values:
            self._compute(arg)
        return arg

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a call of torch if it takes recorded values or gives tensors; else its result."""
        if self.paused:
            return function(*args, **kwargs)
        if not any(isinstance(x, fx.Proxy) for x in tree_leaves((args, kwargs))):
            with self._without_recording():
                result = function(*args, **kwargs)
            if not any(isinstance(x, Tensor) for x in tree_leaves(result)):
                return result
        if getattr(function, "__name__", "") == "__get__":  # such as x.T
            return self.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})
        if is_tensor_method_or_property(function):
            return self.create_proxy("call_method", function.__name__, tuple(args), dict(kwargs))
        return self.create_proxy("call_function", function, tuple(args), dict(kwargs))

    def number(self, proxy: fx.Proxy, convert: Callable[[Any], Any]) -> Any:
        """The value of a size or of a condition on sizes, as Python needs it."""
        value = self.values.get(proxy.node, proxy)
        if value is proxy or isinstance(value, Tensor):
            raise fx.proxy.TraceError("symbolically traced variables cannot be used as inputs to control flow")
        self.used_sizes = True
        return convert(value)

    def length(self, proxy: fx.Proxy) -> int:
        """The number of items of a recorded value."""
        value = self.values.get(proxy.node)
        if not isinstance(value, Tensor | tuple | list | dict):
            raise fx.proxy.TraceError("the number of its items is not known")
        self.used_sizes = self.used_sizes or not isinstance(value, torch.Size)
        return len(value)

    def to_bool(self, obj: fx.Proxy) -> bool:
        value: bool = self.number(obj, bool)
        return value

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self.values.get(obj.node)
        if isinstance(value, torch.Size):  # as many numbers as the tensor has dims
            return iter([obj[i] for i in range(len(value))])
        if isinstance(value, Tensor | tuple | list):
            self.used_sizes = self.used_sizes or obj.node.target not in ("chunk", torch.chunk)
            return iter([obj[i] for i in range(len(value))])
        return super().iter(obj)

    def _compute(self, node: fx.Node) -> None:
        """Compute the value of a node on tensors without data."""
        if node.op == "placeholder":
            if node.target in self.values_of_inputs:
                self.values[node] = self.values_of_inputs[node.target]
            return
        if node.op == "output" or any(n not in self.values for n in node.all_input_nodes):
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        try:
            with self._without_recording():
                self.values[node] = self._run(node, args, kwargs)
        except Exception:  # what needs the values of tensors is recorded, and not known
            return

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            return getattr(self.root.get_submodule(owner), name)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    @contextmanager
    def _without_recording(self) -> Iterator[None]:
        was, self.paused = self.paused, True
        state = torch.get_rng_state(), random.getstate()
        try:
            with self.fake:
                yield
        finally:
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            self.paused = was


def inputs_of_modules(
    model: nn.Module, given: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, Any]]:
    """The arguments, by name and without data, with which a forward of the model calls some of its modules first."""
    recorder = ForwardRecorder(lambda *_: True, {}, given)
    attributes = _Attributes(model, recorder.fake)
    inputs: dict[str, dict[str, Any]] = {}
    handles = []

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        inputs.setdefault(path, dict(bound))

    try:
        for path, module in modules.items():
            hook = partial(note, path)
            handles.append(module.register_forward_pre_hook(lambda m, a, k, hook=hook: hook(m, a, k), with_kwargs=True))
        arguments = {name: tree_map(attributes.without_data, value) for name, value in given.items()}
        with quiet_tracing(), recorder._without_recording():
            model(**arguments)
    except Exception:  # modules that it called before the failure are known
        pass
    finally:
        for handle in handles:
            handle.remove()
        attributes.restore()
    return inputs


def shapes_of(value: Any) -> Any:
    """The shapes of the tensors in a value, in its nesting."""
    return tree_map(lambda x: list(x.shape) if isinstance(x, Tensor) else None, value)


class _Value(fx.Proxy):
    """A recorded value whose sizes Python may read."""

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return _ValueAttribute(self, k)

    def __len__(self) -> int:
        return self._recorder.length(self)

    def __index__(self) -> int:
        return self._recorder.number(self, int)

    __int__ = __index__

    def __float__(self) -> float:
        return self._recorder.number(self, float)

    @property
    def _recorder(self) -> Any:
        return self.tracer


class _ValueAttribute(fx.proxy.Attribute, _Value):
    pass


class _RecordedCalls(TorchFunctionMode):
    """Passes torch's functions to the recorder, also those without recorded values, such as torch.zeros(n, n)."""

    def __init__(self, recorder: ForwardRecorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.call(func, args, kwargs or {})


class _Attributes:
    """The attributes of a model's modules: tensors without data while it is recorded, and then as they were."""

    def __init__(self, model: nn.Module, fake: Any):
        self.model, self.fake = model, fake
        self.modules = dict(model.named_modules())
        self.before = {name: _saved(module.__dict__) for name, module in self.modules.items()}
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        # tensors that a forward makes without a device are on the CPU, and meta tensors do not mix with them
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.made: dict[int, Tensor] = {}
        self.originals: list[Tensor] = []
        for module in self.modules.values():
            for values in (module._parameters, module._buffers, module.__dict__):
                for key, value in list(values.items()):
                    if isinstance(value, Tensor):
                        values[key] = self.without_data(value)
        self.start = {name: module.__dict__ | module._buffers for name, module in self.modules.items()}

    def without_data(self, value: Any) -> Any:
        """A tensor like this one without data, on the device of the model; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.made:
            self.originals.append(value)
            with self.fake:
                new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
                if isinstance(value, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=value.requires_grad)
                elif value.requires_grad:
                    new.requires_grad_()
            self.made[id(value)] = new
        return self.made[id(value)]

    def set(self, path: str, value: Any) -> None:
        """Give an attribute a value before the module is recorded."""
        owner, _, key = path.rpartition(".")
        module = self.modules[owner]
        (module._buffers if key in module._buffers else module.__dict__)[key] = value

    def changes(self) -> tuple[dict[str, fx.Node], list[str]]:
        """The recorded values that were assigned to attributes, by path, and the paths of numbers that changed."""
        assigned: dict[str, fx.Node] = {}
        changed: list[str] = []
        for name, module in self.modules.items():
            prefix = f"{name}." if name else ""
            for key, value in (module.__dict__ | module._buffers).items():
                if isinstance(value, fx.Proxy):
                    assigned[prefix + key] = value.node
                elif isinstance(value, NUMBER_TYPES) and value != self.start[name].get(key):
                    changed.append(prefix + key)
        return assigned, changed

    def constants(self) -> dict[str, Tensor]:
        """Tensors that torch.fx made attributes of the model, because the graph reads them."""
        new = self.model.__dict__.keys() - self.start[""].keys()
        return {
            n: t for n in new if n.startswith("_tensor_constant") and isinstance(t := self.model.__dict__[n], Tensor)
        }

    def restore(self) -> None:
        """Give every module the attributes that it had, and every list, dict and set its members."""
        for name, module in self.modules.items():
            module.__dict__.clear()
            for key, value, members in self.before[name]:
                if members is not None:
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(members)
                module.__dict__[key] = value


def _saved(values: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Attributes with a copy of the members of lists, dicts and sets."""
    return [(k, v, v.copy() if isinstance(v, dict | list | set) else None) for k, v in values.items()]


@contextmanager
def _assignable_buffers() -> Iterator[None]:
    """Let a forward assign recorded values to buffers."""
    original = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and name in module.__dict__.get("_buffers", {}):
            module._buffers[name] = value
        else:
            original(module, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


@contextmanager
def _sizes_as_tuples() -> Iterator[None]:
    """Give torch.zeros(n, n) its sizes as one tuple: torch refuses separate ones that are recorded values."""
    originals = {name: getattr(torch, name) for name in ("zeros", "ones", "empty", "rand", "randn")}

    def with_tuple(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*sizes: Any, **options: Any) -> Any:
            recorded = len(sizes) > 1 and any(isinstance(size, fx.Proxy) for size in sizes)
            return original(sizes, **options) if recorded else original(*sizes, **options)

        return make

    for name, original in originals.items():
        setattr(torch, name, with_tuple(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _einops_functions() -> tuple[Callable[..., Any], ...]:
    """Functions that would look at the type of a tensor, and are recorded as calls."""
    einops = sys.modules.get("einops")
    names = ("rearrange", "repeat", "reduce", "einsum", "pack", "unpack")
    return tuple(getattr(einops, name) for name in names if hasattr(einops, name))

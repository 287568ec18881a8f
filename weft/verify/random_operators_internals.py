"""Names the random operators of a user module and replaces their results by means, so that a proof compares the rest.

Each rank has its own random state, so the numbers depend on the layout. With means, a dropout passes everything on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = Mapping[str, Any]

MEANS: dict[str, Callable[[Arguments], Any]] = {
    "bernoulli": lambda a: a["p"] if a.get("p") is not None else a["self"],
    "bernoulli_": lambda a: a["p"],
    "rand": lambda a: 0.5,
    "rand_like": lambda a: 0.5,
    "uniform": lambda a: (a["from"] + a["to"]) / 2,
    "uniform_": lambda a: (a["from"] + a["to"]) / 2,
    "randn": lambda a: 0.0,
    "randn_like": lambda a: 0.0,
    "normal": lambda a: a["mean"],
    "normal_": lambda a: a["mean"],
    "exponential_": lambda a: 1 / a["lambd"],
    "randint": lambda a: (a.get("low", 0) + a["high"] - 1) // 2,
    "randint_like": lambda a: (a.get("low", 0) + a["high"] - 1) // 2,
}
"""By operator, the mean of its result, as a number or as a tensor of its shape."""
DROPOUT_ARGUMENT = "dropout_p"
"""Of attention kernels; 0 is the mean."""


class MeanDraws(TorchDispatchMode):
    """Replaces random numbers by their means, and collects the names of the operators with those of their modules."""

    def __init__(self, module: nn.Module | None = None):
        super().__init__()
        self.operators: dict[str, None] = {}
        """Operators whose results are replaced, in the order of their first calls."""
        self.kept: dict[str, None] = {}
        """Operators without an entry in MEANS."""
        self.path: list[str] = []
        self.module = module
        self.hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name, part in () if self.module is None else self.module.named_modules():
            where = f"{name} ({type(part).__name__})" if name else type(part).__name__
            self.hooks.append(part.register_forward_pre_hook(partial(self._enter_module, where)))
            self.hooks.append(part.register_forward_hook(self._leave_module, always_call=True))
        super().__enter__()
        return self

    def _enter_module(self, where: str, *_: object) -> None:
        self.path.append(where)

    def _leave_module(self, *_: object) -> None:
        self.path.pop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.hooks:
            self.hooks.pop().remove()
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again as operations on local tensors
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "native_dropout_backward":
            return args[0].clone()
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = arguments_of(func, args, kwargs)
        if name == "native_dropout":
            if given["train"] and given["p"]:
                self._note(self.operators, name)
            return given["input"].clone(), torch.ones_like(given["input"], dtype=torch.bool)
        if DROPOUT_ARGUMENT in given:
            if given[DROPOUT_ARGUMENT]:
                self._note(self.operators, name)
            return func(**{**given, DROPOUT_ARGUMENT: 0.0})
        if name not in MEANS:
            self._note(self.kept, name)
            return func(*args, **kwargs)
        self._note(self.operators, name)
        mean = MEANS[name](given)
        mean = mean.clone() if isinstance(mean, Tensor) else mean
        out = func(*args, **kwargs)
        return out.copy_(mean) if isinstance(mean, Tensor) else out.fill_(mean)

    def _note(self, names: dict[str, None], name: str) -> None:
        names[f"{name} in {self.path[-1]}" if self.path else name] = None


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, with its defaults."""
    schema = func._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)


class RandomStates:
    """Compares the states of the global generators before and after a part of a program."""

    def __init__(self, device: torch.device):
        self.device = device
        self.changed: dict[str, None] = {}
        """Generators from which numbers were drawn."""

    def _states(self) -> dict[str, Any]:
        numpy: Any = np.random.get_state()
        out = {
            "torch": torch.get_rng_state().tolist(),
            "random": random.getstate(),
            "numpy.random": (*map(str, numpy),),
        }
        if self.device.type == "cuda":
            out["torch.cuda"] = torch.cuda.get_rng_state(self.device).tolist()
        return out

    def __enter__(self) -> Self:
        self.before = self._states()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._states()
        self.changed |= dict.fromkeys(name for name, state in self.before.items() if after[name] != state)

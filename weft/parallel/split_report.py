"""What tp splits of a user module, what stays whole, and how much passes between the ranks of tp."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import Tensor, nn

from weft.parallel.forward_recorder_internals import inputs_of_modules

SPLIT_ROLES = ("column", "row", "vocab", "vocab_head", "fused")
MAX_SHOWN = 6


@dataclass(frozen=True)
class TensorParallelFacts:
    """Of one microbatch."""

    reduced: float = 0.0
    """Elements of activations and their gradients that are summed over tp."""
    gathered: float = 0.0
    """Elements of weights that are gathered over tp, and of their gradients that are scattered."""


def tensor_parallel_facts(model: nn.Module, given: Mapping[str, Any]) -> TensorParallelFacts:
    """What the layers that tp splits exchange. `given` are the arguments of the model's forward."""
    split = _split_layers(model)
    reduced = gathered = 0.0
    for path, inputs in inputs_of_modules(model, given, {p: m for p, (m, _) in split.items()}).items():
        module, role = split[path]
        x = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
        if x is None or not isinstance(module, nn.Linear):
            continue
        reduced += x.numel() if role != "row" else prod(x.shape[:-1]) * module.out_features
        gathered += sum(p.numel() for p in module.parameters()) if role == "fused" else 0
    return TensorParallelFacts(reduced, gathered)


def describe_split(model: nn.Module, ranks: int) -> str:
    """One sentence: the layers that tp splits, their share of the weights, and attention that stays whole."""
    split = _split_layers(model)
    cut = {id(p): p.numel() for module, _ in split.values() for p in module.parameters()}
    whole = sum(p.numel() for p in model.parameters())
    names = _patterns(split)
    kept = _patterns_with_reasons(getattr(model, "whole_parts", {}))
    text = f"tp={ranks} splits {_shown(names)}: {100 * sum(cut.values()) / max(1, whole):.0f} % of the weights"
    return f"{text}; whole on every rank: {_shown([*kept, 'all other modules'] if kept else ['all other modules'])}"


def _split_layers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    table: dict[str, str] = getattr(model, "parts", None) or {}
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        role = next((role for pattern, role in table.items() if fnmatchcase(name, pattern)), None)
        if role in SPLIT_ROLES:
            found[name] = module, str(role)
    return found


def _patterns(names: Mapping[str, Any]) -> list[str]:
    """Names with * for numbers, each once."""
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))


def _patterns_with_reasons(reasons: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(f"{_patterns({name: why})[0]} ({why})" for name, why in reasons.items()))


def _shown(names: list[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (", …" if len(names) > MAX_SHOWN else "")

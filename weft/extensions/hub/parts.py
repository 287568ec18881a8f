"""The table of parts of a model of transformers, from the tp plan of its config (weft/parallel/tensor.py)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

ROLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "heads", "mla_kv_a_proj": "latent"}
"""Styles of transformers, and the part of each."""
WHOLE = (
    "colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise", "moe_tp_experts",
    "replicate", "moe_identity_expert", "all_reduce",
)  # fmt: skip
"""Styles whose inputs and outputs are whole: the module is too, on every rank."""


def tensor_parts(model: Any) -> tuple[dict[str, str], str | None]:
    """The role of each module under tensor parallelism by pattern, and why there is none."""
    base = model.text_model
    plan = dict(getattr(base.config, "base_model_tp_plan", None) or {})
    if not plan:
        return {}, f"the config of {type(base).__name__} has no tp plan"
    prefix = next((n for n, m in model.named_modules() if m is base), "")
    prefix = f"{prefix}." if prefix else ""
    modules = dict(model.named_modules())
    parts: dict[str, str] = {}
    for pattern, style in plan.items():
        exact = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+") + "$")
        names = [n for n in modules if exact.match(n)]
        if not names or style in WHOLE:
            continue  # tables name modules that only some configs have, and the weights of experts, which stay whole
        role = ROLES.get(style)
        if role is None:
            return {}, f"the tp plan of {type(base).__name__} has {pattern}: {style}, which Weft does not know"
        if role in ("column", "row") and (other := next((n for n in names if type(modules[n]) is not nn.Linear), None)):
            return {}, f"the tp plan of {type(base).__name__} splits {other}, a {type(modules[other]).__name__}"
        for name in names if role == "latent" else ():
            modules[name].direct_outputs = base.config.qk_rope_head_dim
        if any(fnmatchcase(n, prefix + pattern) and n not in names for n in modules):
            parts |= dict.fromkeys(names, role)
        else:
            parts[prefix + pattern] = role
    learned = [n for n, m in modules.items() if n.endswith("act_fn") and any(True for _ in m.parameters())]
    parts |= {n: "heads" for n in learned}  # an activation of a rank's columns, whose weights every rank has
    return (parts, None) if "column" in parts.values() else ({}, f"the tp plan of {type(base).__name__} splits nothing")

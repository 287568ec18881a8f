"""Facts of a type of transformers, from the class that was built."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from torch import nn

from weft.extensions.hub.model import build_hub_model, uses_interface
from weft.extensions.hub.type_facts import TypeFacts
from weft.job.schema import Model

STATES = re.compile("Mamba|Recurrent|Rwkv|xLSTM|DeltaNet|LinearAttention|LightningAttention|ShortConv|KDA|RgLru")
"""What the names of modules with a state along the sequence contain."""


def find_facts(args: str) -> TypeFacts:
    """The facts of a config, given as JSON."""
    module: Any = build_hub_model(Model.model_validate({"family": "transformers", "args": json.loads(args)}))
    kind, base = module.config.model_type, type(module).__mro__[2]
    no_interface = None if uses_interface(base) else f"{kind} computes attention or its masks with code of its own"
    no_positions = None if module.takes_positions else f"{kind} numbers positions itself"
    states = sorted({type(m).__name__ for m in module.modules() if _has_state(m)})
    no_state = f"{kind} has layers that carry a state along the sequence ({', '.join(states)})" if states else None
    plan = getattr(module.text_model.config, "base_model_pp_plan", None)
    no_pp = None if plan else f"the config of {kind} has no pp plan"
    if plan and "layers" not in plan:
        no_pp = f"the pp plan of {kind} names no layers"
    if not no_pp and getattr(module.text_model.config, "hidden_size_per_layer_input", None):
        no_pp = f"{kind} gives an embedding of the tokens to every block"
    forward = inspect.getsource(inspect.unwrap(type(module.text_model).forward))
    if not no_pp and re.search(r"hidden_states, \w+ = \w*layer", forward):
        no_pp = f"blocks of {kind} pass on more than one tensor"
    ties = {n: of for n, of in module.aliases.items() if n.startswith(module.blocks_path or " ")}
    if ties and not no_pp:
        no_pp = f"blocks of {kind} share {next(iter(ties))}"
    return TypeFacts(
        kind,
        module.whole_reason,
        no_pp,
        no_interface or no_positions or no_state,
        no_interface or no_positions or no_state,
    )


def _has_state(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) or bool(
        STATES.search(type(module).__name__) and any(True for _ in module.parameters(False))
    )

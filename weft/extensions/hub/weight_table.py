"""Every weight of a model of transformers by name and shape, for the planner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from weft.job.schema import Model
from weft.planner.model.weight_table import Weight

CUTS = {"column": 0, "row": 1}


def table_weights(model: Model, sequence: bool, first: int, end: int, begins: bool, ends: bool) -> Iterator[Weight]:
    """The weights of blocks first … end - 1, of what is before them if `begins` and of what is after them if `ends`."""
    for weight, block, after in _table(json.dumps(model.args, sort_keys=True)):
        inside = first <= block < end if block is not None else ends if after else begins
        if inside:
            yield weight


@cache
def _table(args: str) -> list[tuple[Weight, int | None, bool]]:
    """Each weight with the number of its block, or whether it is after the blocks."""
    from weft.extensions.hub.model import build_hub_model

    module: Any = build_hub_model(Model.model_validate({"family": "transformers", "args": json.loads(args)}))
    prefix, parts = f"{module.blocks_path}.", module.parts
    after = module._around()[1] if module.blocks_path else ()
    rows = []
    for name, param in module.named_parameters():
        in_block = name.startswith(prefix)
        number = name.removeprefix(prefix).partition(".")[0] if in_block else ""
        owner, _, leaf = name.rpartition(".")
        role = next((role for pattern, role in parts.items() if fnmatchcase(owner, pattern)), None)
        cut = CUTS.get(role or "")
        cut = None if cut == 1 and leaf == "bias" else cut
        weight = Weight(
            name,
            tuple(param.shape),
            prefix + number if in_block else "",
            cut,
            role == "heads",
        )
        rows.append((weight, int(number) if in_block else None, any(name.startswith(f"{a}.") for a in after)))
    return rows

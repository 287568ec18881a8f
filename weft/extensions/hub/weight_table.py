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
    for weight, block, after, tied in _table(json.dumps(model.args, sort_keys=True)):
        inside = first <= block < end if block is not None else ends if after else begins
        if inside and not (tied and begins):  # a stage without the embedding has a copy of it
            yield weight


@cache
def _table(args: str) -> list[tuple[Weight, int | None, bool, bool]]:
    """Each weight with the number of its block, whether it is after the blocks, and whether it is the tied head. The
    weights of embedding and head have the names by which the planner knows them."""
    from weft.extensions.hub.model import build_hub_model

    module: Any = build_hub_model(Model.model_validate({"family": "transformers", "args": json.loads(args)}))
    prefix, parts = f"{module.blocks_path}.", module.parts
    after = module._around()[1] if module.blocks_path else ()
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    known = {id(m.weight): n for m, n in ((head, "head.weight"), (embedding, "embed.weight")) if hasattr(m, "weight")}
    rows: list[tuple[Weight, int | None, bool, bool]] = []
    for name, param in module.named_parameters():
        in_block = name.startswith(prefix)
        number = name.removeprefix(prefix).partition(".")[0] if in_block else ""
        owner, _, leaf = name.rpartition(".")
        role = next((role for pattern, role in parts.items() if fnmatchcase(owner, pattern)), None)
        cut = None if leaf == "bias" and role == "row" else CUTS.get(role or "")
        unit = prefix + number if in_block else ""
        weight = Weight(known.get(id(param), name), tuple(param.shape), unit, cut, role == "heads")
        ends = any(name.startswith(f"{path}.") for path in after)
        rows.append((weight, int(number) if in_block else None, ends, False))
    if f"{module.head_path}.weight" in module.aliases:
        rows.append((Weight("head.weight", tuple(head.weight.shape), ""), None, True, True))
    return rows

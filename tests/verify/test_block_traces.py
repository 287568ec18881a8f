"""The planner's tables of blocks are what a trace of the engine's blocks gives."""

from __future__ import annotations

import json

import pytest

from weft.planner.memory.block_tables import TABLES, BlockVariant, file_name
from weft.verify.block_traces import PRIMES, clean, dump, factors, structures, trace_blocks, variants

KNOWN = {key: structure for key, structure in structures().items() if (TABLES / file_name(key)).exists()}


def test_bytes_factor_into_the_sizes_of_a_tensor() -> None:
    assert factors(4 * 11 * 17 * 4999) == ("b s D", 4)


def test_a_tensor_for_each_expert_counts_as_one_of_all_experts() -> None:
    of_each, two_more = 4.0 * PRIMES["e"], 4.0 * PRIMES["e"] + 8.0
    assert clean({"b s k f": of_each, "b s D": 46.0}) == {"b s e k f": 4.0, "b s D": 46.0}
    assert clean({"b s p k D": two_more, "b s p e k D": 2.0}) == {"b s p e k D": 6.0, "b s p k D": 8.0}


@pytest.mark.parametrize("number", range(len(KNOWN)))
def test_a_trace_gives_the_written_table(number: int) -> None:
    key, structure = list(KNOWN.items())[number]
    tables = json.loads((TABLES / file_name(key)).read_text(encoding="utf-8"))["variants"]
    written = [v for v in variants(structure) if v.key in tables]
    v = written[5 * number % len(written)]
    table = json.loads(json.dumps(trace_blocks(structure.model, v)))
    assert table == tables[v.key], f"{v.key}: python -m weft.verify.block_traces"


def test_every_table_is_that_of_a_known_structure() -> None:
    """A new field of a model that says nothing about its blocks belongs into SIZES: else no table is found."""
    names = {file_name(key) for key in structures()}
    unknown = [path.name for path in TABLES.glob("*.json") if path.name not in names]
    assert not unknown, f"no model has the blocks of {unknown}: is a new field of Model missing in block_tables.SIZES?"


def test_tables_are_written_by_the_script_alone() -> None:
    for path in TABLES.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        structure = json.dumps(found["structure"], sort_keys=True)
        assert path.name == file_name(structure) and text == dump(structure, found["variants"])


def test_a_block_without_a_table_is_traced_when_it_is_planned() -> None:
    structure, (model, _, _) = next(iter(KNOWN.items()))
    coded = BlockVariant(half=True, coded=True)
    assert coded.key not in json.loads((TABLES / file_name(structure)).read_text(encoding="utf-8"))["variants"]
    table = trace_blocks(model, coded)["block"]
    assert table["full"]["kept"].keys() == {"b s D"} and 1 < table["full"]["kept"]["b s D"] < 1.1

"""Ranks exchange JSON and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.comm_axis import everyone

import weft
from weft.comm.agreement import INLINE_BYTES, Agreement, all_gather_json
from weft.launch.rank_pool import RankPool

VALUES: list[Any] = [None, True, -7, 0.1, "ü\0\n", [], {}, ["a", [1, {"b": None}]], float("inf"), "x" * INLINE_BYTES]


def exchange() -> tuple[list[Any], Any, str]:
    axis = everyone()
    ranks = Agreement(axis.group)
    gathered = [ranks.gather(value) for value in VALUES]
    uneven = ranks.gather("y" * (10_000 * axis.rank))
    assert [len(text) for text in uneven] == [10_000 * r for r in range(axis.size)]
    first = ranks.first(lambda: {"from": axis.rank}, RuntimeError)

    def fails() -> Any:
        raise OSError("no disk")

    with pytest.raises(RuntimeError) as refused:
        ranks.first(fails, RuntimeError)
    return gathered, first, str(refused.value)


def test_values_of_all_ranks_on_every_rank(pool: RankPool) -> None:
    for gathered, first, refused in pool.run(exchange, 3):
        assert gathered == [[value] * 3 for value in VALUES]
        assert first == {"from": 0} and refused == "OSError: no disk"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: "a"}, "ranks exchange JSON, whose keys are text, not 1"),
        ([b"bytes"], "ranks exchange JSON, which has no bytes"),
        ({"path": Path("x")}, "ranks exchange JSON, which has no PosixPath"),
    ],
)
def test_other_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError) as refused:
        all_gather_json(value, None)
    assert str(refused.value) == message


def test_no_object_collectives_in_weft() -> None:
    """They unpickle what arrives: whoever can reach a rank's socket could run code in it."""
    found = []
    for file in sorted(Path(weft.__file__).parent.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "_object" in text else ():
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if file.parent.name == "hvd" and isinstance(node, ast.Name):
                continue  # Horovod's functions of these names, over JSON
            if re.fullmatch(r"(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?", name):
                found.append(f"{file.name}:{node.lineno} {name}")  # type: ignore[attr-defined]
    assert not found

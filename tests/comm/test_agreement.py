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
    forbidden = re.compile(r"(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?")
    for file in sorted(Path(weft.__file__).parent.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "_object" in text else ():
            names: list[str] = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("dist", "distributed"):
                names = [node.attr]  # other objects have methods of these names, over JSON
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                names = [alias.name for alias in node.names]
            found += [f"{file.name}: {name}" for name in names if forbidden.fullmatch(name)]
    assert not found

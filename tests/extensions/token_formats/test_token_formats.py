"""Tokens of other libraries, converted to token stores and back."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command import Output

from weft.data.build_store import build
from weft.data.store import open_store
from weft.extensions.token_formats.conversions import convert
from weft.job import JobError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for i, text in enumerate(("first", "", "third one")):
        (tmp_path / f"{i}.txt").write_text(text)
    build([tmp_path / f"{i}.txt" for i in range(3)], tmp_path / "store")
    return tmp_path / "store"


def same(a: Path, b: Path) -> bool:
    one, other = open_store(a), open_store(b)
    return np.array_equal(one.tokens[:], other.tokens[:]) and np.array_equal(one.docs[:], other.docs[:])


def test_megatron(store: Path, tmp_path: Path) -> None:
    assert convert(store, tmp_path / "meg", "megatron") == (17, 3, "store")
    index = (tmp_path / "meg.idx").read_bytes()
    assert index[:34] == b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    assert np.frombuffer(index, "<i4", 3, 34).tolist() == [6, 1, 10]
    assert np.frombuffer(index, "<i8", 3, 46).tolist() == [0, 12, 14]
    assert np.frombuffer((tmp_path / "meg.bin").read_bytes(), "<u2").tolist() == list(b"first\0\0third one\0")
    assert convert(tmp_path / "meg", tmp_path / "again", "store", "bytes") == (17, 3, "megatron")
    assert same(store, tmp_path / "again")
    # two sequences of one document
    (tmp_path / "meg.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 3) + np.array([6, 1, 10], "<i4").tobytes()
        + np.array([0, 12, 14], "<i8").tobytes() + np.array([0, 2, 3], "<i8").tobytes()
    )  # fmt: skip
    convert(tmp_path / "meg.bin", tmp_path / "two", "store", "bytes")
    assert open_store(tmp_path / "two").docs[:].tolist() == [0, 7, 17]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"MMIDIDX", "does not begin with"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**60, 2**60), "it is damaged"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 7, 0, 0), "the dtype 7"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 99, 0, 0, 1), "does not describe"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, -1, 0, 0, 1), "does not describe"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 1, 0, 0, 9), "do not span"),
    ],
)
def test_damaged_indexes_are_refused(index: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0")
    with pytest.raises(JobError, match=message):
        convert(tmp_path / "a", tmp_path / "out", "store", "bytes")


def test_nanogpt(store: Path, tmp_path: Path) -> None:
    assert convert(store, tmp_path / "train.bin", "nanogpt")[0] == 17
    assert np.fromfile(tmp_path / "train.bin", "<u2").tolist() == list(b"first\0\0third one\0")
    assert convert(tmp_path / "train.bin", tmp_path / "again", "store", "bytes") == (17, 3, "nanogpt")
    assert same(store, tmp_path / "again")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 17
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + (tmp_path / "train.bin").read_bytes())
    convert(tmp_path / "llmc.bin", tmp_path / "third", "store", "bytes")
    assert same(store, tmp_path / "third")


def test_the_command(store: Path, tmp_path: Path, in_process: Callable[..., Output]) -> None:
    def run(*args: Any) -> Output:
        return in_process(tmp_path, "data", "convert", *map(str, args))

    assert run(store, "--out", "a", "--to", "megatron").code == 0
    assert json.loads(run("a.bin", "--out", "b", "--tokenizer", "bytes", "--json").out) == {
        "path": "b", "tokens": 17, "documents": 3, "from": "megatron", "to": "store"
    }  # fmt: skip
    for args, message in (
        ((store, "--out", "a", "--to", "megatron"), "a.idx exists already"),
        ((store, "--out", "c", "--to", "store"), "is in the format store already"),
        ((store, "--out", "c", "--to", "gguf"), "use store, megatron, nanogpt"),
        (("a", "--out", "c"), "needs the tokenizer"),
        (("none", "--out", "c"), "is no token store"),
    ):
        done = run(*args)
        assert done.code == 2 and message in done.err, (args, done.err)

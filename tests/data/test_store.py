"""Token stores: damage is recognised and reported."""

import json
import os
import shutil

import numpy as np
import pytest

from weft.data.build_store import build
from weft.data.store import open_store, token_dtype
from weft.job import JobError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    lines = [{"text": f"document {i}: " + "tea and cake " * i} for i in range(20)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    build(folder / "a.jsonl", folder / "store", "bpe:300", workers=1)
    return folder / "store"


@pytest.fixture
def store(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "store")


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def change_meta(store, **fields):
    meta = json.loads((store / "meta.json").read_text())
    (store / "meta.json").write_text(json.dumps(meta | fields))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_complete_store_opens(store):
    opened = open_store(store)
    assert opened.meta.documents == 20
    assert opened.tokens.dtype == token_dtype(opened.meta.vocab) == np.uint16
    tokenizer = opened.tokenizer()
    for d in range(20):
        document = opened.tokens[opened.docs[d] : opened.docs[d + 1]]
        assert tokenizer.decode(document[:-1]) == f"document {d}: " + "tea and cake " * d
        assert document[-1] == tokenizer.eos == opened.meta.eos


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda s: cut_short(s / "tokens.bin"), "tokens.bin has .* bytes and should have"),
        (lambda s: (s / "tokens.bin").unlink(), "tokens.bin is missing"),
        (lambda s: flip(s / "tokens.bin"), "tokens.bin does not have the checksum"),
        (lambda s: flip(s / "docs.bin"), "docs.bin does not have the checksum"),
        (lambda s: (s / "docs.bin").write_bytes(b""), "docs.bin has 0 bytes"),
        (lambda s: flip(s / "tokenizer.json"), "tokenizer.json does not have the checksum"),
        (lambda s: (s / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda s: make_pipe(s / "tokenizer.json"), "tokenizer.json is not a regular file"),
        (lambda s: (s / "meta.json").write_bytes((s / "meta.json").read_bytes()[:99]), "meta.json is not JSON"),
        (lambda s: (s / "meta.json").write_text("{"), "meta.json is not JSON"),
        (lambda s: (s / "meta.json").write_bytes(b"\xff\xfe"), "meta.json is not JSON"),
        (lambda s: change_meta(s, tokens="many"), "meta.json lacks a field or has one of the wrong kind"),
        (lambda s: change_meta(s, crc32={}), "meta.json lacks a field or has one of the wrong kind"),
        (lambda s: change_meta(s, tokens=0), "meta.json lacks a field or has one of the wrong kind"),
        (lambda s: change_meta(s, extra=1), "meta.json lacks a field or has one of the wrong kind"),
    ],
)
def test_damage_is_reported(store, harm, message):
    harm(store)
    with pytest.raises(JobError, match=message) as caught:
        open_store(store)
    assert "delete the folder and run `weft data build` again" in str(caught.value)


def test_another_format_is_reported(store):
    change_meta(store, format="weft-tokens-9")
    with pytest.raises(JobError, match="has the format 'weft-tokens-9' and this Weft reads 'weft-tokens-1'"):
        open_store(store)


def test_checksum_option(store):
    flip(store / "tokens.bin")
    open_store(store, check=False)
    with pytest.raises(JobError, match="checksum"):
        open_store(store, check=True)


def test_missing_and_unfinished_stores_are_reported(store, tmp_path):
    with pytest.raises(JobError, match=r"no token store is at .*nowhere; make one with: weft data build"):
        open_store(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(JobError, match=r"is not a token store: it has no meta\.json"):
        open_store(tmp_path / "folder")
    (store / "meta.json").unlink()
    (store / ".parts").mkdir()
    with pytest.raises(JobError, match="is not finished; run the same `weft data build` again"):
        open_store(store)


def test_token_types():
    assert [token_dtype(v).itemsize for v in (256, 257, 65536, 65537)] == [1, 2, 2, 4]

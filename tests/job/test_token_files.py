"""Damaged token stores and tokenizer files give one sentence, wherever they are read first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command import weft
from tokenizers import Tokenizer, models, trainers

from weft.data.build_store import build
from weft.data.open_dataset import open_dataset
from weft.data.tokenizer import bpe_size, load_tokenizer
from weft.job import JobError, parse_job
from weft.job.data_files.token_files import tokenizer_vocab
from weft.job.shapes import data_vocab, resolve


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("tea and cake " * 50)
    build(tmp_path / "a.txt", tmp_path / "store", workers=1)
    return tmp_path / "store"


def meta_without(store: Path, key: str) -> str:
    meta = json.loads((store / "meta.json").read_text())
    del meta[key]
    return json.dumps(meta)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "meta.json is not JSON"),
        ("", "meta.json is not JSON"),
        (b"\xff\xfe\x00", "meta.json is not JSON: it is not UTF-8 text"),
        ("[1, 2]", "has the format None and this Weft reads"),
        ("3", "has the format None and this Weft reads"),
        ("null", "has the format None and this Weft reads"),
        ("[" * 100_000, "meta.json is not JSON: it is nested too deeply"),
        ("vocab", "lacks a field or has one of the wrong kind"),
        ("tokens", "lacks a field or has one of the wrong kind"),
        ("crc32", "lacks a field or has one of the wrong kind"),
    ],
)
def test_damaged_metadata(store: Path, text: str | bytes, message: str) -> None:
    if text in ("vocab", "tokens", "crc32"):
        text = meta_without(store, text)
    (store / "meta.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    job = parse_job({"model": "tiny", "data": {"source": str(store)}})
    for read in (lambda: data_vocab(job.data), lambda: resolve(job), lambda: open_dataset(job)):
        with pytest.raises(JobError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, -1, 0, 2**70, 1.5, "256", None, [256]], ids=str)
def test_metadata_with_a_wrong_vocab(store: Path, value: Any) -> None:
    meta = json.loads((store / "meta.json").read_text())
    (store / "meta.json").write_text(json.dumps(meta | {"vocab": value}))
    with pytest.raises(JobError, match="lacks a field or has one of the wrong kind"):
        resolve(parse_job({"model": "tiny", "data": {"source": str(store)}}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"{}", "has no model with a vocab"),
        (b"[]", "has no model with a vocab"),
        (b"\x00\xff\x01binary", "is not JSON: it is not UTF-8 text"),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "its vocab is not a table of tokens"),
        (b'{"model": {"type": "BPE", "vocab": {"a": "b"}}}', "its vocab is not a table of tokens"),
        (b'{"model": {"type": "BPE", "vocab": 7}}', "its vocab is not a table of tokens"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{}]}', "has no model with a vocab"),
        (b'{"model": {"type": "Nothing", "vocab": {"a": 0}}}', "is not a tokenizer of the tokenizers library"),
    ],
)  # fmt: skip
def test_damaged_tokenizers(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    for read in (load_tokenizer, tokenizer_vocab) if b"Nothing" not in text else (load_tokenizer,):
        with pytest.raises(JobError, match=message) as caught:
            read(tmp_path / "tokenizer.json")
        assert "\n" not in str(caught.value)


def test_unigram_tokenizer_works(tmp_path: Path) -> None:
    inner = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator(["tea and cake", "cake and tea and tea"] * 20, trainer=trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocab == tokenizer_vocab(tmp_path) == inner.get_vocab_size()
    assert loaded.decode(loaded.encode("tea and cake")).replace(" ", "") == "teaandcake"
    job = resolve(
        parse_job({"model": "tiny", "data": {"source": "pydoc", "tokenizer": str(tmp_path / "tokenizer.json")}})
    )
    assert job.model.vocab == loaded.vocab


@pytest.mark.parametrize("text", ["bpe:" + "9" * 20, "bpe:1" + "0" * 5000, "bpe:16777217", "bpe:-300", "bpe:²"])
def test_bpe_sizes(text: str) -> None:
    with pytest.raises(JobError, match=r"write bpe:N with N at least 257 .* and at most 16777216"):
        bpe_size(text)


def test_exit_codes(store: Path, tmp_path: Path) -> None:
    (store / "meta.json").write_text("[]")
    (tmp_path / "t.json").write_text("{}")
    for words in (
        ("plan", "tiny", f"data.source={store}"),
        ("plan", "tiny", "data.tokenizer=t.json"),
        ("data", "build", "a.txt", "--out", "new", "--tokenizer", "bpe:99999999999999999999"),
        ("data", "build", "a.txt", "--out", "new", "--tokenizer", "t.json"),
    ):
        done = weft(tmp_path, *words)
        assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done.err

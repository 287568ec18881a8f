"""Tokenizers: round trips, training, files of other origin, errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.chat.conversations import ConversationEncoder
from weft.data.chat.template import BUILT_IN, ChatTemplate
from weft.data.tokenizer import EOS, ByteTokenizer, bpe_size, load_tokenizer, train_bpe, utf8
from weft.job import JobError

# every code point a text may hold; st.text() would first build tables of Unicode for seconds
letters = st.one_of(st.integers(0, 0x7F), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF)).map(chr)
texts = st.lists(letters).map("".join)

TEXTS = ["the cat sat on the mat\r\n" * 20, "ein Bär, 熊, 🐻\n" * 10, "", "\x00"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS, 300).save(path)
    return load_tokenizer(path)


@settings(deadline=None, max_examples=60)
@given(text=texts)
def test_bytes_are_lossless(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=60)
@given(data=st.binary())
def test_invalid_utf8_decodes_to_replacement_characters(data):
    assert ByteTokenizer().decode(list(data)) == data.decode("utf-8", "replace")


@settings(deadline=None, max_examples=60)
@given(text=texts)
def test_bpe_is_lossless_and_in_range(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.vocab for i in ids.tolist())
    assert bpe.eos not in ids.tolist()


def test_bpe_training_respects_the_vocabulary_size(bpe):
    assert 257 < bpe.vocab <= 300
    assert len(bpe.encode("the cat sat on the mat")) < len("the cat sat on the mat") / 2


def test_eos_text_in_a_document_is_ordinary_text(bpe):
    assert bpe.eos not in bpe.encode(f"a {EOS} b").tolist()
    assert bpe.decode(bpe.encode(f"a {EOS} b")) == f"a {EOS} b"
    assert bpe.decode([*bpe.encode("a").tolist(), bpe.eos]) == "a"


def test_a_text_longer_than_a_block_is_lossless(bpe):
    text = "the cat sat on the mat " * 50_000 + "\n" + "line\n" * 10
    assert bpe.decode(bpe.encode(text)) == text


def test_lone_surrogate_becomes_a_replacement_character(bpe):
    broken = json.loads('"a\\ud83db"')
    assert utf8(broken) == "a\ufffdb".encode()
    assert bpe.decode(bpe.encode(broken)) == "a\ufffdb"
    assert utf8(json.loads('"\\ud83d\\ude00"')) == "😀".encode()


def test_training_gives_the_same_tokenizer_in_another_process(bpe, tmp_path):
    script = "import sys, json; from pathlib import Path; from weft.data.tokenizer import train_bpe\n"
    script += "train_bpe(json.loads(sys.argv[1]), 300).save(Path(sys.argv[2]))"
    other = tmp_path / "tokenizer.json"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script, json.dumps(TEXTS), str(other)], check=True, cwd=root)
    here = tmp_path / "here.json"
    bpe.save(here)
    assert other.read_bytes() == here.read_bytes()


def test_foreign_tokenizers_keep_their_eos_and_add_no_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 9, "hello": 5, "[UNK]": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 9)])
    inner.enable_truncation(1)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("hello hello").tolist() == [5, 5]
    assert (loaded.eos, loaded.vocab) == (9, 10)


def test_invalid_tokenizers_are_reported(tmp_path):
    with pytest.raises(JobError, match="no tokenizer is at 'Byte'; did you mean bytes"):
        load_tokenizer("Byte")
    with pytest.raises(JobError, match=r"write bytes or the path of a tokenizer\.json"):
        load_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(JobError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(JobError, match="N at least 257"):
        bpe_size("bpe:100")
    with pytest.raises(JobError, match="such as bpe:8000"):
        bpe_size("bpe:many")
    assert bpe_size("bpe:8_000") == 8000
    assert bpe_size("bytes") is None


def test_tokenizer_without_eos_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(JobError, match="no token that ends a document"):
        load_tokenizer(tmp_path)


def test_a_panic_of_the_library_is_one_sentence(bpe, tmp_path):
    """A pattern that backtracks without end: the library panics, in the normalizer and in the decoder."""
    saved = json.loads(bpe.inner.to_str())
    endless = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    saved["normalizer"] = endless
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(saved))
    loaded, text = load_tokenizer(path), "a" * 40 + "b"
    plain = ConversationEncoder(loaded, ChatTemplate(BUILT_IN["plain"], "it", {}))
    for encode in (loaded.encode, loaded.encode_prompt, loaded.encode_whole, plain.tokens_of):
        with pytest.raises(JobError, match=r"the tokenizer cannot encode a text of 41 characters: .*json") as e:
            encode(text)
        assert "\n" not in str(e.value)
    saved["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, endless]}
    path.write_text(json.dumps(saved))
    loaded = load_tokenizer(path)
    with pytest.raises(JobError, match="the tokenizer cannot decode"):
        loaded.decode([bpe.encode("a")[0]] * 40 + [bpe.encode("b")[0]])

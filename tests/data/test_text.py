"""Windows of text: every target once, document masks, padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.corpora import encode_corpus
from weft.data.text_windows import TextDataset
from weft.data.tokenizer import ByteTokenizer
from weft.job import JobError

texts = st.lists(st.lists(st.sampled_from("abcé"), max_size=12).map("".join), min_size=1, max_size=15)


def dataset(documents, seq_len, val_fraction=0.0, mask_documents=False):
    tokens, docs = encode_corpus(iter(documents), ByteTokenizer())
    return TextDataset(
        tokens,
        docs,
        seq_len=seq_len,
        val_fraction=val_fraction,
        mask_documents=mask_documents,
        vocab=256,
        eos=0,
        name="test",
    )


def naive(documents, seq_len, window):
    """The same window, one token at a time."""
    stream = [(b, number, at) for number, d in enumerate(documents) for at, b in enumerate([*d.encode(), 0])]
    start = window * seq_len
    inputs, targets, valid, docs, positions = [], [], [], [], []
    seen = []
    for i in range(start, start + seq_len):
        inputs.append(stream[i][0] if i < len(stream) else 0)
        targets.append(stream[i + 1][0] if i + 1 < len(stream) else 0)
        document = stream[i][1] if i < len(stream) else "padding"
        if document not in seen:
            seen.append(document)
            began = i
        valid.append(i + 1 < len(stream) and stream[i + 1][1] == document)
        docs.append(len(seen) - 1)
        positions.append(i - began)
    return {"inputs": inputs, "targets": targets, "valid": valid, "docs": docs, "positions": positions}


@settings(deadline=None, max_examples=60)
@given(documents=texts, seq_len=st.integers(1, 40))
def test_packing_agrees_with_a_naive_packer(documents, seq_len):
    if not any(documents):
        documents = ["x", *documents]
    data = dataset(documents, seq_len, mask_documents=True)
    plain = dataset(documents, seq_len)
    length = sum(len(d.encode()) + 1 for d in documents)
    for window in range(data.train_len):
        sample, expected = data.train(window), naive(documents, seq_len, window)
        assert {key: value.tolist() for key, value in sample.items()} == expected
        bare = plain.train(window)
        assert set(bare) == {"inputs", "targets", "valid"}
        assert bare["inputs"].tolist() == expected["inputs"]
        assert bare["valid"].tolist() == [window * seq_len + i + 1 < length for i in range(seq_len)]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 400), seq_len=st.integers(1, 50), fraction=st.floats(0, 1, exclude_max=True, allow_nan=False)
)
def test_train_and_val_split_the_targets(length, seq_len, fraction):
    documents = ["".join(chr(33 + i % 90) for i in range(length))]
    data = dataset(documents, seq_len, fraction)
    windows = max(1, length // seq_len)
    assert data.train_len >= 1
    assert data.train_len + data.val_len == windows
    if fraction > 0 and windows > 1:
        assert data.val_len >= 1
        assert abs(data.val_len - windows * fraction) <= 1
    else:
        assert data.val_len == 0 or windows > 1
    stream = [*documents[0].encode(), 0]
    targets = []
    samples = [data.train(i) for i in range(data.train_len)] + [data.val(i) for i in range(data.val_len)]
    for sample in samples:
        targets += sample["targets"][sample["valid"]].tolist()
    assert targets == stream[1 : 1 + len(targets)]
    assert len(targets) == (windows * seq_len if length >= seq_len else length)


def test_a_corpus_shorter_than_a_window_is_padded():
    sample = dataset(["ab"], 6).train(0)
    assert sample["inputs"].tolist() == [97, 98, 0, 0, 0, 0]
    assert sample["targets"].tolist() == [98, 0, 0, 0, 0, 0]
    assert sample["valid"].tolist() == [True, True, False, False, False, False]
    assert sample["inputs"].dtype == sample["targets"].dtype == np.int64


def test_empty_text_is_refused():
    with pytest.raises(JobError, match="source test is empty"):
        dataset([], 4)
    with pytest.raises(JobError, match=r"no token that follows another one$"):
        dataset([""], 4)
    with pytest.raises(JobError, match="inside a document"):
        dataset(["", "", ""], 4, mask_documents=True)
    assert dataset(["", ""], 4).train(0)["valid"].tolist() == [True, False, False, False]


def test_index_out_of_range():
    data = dataset(["abcdefgh"], 2, 0.25)
    for read, index in ((data.train, data.train_len), (data.val, data.val_len), (data.train, -1)):
        with pytest.raises(IndexError):
            read(index)


def test_token_outside_the_vocabulary_is_reported():
    data = TextDataset(
        np.array([1, 2, 999], dtype=np.uint16),
        np.array([0, 3]),
        seq_len=2,
        val_fraction=0,
        mask_documents=False,
        vocab=300,
        eos=0,
        name="store",
    )
    with pytest.raises(JobError, match="store is damaged: token 999 in a vocabulary of 300"):
        data.train(0)

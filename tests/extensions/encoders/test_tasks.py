"""Masked tokens, texts with labels, pairs of texts, and padding of batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.data.loader import read_share
from weft.data.open_dataset import open_dataset
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.shapes import resolve


def opened(**sections: Any) -> Any:
    return open_dataset(resolve(parse_job(sections)))


SMALL = {"dim": 16, "layers": 2, "heads": 2}
BERT = {"family": "bert", "dim": 16, "layers": 1, "heads": 2}


def test_masked_tokens() -> None:
    """15 % of the tokens are targets: 80 % hidden, 10 % replaced, 10 % as they were; others in each epoch."""
    data = opened(model=BERT, data={"source": "stdlib", "seq_len": 100}, train={"seed": 3})
    hidden = kept = 0
    for i in range(200):
        sample, again, later = data.train(i), data.train(i, 0), data.train(i, 1)
        assert all(np.array_equal(sample[k], again[k]) for k in sample)
        assert not np.array_equal(sample["valid"], later["valid"])
        assert sample["valid"].sum() == 15
        assert np.array_equal(sample["inputs"][~sample["valid"]], sample["targets"][~sample["valid"]])
        hidden += int((sample["inputs"][sample["valid"]] == 256).sum())  # one more than the bytes
        kept += int((sample["inputs"] == sample["targets"])[sample["valid"]].sum())
    assert 0.77 < hidden / 3000 < 0.83 and 0.08 < kept / 3000 < 0.13
    other = opened(model=BERT, data={"source": "stdlib", "seq_len": 100}, train={"seed": 4}).train(0)
    assert not np.array_equal(other["valid"], data.train(0)["valid"])


def test_a_vocabulary_without_room_for_the_mask_token() -> None:
    with pytest.raises(JobError, match=r"write model\.vocab=257, or data\.mask_token"):
        opened(model={**BERT, "vocab": 256}, data={"source": "stdlib"})


LINES = [("good day", "yes"), ("no", "no"), ("a longer text than the others", "yes"), ("ok", "no")]


@pytest.fixture(params=["jsonl", "tsv"])
def labeled(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"train.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in LINES))
    else:
        path.write_text("text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in LINES))
    return path


def test_labeled_texts(labeled: Path) -> None:
    """Batches are padded to the longest text, and padding is a document of its own."""
    data = opened(
        model={**BERT, "classes": 2},
        data={"source": str(labeled), "format": "labels", "seq_len": 20, "val_fraction": 0},
    )
    batch = read_share(data, seed=0, step=0, global_batch=4, microbatch=4, dp_rank=0, dp_size=1)[0]
    assert batch["inputs"].shape == (4, 20) and batch["targets"].tolist().count(1) == 2
    for tokens, docs, target in zip(batch["inputs"], batch["docs"], batch["targets"], strict=True):
        text = bytes(tokens[docs == 0].tolist()).decode()
        whole = next(a for a, b in LINES if a[:19] == text[:-1])
        assert text[-1] == "\0" and dict(LINES)[whole] == ("no", "yes")[target]
    short = read_share(data, seed=0, step=0, global_batch=4, microbatch=1, dp_rank=0, dp_size=1)
    assert sorted({b["inputs"].shape[1] for b in short}) == [8, 16, 20]


def test_patterns_name_several_files_of_records(tmp_path: Path) -> None:
    """As for other formats; those of a held-out part are recognised by their names."""
    for name, lines in (("train-0", LINES[:2]), ("train-1", LINES[2:3]), ("val-0", LINES[3:]), ("val-1", LINES[:1])):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in lines))
    source = str(tmp_path / "{train,val}-{0..1}.tsv")
    for model, format in (({**BERT, "classes": 2}, "labels"), ({"family": "t5"} | SMALL, "pairs")):
        data = opened(model=model, data={"source": source, "format": format, "seq_len": 64})
        assert (data.train_len, data.val_len) == (3, 2), format
    with pytest.raises(JobError, match=r"train-2.tsv is no file or folder of .jsonl"):
        opened(model={**BERT, "classes": 2}, data={"source": str(tmp_path / "train-{0..2}.tsv"), "format": "labels"})


def test_refused_labels(labeled: Path) -> None:
    data = {"source": str(labeled), "format": "labels", "field": "words"}
    if labeled.suffix == ".jsonl":
        with pytest.raises(JobError, match="has no field 'words'; it has text, label"):
            opened(model={**BERT, "classes": 2}, data=data)
    with pytest.raises(JobError, match=r"write model\.family=bert and model\.classes"):
        opened(model={"family": "llama", "dim": 16, "layers": 1, "heads": 2}, data=data)
    with pytest.raises(JobError, match=r"write data\.format=labels"):
        opened(model={**BERT, "classes": 2}, data={"source": "stdlib"})


def pairs(path: Path, **data: Any) -> Any:
    return opened(
        model={"family": "t5", "dim": 16, "layers": 2, "heads": 2}, train={"global_batch": 2},
        data={"source": str(path), "format": "pairs", "seq_len": 64, "val_fraction": 0, **data},
    )  # fmt: skip


def test_pairs_in_buckets(tmp_path: Path) -> None:
    """An epoch reads each pair once, in batches of similar lengths that differ from epoch to epoch."""
    words = [f"{'a' * (i % 40)}{i}" for i in range(160)]
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    found = pairs(path)
    seen: list[str] = []
    padding = 0
    for step in range(160):
        (batch,) = read_share(found, seed=0, step=step, global_batch=2, microbatch=2, dp_rank=0, dp_size=1)
        sources = [bytes(t[d == 0].tolist()).decode() for t, d in zip(batch["inputs"], batch["docs"], strict=True)]
        targets = [bytes(t[v].tolist()).decode() for t, v in zip(batch["targets"], batch["valid"], strict=True)]
        assert [s[:-1][::-1] for s in sources] == [t[:-1] for t in targets]
        seen += [s[:-1] for s in sources]
        padding += abs(len(sources[0]) - len(sources[1]))
    assert sorted(seen[:160]) == sorted(seen[160:]) == sorted(words) and seen[:160] != seen[160:]
    assert padding / 160 < 3
    record = {"translation": {"en": "yes", "de": "ja"}}
    (tmp_path / "nested.jsonl").write_text(json.dumps(record) + "\n")
    sample = pairs(tmp_path / "nested.jsonl", source_field="translation.en", target_field="translation.de").train(0)
    assert bytes(sample["targets"].tolist()) == b"ja\0"


def test_refused_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("one column\n")
    with pytest.raises(JobError, match="line 1 has 1 columns; source and target are 2"):
        pairs(tmp_path / "pairs.tsv")
    with pytest.raises(JobError, match=r"write data\.format=pairs"):
        opened(model={"family": "t5", "dim": 16, "layers": 2, "heads": 2}, data={"source": "stdlib"})

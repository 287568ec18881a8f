"""Datasets by data.source, and errors for sources that do not work."""

import sys

import numpy as np
import pytest

from weft.data.build_store import build
from weft.data.corpora import CORPORA
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset, with_steps
from weft.data.patches import image_patches
from weft.data.sources import open_tokenizer
from weft.data.tokenizer import train_bpe
from weft.job import Data, Job, JobError, parse_job
from weft.job.schema import Model, Train
from weft.job.shapes import resolve


def job(model=None, train=None, **data) -> Job:
    return parse_job({"model": {"family": "llama", "vocab": 256, **(model or {})}, "data": data, "train": train or {}})


def module_job(**data) -> Job:
    return parse_job({"model": "my.module:Class", "data": data})


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_pydoc_is_the_reference_text():
    data = open_dataset(job(source="pydoc", seq_len=64))
    text = bytes(data.train(0)["inputs"].tolist()).decode()
    assert next(CORPORA["pydoc"]()).startswith(text)
    assert data.train_len > 4000
    assert data.val_len == pytest.approx(data.train_len / 9, abs=1)


def test_stdlib_is_source_code_without_tests():
    texts = list(CORPORA["stdlib"]())
    assert sum(map(len, texts)) > 5_000_000
    assert any("class ArgumentParser" in t for t in texts)
    assert not any("class TestLoader_Legacy" in t for t in texts)
    assert open_dataset(job(source="stdlib", seq_len=512)).train_len > 10_000


def test_a_corpus_with_a_trained_tokenizer(tmp_path):
    train_bpe(["the reference text"], 270).save(tmp_path / "tokenizer.json")
    tokenizer = str(tmp_path / "tokenizer.json")
    data = open_dataset(job({"vocab": 300}, source="pydoc", tokenizer=tokenizer, seq_len=128, mask_documents=True))
    decoded = open_tokenizer(Data(source="pydoc", tokenizer=tokenizer)).decode(data.train(0)["inputs"])
    assert next(CORPORA["pydoc"]()).startswith(decoded)
    assert set(data.train(0)) == {"inputs", "targets", "valid", "docs", "positions"}
    with pytest.raises(
        JobError, match=r"model.vocab 256 is smaller than the 2.. tokens of data.source pydoc; write model"
    ):
        open_dataset(job(source="pydoc", tokenizer=tokenizer))


def test_store_includes_its_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 40)
    result = build(tmp_path / "a.txt", tmp_path / "store", "bpe:280")
    source = str(tmp_path / "store")
    data = open_dataset(job({"vocab": 512}, source=source, seq_len=8, tokenizer="bytes"))
    assert data.train_len + data.val_len == (result.tokens - 1) // 8
    assert open_tokenizer(Data(source=source)).decode(data.train(0)["inputs"]).startswith("to be or")
    assert open_tokenizer(Data(source=source)).vocab == result.vocab
    with pytest.raises(JobError, match=f"write model.vocab={result.vocab}, or leave it out"):
        open_dataset(job(source=source))
    (tmp_path / "store" / "tokens.bin").write_bytes(b"")
    with pytest.raises(JobError, match=r"store is damaged: tokens\.bin has 0 bytes"):
        open_dataset(job({"vocab": 512}, source=source))


def test_an_empty_store_is_refused_and_a_tiny_one_is_padded(tmp_path):
    for name, data in (("empty", ""), ("tiny", "x")):
        (tmp_path / f"{name}.txt").write_text(data)
        build(tmp_path / f"{name}.txt", tmp_path / name)
    with pytest.raises(JobError, match="is empty: it has no token that follows another one"):
        open_dataset(job(source=str(tmp_path / "empty")))
    tiny = open_dataset(job(source=str(tmp_path / "tiny"), seq_len=4))
    assert tiny.train(0)["valid"].tolist() == [True, False, False, False]
    assert (tiny.train_len, tiny.val_len) == (1, 0)


def test_an_unknown_source_lists_what_works(tmp_path):
    with pytest.raises(
        JobError,
        match="'pydocs'; did you mean pydoc\\? It may be pydoc, stdlib, docstrings, synthetic, movielens, mnist",
    ):
        open_dataset(job(source="pydocs"))
    with pytest.raises(JobError, match=r"no source or path is named '/no/where'\. It may be"):
        open_dataset(job(source="/no/where"))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        JobError, match=r"is a file; build a token store from it with `weft data build .*a\.txt --out DIR`"
    ):
        open_dataset(job(source=str(tmp_path / "a.txt")))
    with pytest.raises(JobError, match="is a folder but not a token store"):
        open_dataset(job(source=str(tmp_path)))
    with pytest.raises(JobError, match=r"pydoc gives tokens, and .* mlp does not take them"):
        open_dataset(job({"family": "mlp"}, source="pydoc"))


@pytest.mark.parametrize("family", ["llama", "mlp", "vit"])
def test_synthetic_samples_are_functions_of_seed_and_index(family):
    def opened(seed):
        return open_dataset(
            job({"family": family, "vocab": 10, "dim": 8}, {"seed": seed}, source="synthetic", seq_len=5)
        )

    a, b, other = opened(3), opened(3), opened(2**61)
    assert (a.train_len, a.val_len) == (1 << 20, 1024)
    b.train(5)
    assert same(a.train(7), b.train(7))
    assert same(a.val(7), b.val(7))
    for differs in (a.train(8), a.val(7), other.train(7)):
        assert not same(a.train(7), differs)


def test_synthetic_tokens():
    data = open_dataset(job({"vocab": 7}, source="synthetic", seq_len=50, mask_documents=True))
    samples = [data.train(i) for i in range(40)]
    assert set(np.concatenate([s["inputs"] for s in samples]).tolist()) == set(range(7))
    for s in samples:
        assert s["inputs"][1:].tolist() == s["targets"][:-1].tolist()
        assert s["valid"].all()
        assert s["docs"].tolist() == [0] * 50
        assert s["positions"].tolist() == list(range(50))


def test_synthetic_regression_is_learnable():
    data = open_dataset(job({"family": "mlp", "dim": 6}, source="synthetic"))
    samples = [data.train(i) for i in range(600)]
    assert all(s["valid"].shape == () and s["valid"].dtype == np.bool_ and s["valid"] for s in samples)
    x, y = (np.stack([s[key] for s in samples]) for key in ("inputs", "targets"))
    assert x.dtype == y.dtype == np.float32
    assert x.shape == y.shape == (600, 6)
    linear, *_ = np.linalg.lstsq(x[:500], y[:500], rcond=None)
    left = np.mean((x[500:] @ linear - y[500:]) ** 2) / np.var(y[500:])
    assert 0.001 < left < 0.5  # a straight line explains most of the teacher, and not all


def test_synthetic_images_are_separable():
    data = open_dataset(job({"family": "vit", "vocab": 5}, source="synthetic", seq_len=16))
    samples = [data.train(i) for i in range(300)]
    assert samples[0]["inputs"].shape == (16, 48)
    assert samples[0]["inputs"].dtype == np.float32
    assert samples[0]["targets"].shape == samples[0]["valid"].shape == ()
    x, y = np.stack([s["inputs"].mean(0) for s in samples]), np.stack([s["targets"] for s in samples])
    assert y.dtype == np.int64
    assert set(y.tolist()) == set(range(5))
    means = np.stack([x[:200][y[:200] == c].mean(0) for c in range(5)])
    guess = np.argmin(((x[200:, None] - means) ** 2).sum(-1), axis=1)
    assert np.mean(guess == y[200:]) > 0.9


OWN = """
import numpy as np

class Squares:
    train_len, val_len = np.int64(4), 2
    def __init__(self, data):
        self.length = data.seq_len
    def train(self, index):
        return {"inputs": [float(index)] * self.length, "targets": [index ** 2.0]}
    def val(self, index):
        return {"inputs": [float(index)] * self.length, "targets": [index ** 2.0], "valid": np.array(True)}

class Classes(Squares):
    def train(self, index):
        return {"inputs": np.zeros(2), "targets": np.array([index, 1], dtype=np.int32), "docs": [0, 1]}

class NoVal:
    train_len, val_len = 1, 0
    def __init__(self, data): pass
    def train(self, index): return {"inputs": [0], "targets": [0]}

class Empty(Squares): train_len = 0
class Endless(Squares): train_len = 10**30
class Exits(Squares):
    def train(self, index): raise SystemExit(0)
class Wordy(Squares): train_len = "many"
class Tuples(Squares):
    def train(self, index): return (1, 2)
class Keys(Squares):
    def train(self, index): return {"x": 1, "parts": [{"a": [1.0, 2.0]}, (3, 4)], "label": 2}
class Words(Squares):
    def train(self, index): return {"x": "one"}
class Augmented(Squares):
    def train(self, index, epoch): return np.array([index, epoch]), 1
class Broken(Squares):
    def train(self, index): return 1 / index
class Tokens(Squares):
    def train(self, index):
        targets = np.array([1, -100, 255, 300 if index == 2 else 3])
        return {"inputs": np.array([0, 1, -1 if index == 3 else 2, 255]), "targets": targets}
    val = train
class Shorter(Tokens):
    def train(self, index): return {"inputs": [1, 2, 3], "targets": [2, 3]}
class Rows(Tokens):
    def train(self, index): return {"inputs": [[1, 2]], "targets": [[2, 3]]}
class Unmasked(Tokens):
    def train(self, index):
        return {**super().train(index), "valid": np.array([True, True, True, index != 2])}
class Pixels(Tokens):
    def train(self, index): return {"inputs": np.full((3, 4, 4), 200, np.uint8), "targets": 1}
NUMBER = 4
def nothing(data): return None
def fails(data): raise RuntimeError("no such bucket")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_samples.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "own_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_samples", None)


def test_user_dataset(own):
    data = open_dataset(module_job(source="own_samples:Squares", seq_len=3))
    sample = data.train(3)
    assert (data.train_len, data.val_len) == (4, 2)
    assert sample["inputs"].tolist() == [3, 3, 3]
    assert sample["inputs"].dtype == sample["targets"].dtype == np.float32
    assert sample["valid"].shape == ()
    assert sample["valid"]
    classes = open_dataset(module_job(source="own_samples:Classes")).train(1)
    assert classes["targets"].dtype == np.int64
    assert classes["valid"].tolist() == [True, True]
    assert classes["docs"].tolist() == [0, 1]


def test_samples_may_be_trees(own):
    keys = open_dataset(module_job(source="own_samples:Keys")).train(0)
    assert {k: v.tolist() for k, v in keys.items()} == {
        "inputs/x": 1, "inputs/parts/#0/a": [1.0, 2.0], "inputs/parts/#1/#0": 3, "inputs/parts/#1/#1": 4, "targets": 2,
        "valid": True,
    }  # fmt: skip
    pairs = open_dataset(module_job(source="own_samples:Tuples")).train(0)
    assert set(pairs) == {"inputs", "targets", "valid"}
    with pytest.raises(JobError, match=r"gave the keys x, parts, label for train\(0\); a sample is a dict with inputs"):
        open_dataset(resolve(job(model={"shape": "tiny"}, source="own_samples:Keys")))


def test_a_sample_may_depend_on_the_epoch(own):
    data = open_dataset(module_job(source="own_samples:Augmented"))
    steps = [
        step
        for _, step in zip(
            range(4),
            Loader(data, seed=0, global_batch=3, microbatch=3, dp_rank=0, dp_size=1, prefetch=0, drop_last=True),
            strict=False,
        )
    ]
    assert [batch["inputs"][:, 1].unique().tolist() for (batch,) in steps] == [[0], [1], [2], [3]]
    assert all(batch["inputs"][:, 0].unique().numel() == 3 for (batch,) in steps), "four samples, three are read"


def test_steps_of_epochs(own):
    def steps(**train):
        of = module_job(source="own_samples:Squares", drop_last=train.pop("drop_last", False))
        return with_steps(of.model_copy(update={"train": Train(global_batch=3, **train)})).train.steps

    assert (steps(epochs=1), steps(epochs=1.5), steps(epochs=3), steps(epochs=3, drop_last=True)) == (2, 2, 4, 3)
    assert steps(epochs=2, batch_ramp=[[2, 1]]) == 4
    assert steps(epochs=1, steps=2) == 2
    with pytest.raises(JobError, match=r"train.epochs=1 of 4 samples is 2 steps, and train.steps=7 is set too; leave"):
        steps(epochs=1, steps=7)


def test_patches_of_images():
    image = np.arange(2 * 4 * 6).reshape(2, 4, 6)
    patches = image_patches(image, Model(family="vit", patch=2, channels=2))
    assert patches.shape == (6, 8)
    assert patches[1].tolist() == image[:, 0:2, 2:4].reshape(-1).tolist()
    with pytest.raises(ValueError, match=r"which patches of model.patch=3 do not divide"):
        image_patches(image, Model(family="vit", patch=3, channels=2))
    with_token = image_patches(image, Model(family="vit", patch=3, channels=2, class_token=True, image=(4, 6)))
    assert with_token.shape == (3, 18) and not with_token[0].any(), "the last row of pixels is cut off"
    assert with_token[2].tolist() == image[:, 0:3, 3:6].reshape(-1).tolist()


def test_user_dataset_ranges(own):
    def open_own(name):
        return open_dataset(resolve(job(model={"shape": "tiny"}, source=f"own_samples:{name}")))

    data = open_own("Tokens")
    assert data.train(0)["valid"].tolist() == [True, False, True, True], "-100 is masked"
    assert data.train(0)["targets"].tolist() == [1, 0, 255, 3]
    with pytest.raises(JobError, match=r"targets 300 at \[3\] of sample train\(2\), outside of model.vocab=256; write"):
        data.train(2)
    with pytest.raises(JobError, match=r"inputs -1 at \[2\] of sample train\(3\), outside of model.vocab=256"):
        data.train(3)
    assert open_own("Unmasked").train(2)["valid"].tolist() == [True, False, True, False], "any masked target is fine"
    with pytest.raises(JobError, match=r"gave inputs of float32 for train\(0\); the model takes integers"):
        open_own("Squares")
    with pytest.raises(
        JobError, match=r"shapes \[3\], \[2\] and \[2\] for train\(0\); the model takes a row of tokens"
    ):
        open_own("Shorter")
    with pytest.raises(JobError, match=r"shapes \[1, 2\], \[1, 2\] and \[1, 2\] for train\(0\)"):
        open_own("Rows")
    model = {"family": "vit", "dim": 8, "layers": 1, "heads": 2, "vocab": 3, "image": [4, 4], "patch": 2}
    with pytest.raises(JobError, match=r"gave inputs of int64 for train\(0\); the model takes floats: pixels"):
        open_dataset(resolve(job(model=model, source="own_samples:Pixels")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("own_samples:NoVal", r"the NoVal it returned has no method val\(index\); a dataset has train_len, val_len"),
        ("own_samples:Empty", "the Empty it returned has train_len = 0; it must be at least 1"),
        ("own_samples:Endless", "has train_len = 10+; it must be at most 4611686018427387903"),
        ("own_samples:Exits", r"reading its first sample raised SystemExit: 0 .*own_samples\.py:\d+"),
        ("own_exits:Squares", r"importing it raised SystemExit: 3 .*own_exits\.py:1"),
        ("own_samples:Wordy", "train_len = 'many', which is not a whole number"),
        ("own_samples:Words", r"gave str at inputs/x of train\(0\); a sample is made of numbers"),
        ("own_samples:Broken", r"reading its first sample raised ZeroDivisionError: .*own_samples\.py:\d+"),
        ("own_samples:nothing", "the NoneType it returned has no train_len"),
        (
            "own_samples:fails",
            r"calling it with the data section raised RuntimeError: no such bucket .*own_samples\.py",
        ),
        ("own_samples:squares", "own_samples has no function or class 'squares'; did you mean own_samples:Squares"),
        ("own_samples:NUMBER", "own_samples has no function or class 'NUMBER'$"),
        ("own_sample:Squares", "there is no module own_sample; write package.module:name"),
        ("own_broken:Squares", "importing it raised ModuleNotFoundError: No module named 'not_installed_anywhere'"),
    ],
)
def test_user_dataset_is_checked(own, source, message):
    with pytest.raises(JobError, match=message) as caught:
        open_dataset(module_job(source=source))
    assert str(caught.value).startswith(f"data.source {source}: ")

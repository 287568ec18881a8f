"""`weft data build`: unusual files, folders, large files in parts, refused sources."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.build_sources import find_files
from weft.data.build_store import build
from weft.data.store import open_store
from weft.data.tokenizer import load_tokenizer
from weft.job import JobError

ROOT = Path(__file__).resolve().parents[2]


def documents(path):
    store = open_store(path)
    found = []
    for start, stop in zip(store.docs[:-1], store.docs[1:], strict=True):
        assert store.tokens[stop - 1] == store.meta.eos
        found.append(store.tokens[start : stop - 1])
    return found


def contents(path):
    return [d.tobytes() for d in documents(path)]


def files(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*")}


@pytest.mark.parametrize(
    "data",
    [b"", b"x", "日本語 🐻\n".encode(), b"one\r\ntwo\r\n", b"\xff\xfe\x00bad utf8", b"a\x00b", b"\xef\xbb\xbfbom"],
)
def test_unusual_files_are_one_document_byte_for_byte(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    result = build(tmp_path / "a.txt", tmp_path / "store")
    assert contents(tmp_path / "store") == [data]
    assert (result.tokens, result.documents, result.vocab) == (len(data) + 1, 1, 256)
    assert result.path == tmp_path / "store"
    assert result.seconds > 0


def test_json_lines(tmp_path):
    texts = ["first", "", "zwei\r\n", "drei\u2028vier", "\x00"]
    lines = [json.dumps({"id": i, "text": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    body = "\ufeff" + "\n\n".join(lines[:2]) + "\r\n  \r\n" + "\n".join(lines[2:])
    (tmp_path / "a.jsonl").write_bytes(body.encode())
    build([tmp_path / "a.jsonl"], tmp_path / "store")
    assert contents(tmp_path / "store") == [t.encode() for t in texts]


def test_field_option_and_lone_surrogates(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a\\ud83d"}\n')
    build(tmp_path / "a.jsonl", tmp_path / "store", field="body")
    assert contents(tmp_path / "store") == ["a\ufffd".encode()]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff{}", "is not UTF-8"),
        (b'["x"]', "is a JSON list, not an object with named fields"),
        (b'{"body": "x"}', r"has no field 'text' \(it has body\); name the one that holds the text: data.field"),
        (b"{}", r"it has nothing"),
        (b'{"text": null}', "has a NoneType in the field 'text', not text"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_bad_line_is_reported_with_its_number_and_leaves_no_files(tmp_path, line, message, tokenizer):
    good = b'{"text": "good"}\n'
    (tmp_path / "bad.jsonl").write_bytes(good * 50 + b"\n" + line + b"\n" + good)
    with pytest.raises(JobError, match=rf"bad\.jsonl line 52 {message}|bad\.jsonl line 52 .*{message}"):
        build(tmp_path / "bad.jsonl", tmp_path / "store", tokenizer, workers=1, part_bytes=100)
    assert not (tmp_path / "store").exists()


def test_bad_line_in_a_worker_process_is_reported(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n' * 9 + b"nonsense\n")
    with pytest.raises(JobError, match=r"bad\.jsonl line 10 is not JSON"):
        build(tmp_path / "bad.jsonl", tmp_path / "store", workers=2, part_bytes=600)


def test_folder_is_read_in_path_order(tmp_path):
    source = tmp_path / "source"
    for name, data in {
        "b.txt": "B",
        "a/z.md": "AZ",
        "a/b/c.py": "ABC",
        "lines.JSONL": '{"text": "L1"}\n{"text": "L2"}\n',
        "a.txt": "A",
        "picture.png": "no text",
        ".hidden.txt": "hidden",
        ".git/config.txt": "hidden",
        "empty.jsonl": "",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(data)
    build([source, source / "b.txt"], source / "store")
    expected = [b"A", b"ABC", b"AZ", b"B", b"L1", b"L2", b"B"]
    assert contents(source / "store") == expected
    # the store inside the folder is no source of itself
    build(source, tmp_path / "again", tokenizer=_bpe(tmp_path))
    (source / "store" / "note.txt").write_text("note")
    build([source, source / "b.txt"], source / "store")
    assert contents(source / "store") == expected


def _bpe(tmp_path):
    from weft.data.tokenizer import train_bpe

    train_bpe(["some text"], 257).save(tmp_path / "mine.json")
    return tmp_path / "mine.json"


@settings(deadline=None, max_examples=25)
@given(
    lines=st.lists(st.sampled_from(["", "a", "bär", "a longer line of text", "\x00"]), max_size=40),
    newline=st.sampled_from(["\n", "\r\n", ""]),
    part_bytes=st.integers(1, 700),
)
def test_store_does_not_depend_on_part_size(tmp_path_factory, lines, newline, part_bytes):
    tmp_path = tmp_path_factory.mktemp("cut")
    text = newline.join(lines)
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    build([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "store", workers=1, part_bytes=part_bytes)
    assert contents(tmp_path / "store") == [text.encode(), *(line.encode() for line in lines)]


def test_parts_do_not_split_characters(tmp_path):
    text = "熊🐻é" * 300
    (tmp_path / "a.txt").write_text(text)
    build(tmp_path / "a.txt", tmp_path / "store", "bpe:400", workers=1, part_bytes=101)
    (tokens,) = documents(tmp_path / "store")
    assert load_tokenizer(tmp_path / "store").decode(tokens) == text


def test_worker_pool_gives_the_same_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * 9}) + "\n" for i in range(300)))
    one = build(tmp_path / "a.jsonl", tmp_path / "one", "bpe:500", workers=1, part_bytes=5000)
    seen = []
    two = build(
        tmp_path / "a.jsonl",
        tmp_path / "two",
        "bpe:500",
        workers=2,
        part_bytes=5000,
        progress=lambda *x: seen.append(x),
    )
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert set(files(tmp_path / "one")) == {"tokens.bin", "docs.bin", "tokenizer.json", "meta.json", "build.json"}
    assert (one.tokens, one.documents, one.vocab) == (two.tokens, two.documents, two.vocab)
    size = (tmp_path / "a.jsonl").stat().st_size
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    assert len(seen) > 4


def test_tokens_agree_with_the_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("hello hello hello")
    mine = _bpe(tmp_path)
    build(tmp_path / "a.txt", tmp_path / "store", mine)
    assert (tmp_path / "store" / "tokenizer.json").read_bytes() == mine.read_bytes()
    (tokens,) = documents(tmp_path / "store")
    assert np.array_equal(tokens, load_tokenizer(mine).encode("hello hello hello"))


def test_building_again_does_nothing_and_other_settings_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("world")
    first = build(tmp_path / "a.txt", tmp_path / "store")
    before = files(tmp_path / "store")
    again = build(tmp_path / "a.txt", tmp_path / "store")
    assert (again.tokens, again.documents) == (first.tokens, first.documents)
    with pytest.raises(JobError, match="tokenizer was 'bytes' and is 'bpe:300'; choose another --out, or delete"):
        build(tmp_path / "a.txt", tmp_path / "store", "bpe:300")
    with pytest.raises(JobError, match="its source files have other names or were changed since"):
        build(tmp_path / "b.txt", tmp_path / "store")
    with pytest.raises(JobError, match="files was 1 and is 2"):
        build([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "store")
    assert files(tmp_path / "store") == before


def test_invalid_sources_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "a.txt.gz").write_bytes(b"")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    (tmp_path / "pictures").mkdir()
    for sources, out, options, message in (
        ("missing.txt", "store", {}, "there is no file or folder .*missing.txt"),
        ("a.txt.gz", "store", {}, "is not plain text; unpack or convert it"),
        ("pictures", "store", {}, "pictures holds no text file"),
        ("empty.jsonl", "store", {}, "there is no document in .*empty.jsonl"),
        ("a.txt", "full", {}, "holds other things; choose a new or an empty one"),
        ("a.txt", "a.txt", {}, "is a file; a token store is a folder"),
        ("a.txt", "store", {"tokenizer": "bpe:5"}, "N at least 257"),
        ("a.txt", "store", {"tokenizer": "byte"}, "did you mean bytes"),
        ("a.txt", "store", {"workers": 0}, "workers must be at least 1, not 0"),
    ):
        with pytest.raises(JobError, match=message):
            build(tmp_path / sources, tmp_path / out, **options)
        assert not (tmp_path / "store").exists()
    build(tmp_path / "a.txt", tmp_path / "full" / "store")
    with pytest.raises(JobError, match="full/store is a token store already"):
        build(tmp_path / "full" / "store", tmp_path / "other")
    with pytest.raises(JobError, match="full holds no text file"):
        build(tmp_path / "full", tmp_path / "other")
    with pytest.raises(JobError, match="needs at least one text file"):
        build([], tmp_path / "store")


def test_build_does_not_import_torch():
    script = "import sys, weft.data.build_store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_a_deep_folder_is_read(tmp_path: Path) -> None:
    """Each folder is opened once, without recursion; files have the name that a link gives them."""
    folders = [tmp_path / "deep"]
    folders += [Path(f"{folders[0]}{'/d' * depth}") for depth in range(1, 1100)]
    for folder in folders:
        folder.mkdir()
    (folders[-1] / "a.txt").write_text("x")
    (folders[0] / "b.jsonl").symlink_to(folders[-1] / "a.txt")
    (folders[0] / "loop").symlink_to(folders[0])
    (folders[1] / ".parts").mkdir()
    try:
        assert [f.kind for f in find_files([folders[0]], tmp_path)] == ["jsonl"]  # .parts: the store of a build
        (folders[1] / ".parts").rmdir()
        found = find_files([folders[0]], tmp_path)
        assert [f.kind for f in found] == ["jsonl", "text"] and len({f.path for f in found}) == 1
        assert [f.kind for f in find_files([folders[0]], folders[2])] == ["jsonl"]  # the store that is written
    finally:
        (folders[-1] / "a.txt").unlink()
        for folder in reversed(folders[1:]):
            folder.rmdir()

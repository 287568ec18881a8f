"""Images with captions from every format of files."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from weft.data.open_dataset import open_dataset
from weft.job import JobError, parse_job
from weft.job.shapes import resolve

CAPTIONS = ["a red square", "a blue circle", "a red square", "a dog"]


def content(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def dataset(path: Path, **images: Any) -> Any:
    towers = {"image": {"dim": 8, "layers": 1, "heads": 1, "patch": 4}, "text": {"dim": 8, "layers": 1, "heads": 1}}
    data = {"source": str(path), "seq_len": 24, "images": {"size": 8, **images}, "val_fraction": 0.25}
    return open_dataset(resolve(parse_job({"model": {"family": "clip", "towers": towers}, "data": data})))


def text(sample: dict[str, np.ndarray]) -> str:
    return bytes(sample["inputs/text"].tolist()).rstrip(b"\0").decode()


def write_list(folder: Path, kind: str) -> None:
    rows = [{"image": f"{i}.png", "caption": caption} for i, caption in enumerate(CAPTIONS)]
    if kind == "jsonl":
        (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["file_name", "text"])
        writer.writeheader()
        writer.writerows({"file_name": row["image"], "text": row["caption"]} for row in rows)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tar", "parquet"])
def test_captions_of_every_format(tmp_path: Path, kind: str) -> None:
    if kind == "tar":
        with tarfile.open(tmp_path / "pairs-000.tar", "w") as archive:
            for i, caption in enumerate(CAPTIONS):
                beside = ("json", json.dumps({"url": "", "caption": caption})) if i % 2 else ("txt", caption)
                for name, data in ((f"{i:03d}.png", content(i)), (f"{i:03d}.{beside[0]}", beside[1].encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    elif kind == "parquet":
        columns = {"image": [content(i) for i in range(len(CAPTIONS))], "caption": CAPTIONS}
        parquet.write_table(arrow.table(columns), tmp_path / "pairs.parquet")
    else:
        write_list(tmp_path, kind)
        for i in range(len(CAPTIONS)):
            (tmp_path / f"{i}.png").write_bytes(content(i))
    found = dataset(tmp_path)
    assert (found.train_len, found.val_len) == (3, 1)
    samples = [found.train(i) for i in range(3)] + [found.val(0)]
    assert sorted(map(text, samples)) == sorted(CAPTIONS)
    by_caption = {text(s): int(s["targets"]) for s in samples}
    assert len(set(by_caption.values())) == 3  # the same caption has the same number
    assert samples[0]["inputs/image"].shape == (3, 8, 8)
    assert samples[0]["inputs/text"][-1] == 0
    assert np.array_equal(found.train(1)["inputs/image"], samples[1]["inputs/image"])


def test_a_folder_for_each_class_has_captions_by_the_prompt(tmp_path: Path) -> None:
    for part, name in (("train", "grey_cat"), ("train", "dog"), ("val", "dog")):
        (tmp_path / part / name).mkdir(parents=True)
        (tmp_path / part / name / "0.png").write_bytes(content(len(name)))
    found = dataset(tmp_path, prompt="one {}!")
    assert {text(found.train(i)) for i in range(2)} == {"one grey cat!", "one dog!"}
    assert text(found.val(0)) == "one dog!"


def test_wrong_lists_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "captions.jsonl"
    for line, message in (
        ('{"image": "0.png", "caption": ""}', r"line 1 has no caption \(None\)"),
        ('{"picture": "0.png"}', "line 1 has picture; it needs image and caption"),
        ('{"image": "0.png", "caption": "x"}', r"names .*0.png, which is no file"),
        ("[1]", "line 1 is not an object"),
        ("{", "is not a list of captions"),
    ):
        path.write_text(line)
        with pytest.raises(JobError, match=message):
            dataset(tmp_path)

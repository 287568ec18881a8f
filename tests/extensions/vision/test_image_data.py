"""Images from every format of files, and augmentation that depends on (seed, image, epoch) alone."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps

from weft.data.build_sources import find_files
from weft.data.open_dataset import open_dataset
from weft.data.shard_patterns import expand
from weft.extensions.vision import augment, decoded_images, image_operations
from weft.extensions.vision.idx_files import FILES
from weft.job import JobError, parse_job
from weft.job.data import ImageData
from weft.job.shapes import resolve


def picture(number: int, colours: int = 1, size: int = 12) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (size, size, colours), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "png")
    return file.getvalue()


def write_idx(folder: Path, counts: tuple[int, int] = (20, 6), end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for start, count, images, labels in ((0, counts[0], *FILES[:2]), (100, counts[1], *FILES[2:])):
        pixels = np.stack([picture(start + i)[..., 0] for i in range(count)])
        classes = np.arange(count, dtype=np.uint8) % 3
        for name, array in ((images, pixels), (labels, classes)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            content = head + array.tobytes()
            (folder / f"{name}{end}").write_bytes(gzip.compress(content) if end else content)
    return folder


def open_images(source: Path | str, model: dict[str, Any] | None = None, **images: Any) -> Any:
    raw = {"model": model or {"module": "m:M"}, "data": {"source": str(source), "images": images or None}}
    return open_dataset(resolve(parse_job(raw)))


@pytest.mark.parametrize(("inner", "end"), [(".", ""), ("MNIST/raw", ".gz")])
def test_idx(tmp_path: Path, inner: str, end: str) -> None:
    write_idx(tmp_path / inner, end=end)
    data = open_images(tmp_path)
    assert (data.train_len, data.val_len) == (20, 6)
    sample = data.val(4)
    assert sample["inputs"].shape == (1, 12, 12)
    assert np.allclose(sample["inputs"][0] * 0.5 + 0.5, picture(104)[..., 0] / 255)
    assert (int(sample["targets"]), sample["valid"].shape) == (1, ())


def test_grey_and_coloured_files_have_the_same_colours(tmp_path: Path) -> None:
    """As in ImageNet, a folder has grey, coloured and other images; 16 bits become 8."""
    (tmp_path / "a").mkdir()
    deep = np.arange(144, dtype=np.uint16).reshape(12, 12) * 400
    for number, image in enumerate((Image.fromarray(deep), *(Image.new(m, (7, 5)) for m in ("L", "CMYK", "1", "LA")))):
        image.save(tmp_path / "a" / f"{number}.{'jpg' if image.mode == 'CMYK' else 'png'}")
    whole = {"size": 12, "channels": None}
    for model, colours in ((None, 3), ({"family": "resnet", "layers": 18}, 3), ({"module": "m:M", "channels": 1}, 1)):
        data = open_images(tmp_path, model, **whole)
        found = [data.train(i)["inputs"] for i in range(data.train_len)]
        assert {x.shape for x in found} == {(colours, 12, 12)}
        assert any(np.allclose(x[0] * 0.5 + 0.5, (deep >> 8) / 255) for x in found)


def test_folder_tar_and_parquet_give_the_same_images(tmp_path: Path) -> None:
    folder, shards = tmp_path / "folder", tmp_path / "shards"
    shards.mkdir()
    rows = [(picture(i, 3), i % 3) for i in range(10)]
    for part, name in ((rows[:8], "train"), (rows[8:], "val")):
        with tarfile.open(shards / f"{name}-000.tar", "w") as archive:
            for i, (pixels, label) in enumerate(part):
                path = folder / name / "abc"[label] / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encoded(pixels))
                beside = ("cls", str(label)) if name == "train" else ("json", json.dumps({"width": 9, "label": label}))
                for end, content in (("png", encoded(pixels)), (beside[0], beside[1].encode())):
                    member = tarfile.TarInfo(f"{i:03}.{end}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        table = arrow.table({"image": [{"bytes": encoded(p)} for p, _ in part], "label": [label for _, label in part]})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    resnet = {"family": "resnet", "layers": 18, "vocab": 3}
    found = [open_images(folder, resnet), open_images(shards, format="tar"), open_images(tmp_path, format="parquet")]
    found.append(open_images(shards / "{train,val}-{000..000}.tar", format="tar"))
    assert [(d.train_len, d.val_len, d.classes) for d in found] == [(8, 2, 3)] * 4
    tar, columns = found[3], found[2]
    assert all(np.array_equal(tar.train(i)["inputs"], columns.train(i)["inputs"]) for i in range(8))
    images = [sorted((int(s["targets"]), s["inputs"].tobytes()) for s in map(d.train, range(8))) for d in found]
    assert images[0] == images[1]


def test_names_of_several_shards(tmp_path: Path) -> None:
    assert [p.name for p in expand(tmp_path / "a-{08..10}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert [str(p) for p in expand(Path("{x,y}/{9..10}"))] == ["x/9", "x/10", "y/9", "y/10"]
    (tmp_path / "{0..1}").touch()
    assert expand(tmp_path / "{0..1}") == [tmp_path / "{0..1}"], "a file of this name"
    for name, says in (("{3..1}", "has the range 3..1"), ("{0..999}{0..9999}", "names more than 1,000,000 files")):
        with pytest.raises(JobError, match=says):
            expand(tmp_path / name)
    with pytest.raises(JobError, match=r"b-1\.tar does not exist"):
        open_images(tmp_path / "b-{1..2}.tar", format="tar")
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(name)
    assert [Path(f.path).name for f in find_files([tmp_path / "{b,a}.txt"], tmp_path)] == ["b.txt", "a.txt"]


def test_images_of_hugging_face_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of save_to_disk, a repository in the hub cache, and what load_dataset has prepared of one."""
    tables = {
        name: arrow.table(
            {"image": [{"bytes": encoded(picture(i, 3)), "path": None} for i in rows], "label": [i % 3 for i in rows]}
        )
        for name, rows in (("train", range(8)), ("test", range(8, 10)))
    }
    saved, hub, prepared = tmp_path / "saved", tmp_path / "hub/hub/datasets--me--pics", tmp_path / "hub/datasets"
    (saved / "train").mkdir(parents=True)
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text("abc")
    (hub / "snapshots/abc/data").mkdir(parents=True)
    version = prepared / "me___other/default/0.0.0/0f1e"
    version.mkdir(parents=True)
    (version / "dataset_info.json").write_text("{}")
    for name, table in tables.items():
        (saved / name).mkdir(exist_ok=True)
        (saved / name / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
        for path in (saved / name / "data-0.arrow", version / f"other-{name}.arrow"):
            with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
        parquet.write_table(table, hub / f"snapshots/abc/data/{name}-00000-of-00001.parquet")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    resnet = {"family": "resnet", "layers": 18, "vocab": 3}
    for source in (saved, "hf:me/pics", "hf:me/other"):
        data = open_images(source, resnet)
        assert (data.train_len, data.val_len, data.classes) == (8, 2, 3), source
        assert np.allclose(data.val(1)["inputs"] * 0.5 + 0.5, picture(9, 3).transpose(2, 0, 1) / 255)
    with pytest.raises(JobError, match=r"hf:me/none is neither in the hub cache .* download it first"):
        open_images("hf:me/none", resnet)


def write_shard(path: Path, labels: Sequence[Any], end: str = "cls") -> None:
    """A tar shard of pictures with these labels, as texts, or in JSON."""
    with tarfile.open(path, "w") as archive:
        for i, label in enumerate(labels):
            beside = json.dumps({"label": label}) if end == "json" else label
            for suffix, content in (("png", encoded(picture(i, 3))), (end, beside.encode())):
                member = tarfile.TarInfo(f"{i:03}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_labels_that_are_texts_are_numbered_by_name(tmp_path: Path, kind: str) -> None:
    for name, labels in (("train", ["b", "c", "b"]), ("val", ["a", "c"])):
        table = arrow.table({"image": [encoded(picture(i, 3)) for i in range(len(labels))], "label": labels})
        if kind == "parquet":
            parquet.write_table(table, tmp_path / f"{name}.parquet")
        else:
            write_shard(tmp_path / f"{name}.tar", labels, "cls" if name == "train" else "json")
    data = open_images(tmp_path, size=12)
    assert ([int(data.train(i)["targets"]) for i in range(3)], data.classes) == ([1, 2, 1], 3)
    assert [int(data.val(i)["targets"]) for i in range(2)] == [0, 2]


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["0", "cat"], "001.png of .* has the class 'cat'; classes are numbers from 0, or all of them texts"),
        (["-1", "-2"], "has the class '-1'; classes are numbers from 0"),
        (["a", ""], r"001.png of .* has no class in a file of the same name: NAME.cls, or NAME.json"),
        ([0, [1]], r"json beside 001.png of .* has cls, label or class \[1\]; write a number or a text"),
        ([1.5], "has the class '1.5'; classes are numbers from 0"),
    ],
)
def test_classes_of_shards_that_are_refused(tmp_path: Path, labels: list[Any], says: str) -> None:
    write_shard(tmp_path / "a.tar", labels, "cls" if isinstance(labels[0], str) else "json")
    with pytest.raises(JobError, match=says):
        open_images(tmp_path, size=12)


@pytest.mark.parametrize("label", [-1, None, 0.5, ["x"]])
def test_labels_of_other_kinds_are_refused(tmp_path: Path, label: Any) -> None:
    """-1 is the label of test splits without labels."""
    images, labels = [encoded(picture(i, 3)) for i in range(2)], [label, label] if label != -1 else [1, -1]
    parquet.write_table(arrow.table({"image": images, "label": labels}), tmp_path / "a.parquet")
    said = f"of {tmp_path}/a.parquet has the label {label!r}; labels are numbers from 0, or texts"
    with pytest.raises(JobError, match=re.escape(said)):
        open_images(tmp_path, size=12)


def test_hidden_files_are_left_out_and_a_class_may_be_named_train(tmp_path: Path) -> None:
    for path in ("bus/1.png", "train/2.png", "train/.cache/3.png", "train/._4.png", ".git/5.png", "bus/note.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(encoded(picture(1)) if path[-5] in "12" else b"no image")
    data = open_images(tmp_path, size=6)
    assert sorted(int(data.train(i)["targets"]) for i in range(data.train_len)) == [0, 1]
    with pytest.raises(JobError, match=r"note.txt has no folder for a class; images are in FOLDER/CLASS/NAME.jpg"):
        open_images(tmp_path / "bus/note.txt", size=6)


def test_a_model_has_an_output_for_each_folder(tmp_path: Path) -> None:
    def outputs(source: str, **images: Any) -> tuple[int, int]:
        data = {"source": str(tmp_path / source), "images": {"size": 12, **images}}
        vit, resnet = (
            resolve(parse_job({"model": model, "data": data})).model
            for model in ({"family": "vit", "dim": 8, "layers": 1, "heads": 2}, {"family": "resnet", "layers": 18})
        )
        return vit.outputs, resnet.args["classes"]

    for path in (*(f"split/{part}/{name}/1.JPG" for part in ("train", "val") for name in "abcde"), "flat/a/1.png",
                 "flat/b/2.png", "flat/.cache/3.png", "shards/train/000.tar", "shards/val/000.tar"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert (outputs("split"), outputs("flat")) == ((5, 5), (2, 2))
    assert outputs("shards") == outputs("flat", format="tar") == outputs("elsewhere") == (10, 1000)
    given = parse_job({"model": {"shape": "vit-tiny", "vocab": 7}, "data": {"source": str(tmp_path / "flat")}})
    assert resolve(given).model.outputs == 7


def test_damaged_images_are_refused(tmp_path: Path) -> None:
    for content in (b"P6\n2)4 x", encoded(picture(1, 3))[:60], b""):
        with pytest.raises(JobError, match=r"a.ppm is not an image that Pillow can read: [^<>]+$"):
            decoded_images.decode(content, "a.ppm")


def test_held_out_images_of_one_folder_are_of_all_classes(tmp_path: Path) -> None:
    for i in range(40):
        path = tmp_path / ("a" if i < 20 else "b") / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(picture(i)))
    data = open_images(tmp_path, size=6)
    assert (data.train_len, data.val_len) == (36, 4)
    seen = {data.train(i)["inputs"].tobytes() for i in range(36)} | {data.val(i)["inputs"].tobytes() for i in range(4)}
    assert len(seen) == 40
    assert data.train(0)["inputs"].shape == (1, 6, 6)


def test_augmentation_is_a_function_of_seed_image_and_epoch(tmp_path: Path) -> None:
    options = {"crop": 0.3, "flip": 0.5, "shift": 2, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}
    source = write_idx(tmp_path)
    first, second = (open_images(source, {"module": "m:M", "vocab": 3}, **options) for _ in "ab")
    order = [(i, epoch) for i in range(20) for epoch in (0, 1)]
    one = {at: first.train(*at) for at in order}
    two = {at: second.train(*at) for at in reversed(order)}
    assert all(np.array_equal(one[at][key], two[at][key]) for at in order for key in ("inputs", "targets"))
    assert sum(np.array_equal(one[i, 0]["inputs"], one[i, 1]["inputs"]) for i in range(20)) < 3
    assert all(np.isclose(sample["targets"].sum(), 1) for sample in one.values())
    assert first.val(0)["targets"].dtype == np.int64


def test_operations_have_their_definitions() -> None:
    pixels = picture(3, 3, 20)
    wide = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    wanted = F.interpolate(wide, (9, 7), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    assert np.abs(augment.resized(pixels, 9, 7) - wanted.numpy()).max() <= 1
    assert augment.fitted(pixels[:10], 5).shape == (5, 5, 3)
    moved = augment.shifted(pixels, 2, -3)
    assert np.array_equal(moved[2:, :-3], pixels[:-2, 3:])
    assert not moved[:2].any()
    a, b = (augment.plain(picture(i), ImageData()) for i in (1, 2))
    mix, share = augment.mixed(a, b, ImageData(mixup=1.0), np.random.default_rng(1))
    assert np.allclose(mix, share * a + (1 - share) * b, atol=1e-6)
    cut, share = augment.mixed(a, b, ImageData(cutmix=1.0), np.random.default_rng(5))
    assert share == pytest.approx(float((cut == a).mean()), abs=0.02)
    for seed in range(20):
        top, left, height, width = augment.crop_box(30, 20, 0.1, np.random.default_rng(seed))
        assert 0 <= top <= 30 - height
        assert 0 <= left <= 20 - width
        assert height * width >= 0.08 * 600


def test_sizes_and_strengths_are_those_of_torchvision() -> None:
    """Resize, center_crop and solarize round as torchvision.transforms does."""
    for height, width, size in ((375, 500, 256), (7, 12, 5), (33, 10, 7), (20, 20, 20), (3, 5, 8)):
        image = np.random.default_rng(1).integers(0, 256, (height, width, 1), dtype=np.uint8)
        short, long = sorted((height, width))
        sides = (size, int(size * long / short)) if height <= width else (int(size * long / short), size)
        top, left = (round((side - size) / 2.0) for side in sides)
        wanted = augment.resized(image, *sides)[top : top + size, left : left + size]
        assert np.array_equal(augment.fitted(image, size), wanted)
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    for bins in (image_operations.RANDAUGMENT_BINS, image_operations.AUTOAUGMENT_BINS):
        for level, threshold in enumerate(torch.linspace(255.0, 0.0, bins + 1).tolist()):
            wanted = np.where(pixels < threshold, pixels, 255 - pixels)
            assert np.array_equal(image_operations.apply_operations(pixels, [("solarize", level / bins)]), wanted)


def test_synthetic_images_are_augmented(tmp_path: Path) -> None:
    vit = {"family": "vit", "dim": 16, "layers": 1, "heads": 2, "patch": 4, "vocab": 3}
    raw = {"model": vit, "data": {"source": "synthetic", "seq_len": 4, "images": {"mixup": 0.8, "cutmix": 1.0}}}
    data = open_dataset(resolve(parse_job(raw)))
    sample = data.train(3)
    assert sample["inputs"].shape == (4, 48)
    assert sample["targets"].shape == (3,)
    assert int(data.val(3)["targets"]) < 3


def test_means_are_of_each_colour(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data.images.mean=\[0.1, 0.2\] has 2 values, and images have 1 colours"):
        open_images(write_idx(tmp_path), mean=[0.1, 0.2])


@pytest.mark.parametrize("model", [{"module": "m:M"}, {"family": "resnet", "layers": 18, "vocab": 3}])
def test_the_loss_of_mixed_images_is_cross_entropy(model: dict[str, Any]) -> None:
    """Their targets are probabilities, which auto would take for values of a regression."""
    for images, loss in (({"mixup": 0.2}, "cross_entropy"), ({"cutmix": 1}, "cross_entropy"), ({"flip": 0.5}, "auto")):
        job = resolve(parse_job({"model": model, "data": {"source": "images", "images": images}}))
        assert job.model.loss == loss
    given = {**model, "loss": "bce"}
    assert resolve(parse_job({"model": given, "data": {"images": {"mixup": 1}}})).model.loss == "bce"


def test_synthetic_images_for_a_resnet() -> None:
    data = open_images("synthetic", {"family": "resnet", "layers": 18, "vocab": 7}, size=8)
    assert data.train(3)["inputs"].shape == (3, 8, 8)
    assert 0 <= int(data.train(3)["targets"]) < 7


def test_patches_for_a_vit(tmp_path: Path) -> None:
    source, vit = write_idx(tmp_path), {"family": "vit", "dim": 16, "layers": 1, "heads": 2, "patch": 6, "channels": 1}
    raw = {"model": {**vit, "vocab": 3}, "data": {"source": str(source), "seq_len": 4}}
    assert open_dataset(resolve(parse_job(raw))).train(0)["inputs"].shape == (4, 36)
    sized = {"model": {**vit, "vocab": 3, "class_token": True}, "data": {"source": str(source), "images": {"size": 18}}}
    assert open_dataset(resolve(parse_job(sized))).train(0)["inputs"].shape == (10, 36)
    sized["data"]["images"] = {"size": 20}  # type: ignore[index]
    with pytest.raises(JobError, match=r"has 20 × 20 pixels, which .* do not divide; 18 × 18 pixels would work"):
        open_dataset(resolve(parse_job(sized)))
    raw["data"]["seq_len"] = 16  # type: ignore[index]
    with pytest.raises(JobError, match=r"has 4 patches of model.patch=6; write data.seq_len=4"):
        open_dataset(resolve(parse_job(raw)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: (p / FILES[0]).write_bytes(b"\0\0\x08\x03\0\0"), "is damaged: it has"),
        (lambda p: (p / FILES[0]).write_bytes(b"hello"), "is not an idx file of bytes"),
        (lambda p: write_idx(p / "x", (4, 2)).joinpath(FILES[1]).rename(p / FILES[1]), "pixels for"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    write_idx(tmp_path)
    change(tmp_path)
    with pytest.raises(JobError, match=says):
        open_images(tmp_path)


def test_models_that_take_no_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"gives images, and model.family llama does not take them"):
        open_images(write_idx(tmp_path), {"shape": "tiny"})
    with pytest.raises(JobError, match=r"has 3 classes, and the model 2; write model.vocab=3"):
        open_images(tmp_path, {"module": "m:M", "vocab": 2})


def test_operations_of_augmentation_are_those_of_pillow() -> None:
    pixels = picture(4, 3, 24)
    image = Image.fromarray(pixels)
    expected = {
        ("rotate", -0.5): image.rotate(-15),
        ("translate_x", 0.9): image.transform(image.size, Image.Transform.AFFINE, (1, 0, 9, 0, 1, 0)),
        ("shear_y", 1.0): image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, 0.3, 1, 0)),
        ("color", 0.4): ImageEnhance.Color(image).enhance(1.36),
        ("sharpness", -1.0): ImageEnhance.Sharpness(image).enhance(0.1),
        ("posterize", -1.0): ImageOps.posterize(image, 4),
        ("solarize", 0.2): ImageOps.solarize(image, 204),
        ("equalize", 0.0): ImageOps.equalize(image),
        ("invert", 1.0): ImageOps.invert(image),
    }
    for (name, share), made in expected.items():
        assert np.array_equal(image_operations.apply_operations(pixels, [(name, share)]), np.asarray(made)), name
    for name in image_operations.RANDAUGMENT[:10]:  # a strength of 0 changes nothing
        assert np.array_equal(image_operations.apply_operations(pixels, [(name, 0.0)]), pixels), name
    for name in image_operations.OPERATIONS:
        assert image_operations.apply_operations(picture(1, 1, 9), [(name, 0.7)]).shape == (9, 9, 1)


@pytest.mark.parametrize("option", [{"autoaugment": True}, {"randaugment": 2, "magnitude": 12}])
def test_drawn_operations_are_the_same_in_every_run(tmp_path: Path, option: dict[str, Any]) -> None:
    source = write_idx(tmp_path)
    first, second, plain = (open_images(source, **given) for given in (option, option, {"size": 12}))
    pairs = [(i, epoch) for i in range(20) for epoch in (0, 1)]
    assert all(np.array_equal(first.train(*at)["inputs"], second.train(*at)["inputs"]) for at in pairs)
    assert sum(not np.array_equal(first.train(*at)["inputs"], plain.train(*at)["inputs"]) for at in pairs) > 10

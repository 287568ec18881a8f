"""No link and no special file of a checkpoint's folder leads to a file outside it; links of the hub cache are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.command import Output

import weft
from weft.extensions.pretrained.checkpoint_folder import SIDE_FILES, find_folder
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.job.errors import JobError
from weft.job.files.checked_files import checked_file
from weft.training.export import ExportOptions, export_run, newest

STORIES = Path(__file__).parents[3] / "recipes" / "stories260K"
HASH = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(STORIES, tmp_path / "published")
    (tmp_path / "secret").write_text('{"secret": 1}')
    return tmp_path / "published"


@pytest.mark.parametrize(
    "name", [*SIDE_FILES, "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"]
)
def test_links_out_of_the_folder_are_refused(
    name: str, folder: Path, tmp_path: Path, in_process: Callable[..., Output]
) -> None:
    """`weft import` ends with one sentence and exit code 2, and leaves nothing behind."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    done = in_process(tmp_path, "import", "published")
    assert done.code == 2 and f"{name} is a link to {tmp_path}/secret, which is not in its folder" in done.err
    assert "\n" not in done.err.strip() and not (tmp_path / "runs").exists()
    with pytest.raises(JobError, match="which is not in its folder"):
        weft.from_hf(str(folder))


def chain(folder: Path) -> None:
    (folder / "first").symlink_to("../secret")
    (folder / "vocab.json").symlink_to("first")


def relative_folder(folder: Path) -> None:
    (folder / "sub").symlink_to("..")
    (folder / "vocab.json").symlink_to("sub/secret")


def device(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("/dev/zero")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "vocab.json")


def loop(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("vocab.json")


def dangling(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("nowhere")


def huge(folder: Path) -> None:
    with (folder / "vocab.json").open("wb") as file:
        file.truncate(1 << 40)


def shard_of_a_link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "weights")
    (folder / "shard.safetensors").symlink_to("../weights")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))


def tokenizer_of_llama2c(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tok512.bin").symlink_to("../secret")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (chain, "vocab.json is a link to .*/secret, which is not in its folder"),
        (relative_folder, "vocab.json is a link to .*/secret, which is not in its folder"),
        (device, "vocab.json is a link to /dev/zero, which is not in its folder"),
        (pipe, "vocab.json is not a regular file"),
        (loop, "vocab.json cannot be read"),
        (dangling, "vocab.json is a link to a file that does not exist"),
        (huge, "vocab.json has 1,099,511,627,776 bytes, more than"),
        (shard_of_a_link, "shard.safetensors is a link to .*/weights, which is not in its folder"),
        (tokenizer_of_llama2c, "tok512.bin is a link to .*/secret, which is not in its folder"),
    ],
)
def test_other_ways_out(change: Callable[[Path], None], message: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(JobError, match=message) as refused:
        weft.from_hf(str(folder))
    assert "\n" not in str(refused.value)


def test_links_within_the_folder_and_to_it(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    assert weft.from_hf(str(tmp_path / "link"))


def as_cache(folder: Path) -> Path:
    """Move the files of a folder into a repository of the hub cache; returns its snapshot."""
    repository = folder.parent / "hub" / "models--someone--stories"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_links_of_the_hub_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lead to blobs of their own repository; a blob that is a link itself, and a name that is no hash, do not."""
    snapshot = as_cache(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find_folder("someone/stories") == snapshot
    import_run("someone/stories", "imported", str(tmp_path / "runs"))
    blobs = snapshot.parents[1] / "blobs"
    (blobs / HASH).symlink_to(tmp_path / "secret")
    (blobs / "id_rsa").write_text("secret")
    for target in (HASH, "id_rsa"):
        (snapshot / "vocab.json").symlink_to(f"../../blobs/{target}")
        with pytest.raises(JobError, match="which is not in its folder"):
            find_folder("someone/stories")
        (snapshot / "vocab.json").unlink()


def test_export_copies_no_link_of_a_run(folder: Path, tmp_path: Path) -> None:
    """The folder of a run may come from someone else too."""
    run, _, _ = import_run(str(folder), "imported", str(tmp_path / "runs"))
    (run.path / "pretrained" / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(JobError, match=r"vocab\.json is a link to .*/secret, which is not in its folder"):
        export_run(run, newest(run), "hf", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out" / "vocab.json").exists()


def test_checkpoints_of_other_libraries(folder: Path, tmp_path: Path) -> None:
    """A file of a universal checkpoint, and a folder of one, that are links."""
    run, _, _ = import_run(str(folder), "imported", str(tmp_path / "runs"))
    export_run(run, newest(run), "deepspeed", tmp_path / "out", ExportOptions())
    zero = next(tmp_path.glob("out/*/zero"))
    norm = zero / "model.norm.weight"
    torch.save({"param": torch.zeros(64)}, tmp_path / "outside.pt")
    (norm / "fp32.pt").unlink()
    (norm / "fp32.pt").symlink_to(tmp_path / "outside.pt")
    with pytest.raises(JobError, match=r"fp32\.pt is a link to .*/outside.pt, which is not in its folder"):
        import_run(str(tmp_path / "out"), "again", str(tmp_path / "runs"))
    shutil.rmtree(norm)
    (tmp_path / "folder").mkdir()
    (tmp_path / "outside.pt").rename(tmp_path / "folder" / "fp32.pt")
    norm.symlink_to(tmp_path / "folder")
    with pytest.raises(JobError, match="which is not in its folder"):
        import_run(str(tmp_path / "out"), "again", str(tmp_path / "runs"))


def test_a_file_of_an_export_is_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Metadata of a checkpoint may name any file as its tokenizer: one that is none is not copied into an export."""
    run, _, _ = import_run(str(folder), "imported", str(tmp_path / "runs"))
    found = newest(run)
    found.meta["job"]["data"]["tokenizer"] = str(tmp_path / "secret")
    with pytest.raises(JobError, match="secret is not a tokenizer"):
        export_run(run, found, "dcp", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_is_not_there_is_no_file(tmp_path: Path) -> None:
    assert checked_file(tmp_path / "nothing") is None

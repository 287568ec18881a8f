"""The files of a Hugging Face dataset: of `datasets.save_to_disk`, or of a name in the local caches (`hf:ORG/NAME`)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.data.formats.hub_cache import cached_snapshot, hf_home, hub_cache
from weft.data.formats.record_files import RECORD_FORMATS, record_format
from weft.job.errors import JobError

SPLITS_FILE, STATE_FILE, INFO_FILE, CARD = "dataset_dict.json", "state.json", "dataset_info.json", "README.md"
MAX_STATE_BYTES = 1 << 24
HUB_PREFIX = "hf:"
_SOURCE = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?(?::([\w.-]+))?")
_SPLIT_WORDS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
"""Words in the path of a file that mean a split, as in the `datasets` library."""
_PLAIN = (".jsonl", ".ndjson", ".txt")


def hub_dataset_files(source: str) -> list[Path]:
    """The files of `hf:ORG/NAME`, `hf:ORG/NAME/CONFIG` or `hf:ORG/NAME/CONFIG:SPLIT` (default: train) in the local
    caches: of the downloaded repository, or of what `datasets.load_dataset` has prepared from it."""
    match = _SOURCE.fullmatch(source)
    if match is None or ".." in source:
        raise JobError(f"data.source {source} is no name of a dataset; write hf:ORG/NAME, hf:ORG/NAME/CONFIG:SPLIT")
    name, config, split = match[1], match[2], match[3] or "train"
    folder = cached_snapshot("datasets", name, Path.is_dir)
    found = [] if folder is None else _repository_files(folder, source, config, split)
    found = found or _prepared_files(name, source, config, split)
    if not found and folder is not None:
        raise JobError(
            f"data.source {source}: {folder} has no files of the split {split} that Weft reads "
            f"({' '.join([*_PLAIN, *RECORD_FORMATS])})"
        )
    if not found:
        raise JobError(
            f"data.source {source} is neither in the hub cache {hub_cache()} nor in {_prepared_cache()}; download it "
            f"first, for example with `hf download --repo-type dataset {name}`"
        )
    return found


def _repository_files(folder: Path, source: str, config: str | None, split: str) -> list[Path]:
    """The files of a split in a downloaded repository: as its card lists them, else by the words in their paths."""
    configs = _card_configs(folder / CARD)
    if configs:
        names = [str(each.get("config_name", "default")) for each in configs]
        if config is None and len(configs) > 1 and "default" not in names:
            raise JobError(f"data.source {source} has the configs {', '.join(names)}; write {source}/{names[0]}")
        wanted = config or ("default" if "default" in names else names[0])
        if wanted not in names:
            raise JobError(f"data.source {source}: its configs are {', '.join(names)}")
        chosen = configs[names.index(wanted)]
        below = folder / str(chosen.get("data_dir") or "")
        if "data_files" in chosen:
            return _matching(folder, _patterns(chosen["data_files"], split))
        return _split_files(_data_files(below), below, split)
    below = folder / config if config else folder
    if not below.is_dir():
        raise JobError(f"data.source {source}: the dataset has no folder {config}")
    return _split_files(_data_files(below), below, split)


def _card_configs(card: Path) -> list[dict[str, Any]]:
    """`configs` in the front matter of a dataset's card."""
    if not card.is_file() or card.stat().st_size > MAX_STATE_BYTES:
        return []
    head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        found = yaml.safe_load(head[1]) if head else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    listed = found.get("configs") if isinstance(found, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _patterns(listed: Any, split: str) -> list[str]:
    """The patterns of a split in `data_files`: a text or list of the split train, or texts and lists by split."""
    if isinstance(listed, dict):
        listed = [{"split": key, "path": value} for key, value in listed.items()]
    if isinstance(listed, str):
        listed = [listed]
    out: list[str] = []
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict) and each.get("split") == split:
            paths = each.get("path")
            out += [paths] if isinstance(paths, str) else [str(path) for path in paths or ()]
        elif isinstance(each, str) and split == "train":
            out.append(each)
    return out


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    root = folder.absolute()
    safe = [p for p in patterns if not (".." in p or p.startswith("/"))]
    return list(dict.fromkeys(path for pattern in safe for path in sorted(root.glob(pattern)) if path.is_file()))


def _data_files(below: Path) -> list[Path]:
    found = [path for path in below.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sorted(path for path in found if path.name.lower().endswith(_PLAIN) or record_format(path) is not None)


def _split_files(files: Sequence[Path], below: Path, split: str) -> list[Path]:
    """The files with a word of the split in their path; all of them are of train if none has a word of any split."""

    def has(path: Path, words: Sequence[str]) -> bool:
        text = path.relative_to(below).as_posix().lower()
        return re.search(rf"(^|[._\-/ 0-9])({'|'.join(words)})([._\-/ 0-9]|$)", text) is not None

    mine = [path for path in files if has(path, _SPLIT_WORDS.get(split, (split,)))]
    named = any(has(path, words) for path in files for words in _SPLIT_WORDS.values())
    return mine if named or split != "train" else list(files)


def _prepared_cache() -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets").expanduser()


def _prepared_files(name: str, source: str, config: str | None, split: str) -> list[Path]:
    """Arrow files that `load_dataset` has written: NAME/CONFIG/VERSION/HASH/*-SPLIT*.arrow, of the newest version."""
    key = name.replace("/", "___")
    folders = [p for p in (_prepared_cache() / key, _prepared_cache() / key.lower()) if p.is_dir()]
    infos = [info for folder in folders[:1] for info in folder.glob(f"*/*/*/{INFO_FILE}")]
    configs = sorted({info.parents[2].name for info in infos})
    if config is not None:
        infos = [
            info
            for info in infos
            if info.parents[2].name in (config, *(c for c in configs if c.startswith(f"{config}-")))
        ]
    elif len(configs) > 1:
        raise JobError(f"data.source {source} has the configs {', '.join(configs)}; write {source}/{configs[0]}")
    if not infos:
        return []
    newest = max(infos, key=lambda info: info.stat().st_mtime).parent
    return [
        p for p in sorted(newest.glob("*.arrow")) if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", p.name)
    ]


def dataset_files(folder: Path) -> list[Path]:
    """The files of a saved dataset; empty where the folder is none."""
    if (folder / SPLITS_FILE).is_file():
        splits = _read(folder / SPLITS_FILE).get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        if "train" not in names:
            raise JobError(
                f"{folder} has the splits {', '.join(names) or 'none'} and no train; name the folder of one, such as "
                f"{folder / (names[0] if names else 'train')}"
            )
        folder = folder / "train"
    if not (folder / STATE_FILE).is_file():
        return []
    listed = _read(folder / STATE_FILE).get("_data_files")
    if not isinstance(listed, list):
        return []
    names = [str(each.get("filename")) if isinstance(each, dict) else "" for each in listed]
    for name in names:
        if not name or Path(name).name != name or not (folder / name).is_file():
            raise JobError(f"{folder / STATE_FILE} lists {name!r}, which is no file of its folder")
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}

"""Files that a job names directly: tokenized once, into a token store below the cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path

from weft.data.build_store import build, build_settings
from weft.data.cache_folder import cache_folder
from weft.data.formats.huggingface_datasets import HUB_PREFIX
from weft.data.shard_patterns import first_missing
from weft.job.data_files.token_files import META
from weft.job.errors import JobError, MachineError
from weft.job.schema import Data


def settings_hash(data: Data, source: str, format: str) -> str:
    """Identifies the files of a source and how they are encoded."""
    if not source.startswith(HUB_PREFIX) and (missing := first_missing(Path(source))) is not None:
        raise JobError(f"data.source: there is no file or folder {missing}, which data.format={format} would read")
    settings = build_settings([source], data.tokenizer, data.field, format, data.template)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def prepared_store(data: Data, source: str, format: str) -> Path:
    """The token store of some files. The first process that asks builds it, others on the machine wait.

    It is built again when a file, the tokenizer or the template changes.
    """
    out = cache_folder("tokens") / settings_hash(data, source, format)
    if (out / META).is_file():
        return out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{out}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (out / META).is_file():
                build(source, out, data.tokenizer, workers=1, field=data.field, format=format, template=data.template)
    except OSError as error:
        raise MachineError(f"data.source {source} cannot be tokenized into {out}: {error}") from error
    return out

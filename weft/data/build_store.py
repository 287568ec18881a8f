"""`weft data build`: text to a token store, in parallel, resumable after a kill at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import store
from weft.data.build_part import (
    RecordLayout,
    part_is_complete,
    part_path,
    read_part,
    rename_durable,
    write_atomic,
    write_part,
)
from weft.data.build_sources import PART_BYTES, Part, SourceFile, find_files, read_range, split_into_parts, texts
from weft.data.chat.template import load_template
from weft.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe
from weft.job.data_files import token_files
from weft.job.errors import JobError, MachineError, describe_file_error

SETTINGS = "build.json"
# a vocabulary trained on this much text hardly changes with more
_TRAIN_BYTES = 128 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BuildResult:
    """Result of a build."""

    tokens: int
    documents: int
    vocab: int
    path: Path
    seconds: float


def build(
    sources: str | Path | Sequence[str | Path], out: str | Path, tokenizer: str | Path = "bytes",
    workers: int | None = None, field: str = "text", progress: Progress | None = None, part_bytes: int = PART_BYTES,
    format: str = "text", template: str | None = None,
) -> BuildResult:  # fmt: skip
    """Build the token store `out` from text files (a file is a document), .jsonl files and tables (a line or row is
    one) and folders. `format` is text, or chat or instruction for conversations, which a chat template writes.

    Finished parts are kept in out/.parts, so the same call continues an interrupted build and gives the same bytes.
    `progress` is called with (bytes done, bytes in total). More than one worker uses a pool of spawned processes: a
    script that calls this must guard its entry with `if __name__ == "__main__":`.
    """
    began = time.perf_counter()
    out = Path(out)
    if workers is not None and workers < 1:
        raise JobError(f"workers must be at least 1, not {workers}")
    names = [str(sources)] if isinstance(sources, str | Path) else [str(x) for x in sources]
    try:
        files = find_files(names, out)
        layout = record_layout(files, str(tokenizer), field, format, template)
        settings = _settings(files, str(tokenizer), layout, part_bytes)
        with _locked_folder(out, settings) as folder:
            if not (out / token_files.META).exists():
                spec = _prepare_tokenizer(folder, files, str(tokenizer), field, part_bytes)
                parts = split_into_parts(files, part_bytes)
                _encode_parts(parts, folder, spec, layout, workers, progress)
                _assemble(out, folder, len(parts), spec, names, layout.masked)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        why = describe_file_error(error)
        raise MachineError(f"the store {out} could not be built: {why}; fix this and run the build again") from error
    meta = store.open_store(out).meta
    if progress:
        progress(total := sum(f.size for f in files), total)
    return BuildResult(meta.tokens, meta.documents, meta.vocab, out, time.perf_counter() - began)


def build_settings(
    sources: Sequence[str], tokenizer: str, field: str, format: str, template: str | None
) -> dict[str, Any]:
    """Everything that determines the bytes of the store of these sources."""
    files = find_files(sources, Path(os.devnull))
    return _settings(files, tokenizer, record_layout(files, tokenizer, field, format, template), PART_BYTES)


def record_layout(
    files: Sequence[SourceFile], tokenizer: str, field: str, format: str, template: str | None
) -> RecordLayout:
    """How the records of these files are encoded; a chat template is loaded once, here."""
    if format == "text":
        return RecordLayout(field)
    if plain := [file.path for file in files if file.kind == "text"]:
        raise JobError(f"{plain[0]} has no records, which the format {format} needs; write .jsonl or .parquet")
    if bpe_size(tokenizer) is not None:
        raise JobError(f"tokenizer {tokenizer!r} has no chat template; name the folder of a tokenizer.json, or bytes")
    loaded = load_tokenizer(tokenizer)
    path = tokenizer if tokenizer == "bytes" else str(token_files.find_tokenizer(tokenizer))
    found = load_template(path, template, loaded.decode_special(loaded.eos))
    return RecordLayout(field, format, found.source, tuple(sorted(found.tokens.items())))


def _settings(files: Sequence[SourceFile], tokenizer: str, layout: RecordLayout, part_bytes: int) -> dict[str, Any]:
    """Everything that determines the bytes of a store; a build continues one with equal settings."""
    if tokenizer != "bytes" and bpe_size(tokenizer) is None:
        load_tokenizer(tokenizer)
        tokenizer = "sha256:" + hashlib.sha256(token_files.find_tokenizer(tokenizer).read_bytes()).hexdigest()
    listing = json.dumps([astuple(f) for f in files]).encode()
    return {
        "format": token_files.FORMAT,
        "tokenizer": tokenizer,
        "field": layout.field,
        **({"conversations": layout.format, "template": _template_hash(layout)} if layout.masked else {}),
        "part_bytes": part_bytes,
        "files": len(files),
        "bytes": sum(f.size for f in files),
        "listing": hashlib.sha256(listing).hexdigest(),
    }


def _template_hash(layout: RecordLayout) -> str:
    return hashlib.sha256(json.dumps([layout.template, layout.tokens]).encode()).hexdigest()


@contextlib.contextmanager
def _locked_folder(out: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """Lock `out` for this build; refuses a folder with other contents, another build, or a running one."""
    if out.exists() and not out.is_dir():
        raise JobError(f"{out} is a file; a token store is a folder, choose another --out")
    if out.is_dir() and any(out.iterdir()) and not store.is_store(out):
        raise JobError(f"the folder {out} holds other things; choose a new or an empty one for --out")
    if (out / token_files.META).exists():
        _same_settings(out, out / SETTINGS, settings)
    folder = out / token_files.PARTS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another build is writing {out}; wait for it or choose another --out") from None
        if (folder / SETTINGS).exists():
            _same_settings(out, folder / SETTINGS, settings)
        else:
            write_atomic(folder / SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())
        for leftover in folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        try:
            yield folder
        except JobError:
            # the sources are wrong and must change, so the build cannot continue
            shutil.rmtree(folder, ignore_errors=True)
            if not any(out.iterdir()):
                out.rmdir()
            raise


def _same_settings(out: Path, file: Path, settings: dict[str, Any]) -> None:
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    differ = [key for key in settings if before.get(key) != settings[key]]
    if not differ:
        return
    shown = [key for key in differ if key in before and key != "listing"]
    what = ", ".join(f"{key} was {before[key]!r} and is {settings[key]!r}" for key in shown)
    if not shown:
        what = "its source files have other names or were changed since" if before else f"it has no {SETTINGS}"
    raise JobError(f"{out} already holds a build that differs: {what}; choose another --out, or delete the folder")


def _prepare_tokenizer(folder: Path, files: Sequence[SourceFile], name: str, field: str, part_bytes: int) -> str:
    """Train or copy the tokenizer into the parts folder once; workers load it from there."""
    if name == "bytes":
        return name
    target = folder / token_files.TOKENIZER
    if not target.exists():
        size = bpe_size(name)
        if size is None:
            write_atomic(target, token_files.find_tokenizer(name).read_bytes())
        else:
            trained = train_bpe(_sample_texts(split_into_parts(files, part_bytes), field), size)
            write_atomic(target, trained.inner.to_str(pretty=True).encode())
    return str(target)


def _sample_texts(parts: Sequence[Part], field: str) -> Iterator[str]:
    """Texts to train a vocabulary on: all of a small corpus, evenly spaced parts of a large one."""
    total = sum(byte_range.size for part in parts for byte_range in part)
    for part in parts[:: -(-total // _TRAIN_BYTES) or 1]:
        for byte_range in part:
            if byte_range.kind != "text":
                yield from texts(byte_range, field)
            else:
                yield read_range(byte_range).decode("utf-8", "replace")


def _encode_parts(
    parts: Sequence[Part], folder: Path, spec: str, layout: RecordLayout, workers: int | None, progress: Progress | None
) -> None:
    """Write every part that is not there yet."""
    tokenizer = load_tokenizer(spec)
    dtype = store.token_dtype(tokenizer.vocab)
    sizes = [sum(byte_range.size for byte_range in part) for part in parts]
    numbers = range(len(parts))
    todo = [number for number in numbers if not part_is_complete(part_path(folder, number), dtype, layout.masked)]
    done = sum(sizes) - sum(sizes[number] for number in todo)
    if progress:
        progress(done, sum(sizes))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or cores, len(todo))
    jobs = [(number, parts[number], part_path(folder, number), layout) for number in todo]
    for number in _one_by_one(jobs, tokenizer) if workers <= 1 else _in_pool(jobs, spec, workers):
        done += sizes[number]
        if progress:
            progress(done, sum(sizes))


_PartJob = tuple[int, Part, Path, RecordLayout]


def _one_by_one(jobs: Sequence[_PartJob], tokenizer: Tokenizer) -> Iterator[int]:
    for number, part, target, layout in jobs:
        write_part(target, part, tokenizer, layout)
        yield number


def _in_worker(job: _PartJob, spec: str) -> int:
    number, part, target, layout = job
    write_part(target, part, _loaded_once(spec), layout)
    return number


@cache
def _loaded_once(spec: str) -> Tokenizer:
    """A worker lives for one build, so the file behind spec cannot change under this cache."""
    return load_tokenizer(spec)


def _in_pool(jobs: Sequence[_PartJob], spec: str, workers: int) -> Iterator[int]:
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    waiting: set[Future[int]] = set()
    try:
        for job in jobs:
            # a corpus may have a hundred thousand parts; only a few are queued
            if len(waiting) >= 4 * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
            waiting.add(pool.submit(_in_worker, job, spec))
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        raise MachineError(
            "a worker of the build died (out of memory, or a script without `if __name__ == '__main__':`); "
            "run it again with fewer --workers, it will continue"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        # workers of a killed build would otherwise wait for work forever
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _assemble(out: Path, folder: Path, parts: int, spec: str, names: list[str], masked: bool) -> None:
    """Join the parts in order; meta.json comes last, so a folder that has it is complete."""
    tokenizer = load_tokenizer(spec)
    dtype = store.token_dtype(tokenizer.vocab)
    total = documents = 0
    written = [token_files.TOKENS, token_files.DOCS, *([token_files.MASK] if masked else [])]
    crcs = dict.fromkeys(written, 0)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.tmp").open("wb")) for name in written}

        def append(name: str, data: bytes) -> None:
            files[name].write(data)
            crcs[name] = zlib.crc32(data, crcs[name])

        append(token_files.DOCS, np.zeros(1, dtype="<i8").tobytes())
        for number in range(parts):
            ends, tokens, mask = read_part(part_path(folder, number), dtype)
            append(token_files.TOKENS, tokens.tobytes())
            append(token_files.DOCS, (ends + total).astype("<i8").tobytes())
            if masked:
                append(token_files.MASK, mask.tobytes())
            total += tokens.size
            documents += ends.size
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not documents:
        raise JobError(f"there is no document in {', '.join(names)}; a store needs at least one")
    for name in written:
        rename_durable(folder / f"{name}.tmp", out / name)
    if spec != "bytes":
        data = Path(spec).read_bytes()
        crcs[token_files.TOKENIZER] = zlib.crc32(data)
        write_atomic(out / token_files.TOKENIZER, data, folder)
    write_atomic(out / SETTINGS, (folder / SETTINGS).read_bytes(), folder)
    meta = token_files.StoreMeta(
        format=token_files.FORMAT,
        vocab=tokenizer.vocab,
        dtype=dtype.name,
        tokens=total,
        documents=documents,
        tokenizer="bytes" if spec == "bytes" else token_files.TOKENIZER,
        eos=tokenizer.eos,
        crc32=crcs,
        source=names,
    )
    write_atomic(out / token_files.META, meta.to_json().encode(), folder)

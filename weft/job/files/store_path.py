"""Paths in an object store (s3://bucket/prefix), with the part of pathlib.Path that checkpoints and nodes use."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from weft.job.errors import JobError, MachineError, file_named

URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
PACKAGES = {"s3": ("s3fs", "weft[s3]"), "s3a": ("s3fs", "weft[s3]"), "gs": ("gcsfs", "weft[gcs]"),
            "gcs": ("gcsfs", "weft[gcs]")}  # fmt: skip
"""By scheme, the package that reads it and what to install; other schemes of fsspec work where it finds their own."""
BLOCK_BYTES = 8 << 20
"""Bytes of a request when a file is read; the parts of an upload have the size that the package chooses."""


class StorePath:
    """An object or prefix of a store. Folders need not be created, and errors of the store are OSErrors."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def parent(self) -> StorePath:
        return StorePath(self.url.rsplit("/", 1)[0])

    @property
    def stem(self) -> str:
        return self.name.rsplit(".", 1)[0]

    def with_name(self, name: str) -> StorePath:
        return self.parent / name

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"StorePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """fsspec's file system and the path in it."""
        import fsspec

        return fsspec.core.url_to_fs(self.url, use_listings_cache=False)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[tuple[Any, str]]:
        """Errors of the store's package that are no OSErrors become OSErrors."""
        try:
            yield self._place
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a prefix exists as soon as an object has it."""

    def names(self) -> list[str]:
        """The names of all objects below this prefix, relative to it."""
        with self._errors() as (fs, path):
            base = fs._strip_protocol(path).rstrip("/") + "/"
            found = [fs._strip_protocol(name) for name in fs.find(path)]
            return sorted(name.removeprefix(base) for name in found if name.startswith(base))

    def iterdir(self) -> Iterator[StorePath]:
        yield from (self / name for name in sorted({name.split("/")[0] for name in self.names()}))

    def exists(self) -> bool:
        with self._errors() as (fs, path):
            return bool(fs.exists(path))

    def is_dir(self) -> bool:
        return bool(self.names())

    def size(self) -> int:
        with self._errors() as (fs, path):
            return int(fs.info(path)["size"])

    def open(self, mode: str = "rb") -> IO[Any]:
        """An object for reading, or for an upload that is complete when the file is closed."""
        options = {"block_size": BLOCK_BYTES} if "r" in mode else {}
        with self._errors() as (fs, path):
            return fs.open(path, mode, **options)

    def read_bytes(self) -> bytes:
        with self._errors() as (fs, path):
            return bytes(fs.cat_file(path))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        with self._errors() as (fs, path):
            fs.pipe_file(path, data)

    def unlink(self, missing_ok: bool = False) -> None:
        with self._errors() as (fs, path):
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise


AnyPath = Path | StorePath


def as_path(text: str | AnyPath) -> AnyPath:
    """A local path, also of file://, or the path in a store."""
    if not isinstance(text, str):
        return text
    if (url := URL.fullmatch(text)) is None:
        return Path(text)
    return Path(url[2]) if url[1] in ("file", "local") else StorePath(text)


def check_url(text: str) -> str:
    """Refuse, with a ValueError, a URL that no process could write a run's checkpoints to."""
    if (url := URL.fullmatch(text)) is None:
        return text
    if url[1] == "memory":
        raise ValueError(
            f"must not be {text}: each process of a run has its own memory://; use s3://, gs:// or a folder"
        )
    if url[1] in ("file", "local") and not url[2].startswith("/"):
        raise ValueError(f"must not be {text}: the path is absolute, as in file:///data/weft")
    if not url[2].strip("/"):
        raise ValueError(f"must not be {text}: a bucket is missing, as in {url[1]}://bucket/prefix")
    return text


def size_of(path: AnyPath) -> int:
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def copy_tree(source: StorePath, target: StorePath, last: str) -> None:
    """Copy all objects of a prefix inside the store, the one named `last` after the others."""
    names = sorted(source.names(), key=lambda name: name == last)
    for name in names:
        with source._errors() as (fs, _):
            fs.cp_file((source / name)._place[1], (target / name)._place[1])


def remove_tree(path: StorePath, first: str = "") -> None:
    """Delete all objects of a prefix, the one named `first` before the others."""
    if first:
        (path / first).unlink(missing_ok=True)
    for name in path.names():
        (path / name).unlink(missing_ok=True)


def create(path: AnyPath, content: bytes) -> bool:
    """Write a file that must not exist yet. Of several writers one gets True, and the content is complete at once."""
    if isinstance(path, StorePath):
        with path._errors() as (fs, at):
            try:
                fs.pipe_file(at, content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if "PreconditionFailed" in str(error) or "conditional" in str(error).lower():
                    return False
                raise
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".draft-{secrets.token_hex(8)}")
    try:
        with file_named(draft), os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # atomic, also over NFS
        except FileExistsError:
            # NFS may repeat a call whose answer was lost: then the file is ours after all
            return os.path.samefile(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return True


def replace(path: AnyPath, content: bytes) -> None:
    """Write a small file atomically, readable only by its owner."""
    if isinstance(path, StorePath):
        path.write_bytes(content)
        return
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)


def check_access(path: AnyPath, field: str) -> None:
    """Write, read and delete a small object, before any process starts. Raises a MachineError where that fails, and a
    JobError for a scheme that does not exist."""
    if not isinstance(path, StorePath):
        return
    scheme = path.url.split("://")[0]
    package, extra = PACKAGES.get(scheme, ("fsspec", "fsspec"))
    if importlib.util.find_spec(package) is None:
        raise MachineError(f"{field}={path}: {scheme}:// needs the package {package}: pip install '{extra}'")
    probe = path / f".access-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"weft")
        probe.unlink()
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError) and "rotocol" in str(cause):
            raise JobError(f"{field}={path}: {scheme}:// is not a known store; use s3://, gs:// or a folder") from None
        if isinstance(cause, ImportError):
            raise MachineError(f"{field}={path}: {' '.join(str(cause).split())}") from None
        raise MachineError(f"{field}={path} cannot be written: {explain(error)}") from None


def check_conditional_writes(path: AnyPath, field: str) -> None:
    """Refuse a store in which two nodes could create the same object: they claim attempts that way."""
    if isinstance(path, StorePath):
        probe = path / f".access-{secrets.token_hex(4)}"
        once = create(probe, b"1") and not create(probe, b"2")
        probe.unlink(missing_ok=True)
        if not once:
            raise MachineError(
                f"{field}={path}: this store has no conditional writes (If-None-Match), by which nodes agree; use one "
                "that has, or a folder that all nodes share"
            )


def explain(error: BaseException) -> str:
    """What a store refused, in one line, with what to do about it."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split()) or type(cause).__name__
    kind = type(cause).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
        return "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of your provider"
    if isinstance(cause, PermissionError):
        return f"the credentials are refused ({text})"
    if isinstance(cause, FileNotFoundError) or kind == "NoSuchBucket":
        return f"the bucket does not exist ({text})"
    return f"{text} ({kind})" if kind not in ("OSError",) else text

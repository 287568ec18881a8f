"""One file of weights, open for reading: safetensors, or torch's without the code that it may hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.agreement import error_text
from weft.extensions.pretrained.quantized import BLOCKS, SCALES
from weft.extensions.pretrained.tensor_forms import Shape
from weft.job.errors import JobError

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""The dtypes of safetensors that are read."""


class OpenFile:
    """One open file of weights: the shapes of its tensors, and views of them."""

    def __init__(self, path: Path, inner: Any, names: tuple[str, ...]):
        self.path, self.inner, self.names = path, inner, names

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        if isinstance(self.inner, dict):
            return tuple(self.inner[name].shape)
        return tuple(self.inner.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is used, bf16 if it is quantized; a JobError if it is not made of floating-point
        numbers."""
        if isinstance(self.inner, dict):
            kind = self.inner[name].dtype
            found = kind if kind in FLOATS.values() else None
        else:
            kind = self.inner.get_slice(name).get_dtype()
            packed = kind == "F8_E4M3" or (kind == "U8" and name.endswith((BLOCKS, SCALES)))
            found = torch.bfloat16 if packed else FLOATS.get(kind)
        if found is None:
            raise JobError(f"{self.path} holds {name} as {kind}; Weft reads fp32, fp16 and bf16")
        return found

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor is in fp8, which needs scales; .bin files with fp8 are refused by dtype()."""
        return not isinstance(self.inner, dict) and self.inner.get_slice(name).get_dtype() == "F8_E4M3"

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.inner[name] if isinstance(self.inner, dict) else self.inner.get_tensor(name)
        return tensor


@contextmanager
def open_file(path: Path, kind: str) -> Iterator[OpenFile]:
    """Open a file of weights; its pages are read when they are used. Code in it is never run."""
    with ExitStack() as stack:
        try:
            if kind == "safetensors":
                from safetensors import safe_open

                inner: Any = stack.enter_context(safe_open(path, framework="pt"))
                names = tuple(inner.keys())
            else:
                inner = _load_torch(path)
                names = tuple(inner)
        except JobError:
            raise
        except Exception as error:
            raise JobError(f"{path} is not a file of weights: {_first_line(error)}") from None
        yield OpenFile(path, inner, names)


def _load_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin file, without running code that it may hold."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        found = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    if not isinstance(found, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()):
        raise JobError(f"{path} holds something else than named tensors")
    return dict(found)


def _first_line(error: Exception) -> str:
    text = error_text(error)
    if "weights_only" in text or "Unsupported global" in text:
        return "it names Python code, which is never run"
    return text.splitlines()[0][:200] if text else type(error).__name__


def equal_tensors(one: tuple[Path, str], other: tuple[Path, str], kind: str) -> bool:
    """Whether two tensors have the same type, shape and values; each is a file and a name in it."""
    with open_file(one[0], kind) as first, open_file(other[0], kind) as second:
        a, b = first.tensor(one[1]), second.tensor(other[1])
        return a.dtype == b.dtype and torch.equal(a, b)

"""A user's dataset: `data.source: package.module:name` is imported, called, checked and converted to arrays."""

from __future__ import annotations

import difflib
import importlib
import operator
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weft.job.errors import JobError
from weft.job.schema import Job, Model

IGNORED_TARGET = -100
"""Targets of this value are masked, as in torch.nn.functional.cross_entropy."""

_NEEDS = "a dataset has train_len, val_len, train(index) and val(index)"


def open_user_dataset(job: Job) -> UserDataset:
    """Call what data.source names with the job's data section, and check that it returned a dataset."""
    data = job.data
    module_name, _, name = data.source.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise JobError(
                f"data.source {data.source}: there is no module {error.name}; write package.module:name of a module "
                "that Python can import from here"
            ) from None
        raise _user_code_error(data.source, "importing it", error) from error
    except Exception as error:
        raise _user_code_error(data.source, "importing it", error) from error
    make = getattr(module, name, None)
    if not callable(make):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise JobError(f"data.source {data.source}: {module_name} has no function or class {name!r}{hint}")
    try:
        inner = make(data)
    except Exception as error:
        raise _user_code_error(data.source, "calling it with the data section", error) from error
    return UserDataset(inner, data.source, job.model)


def _user_code_error(source: str, doing: str, error: Exception) -> JobError:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return JobError(f"data.source {source}: {doing} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})")


class UserDataset:
    """A user's dataset with checked lengths and samples: arrays, always with `valid`."""

    def __init__(self, inner: Any, source: str, model: Model) -> None:
        self._inner, self._source = inner, source
        given = model.vocab if model.module or model.is_decoder or model.is_classifier else None
        self._vocab = given
        """Integer targets, and integer inputs, must be below it; None where it is not known."""
        self._tokens, self._classes = model.is_decoder, model.is_decoder or model.is_classifier
        self.train_len = self._length("train_len", least=1)
        self.val_len = self._length("val_len", least=0)
        for name in ("train", "val"):
            if not callable(getattr(inner, name, None)):
                raise self._refuse(f"has no method {name}(index); {_NEEDS}")
        try:
            self.train(0)
            if self.val_len:
                self.val(0)
        except JobError:
            raise
        except Exception as error:
            raise _user_code_error(source, "reading its first sample", error) from error

    def train(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._inner.train, "train", index)

    def val(self, index: int) -> dict[str, np.ndarray]:
        return self._sample(self._inner.val, "val", index)

    def _length(self, name: str, least: int) -> int:
        if not hasattr(self._inner, name):
            raise self._refuse(f"has no {name}; {_NEEDS}")
        value = getattr(self._inner, name)
        try:
            number = operator.index(value)
        except TypeError:
            raise self._refuse(f"has {name} = {value!r}, which is not a whole number") from None
        if number < least:
            raise self._refuse(f"has {name} = {number}; it must be at least {least}")
        return number

    def _sample(self, read: Callable[[int], Any], name: str, index: int) -> dict[str, np.ndarray]:
        raw = read(index)
        if not isinstance(raw, Mapping) or not {"inputs", "targets"} <= set(raw):
            shown = f"the keys {', '.join(map(str, raw)) or 'none'}" if isinstance(raw, Mapping) else type(raw).__name__
            raise self._refuse(f"gave {shown} for {name}({index}); a sample is a dict with inputs, targets and valid")
        sample = {str(key): _array(value) for key, value in raw.items()}
        targets = sample["targets"]
        integers = np.issubdtype(targets.dtype, np.integer)
        if "valid" not in sample:
            # integer targets have one loss each; other targets are one vector with one loss
            sample["valid"] = np.ones(targets.shape if integers else (), dtype=np.bool_)
        sample["valid"] = sample["valid"].astype(np.bool_, copy=False)
        for key, needed in (("inputs", self._tokens), ("targets", self._classes)):
            if needed and not np.issubdtype(sample[key].dtype, np.integer):
                raise self._refuse(f"gave {key} of {sample[key].dtype} for {name}({index}); the model takes integers")
        if integers and sample["valid"].shape == targets.shape:
            sample["valid"] = sample["valid"] & (targets != IGNORED_TARGET)
            sample["targets"] = np.where(sample["valid"], targets, 0)
        for key in ("inputs", "targets"):
            self._check_range(sample[key], key, f"{name}({index})")
        return sample

    def _check_range(self, values: np.ndarray, key: str, sample: str) -> None:
        """Refuse integers outside the vocabulary, which would train the wrong thing or index out of bounds."""
        if self._vocab is None or not values.size or not np.issubdtype(values.dtype, np.integer):
            return
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= self._vocab:
            wrong = low if low < 0 else high
            place = np.unravel_index(int(values.argmin() if low < 0 else values.argmax()), values.shape)
            hint = f"write model.vocab={high + 1} or correct the sample" if low >= 0 else "correct the sample"
            also = f"; {IGNORED_TARGET} or valid=False masks a target" if key == "targets" else ""
            raise self._refuse(
                f"gave {key} {wrong} at {[int(i) for i in place]} of sample {sample}, outside of model.vocab="
                f"{self._vocab}; {hint}{also}"
            )

    def _refuse(self, what: str) -> JobError:
        return JobError(f"data.source {self._source}: the {type(self._inner).__name__} it returned {what}")


def _array(value: Any) -> np.ndarray:
    """An array of a dtype that training uses: float64 becomes float32, integers become int64."""
    array = np.asarray(value)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64, copy=False)
    return array

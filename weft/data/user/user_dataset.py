"""A user's dataset: `data.source: package.module:name` is imported, called, checked and converted to arrays."""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np

from weft.data.dataset import OwnSource
from weft.data.patches import image_patches, with_token_row
from weft.data.user.global_random import generator_state, seeded
from weft.data.user.map_style import MapStyle, as_dataset
from weft.job.errors import JobError
from weft.job.schema import Job, Model
from weft.models.user.sample_fit import misfit
from weft.models.user.sample_tree import TARGET_NAMES, flatten

IGNORED_TARGET = -100
"""Targets of this value are masked, as in torch.nn.functional.cross_entropy."""

MAX_LENGTH = 2**62 - 1
"""Samples that can be shuffled (data/sample_order.py)."""

_NEEDS = "a dataset has train_len, val_len, train(index) and val(index), or a length and items, as torch's have"


def open_user_dataset(job: Job) -> UserDataset:
    """Call what data.source names with the job's data section, and check that it returned a dataset."""
    data = job.data
    module_name, _, name = data.source.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with seeded(job.train.seed):  # the same random numbers on all ranks
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise JobError(
                f"data.source {data.source}: there is no module {error.name}; write package.module:name of a module "
                "that Python can import from here"
            ) from None
        raise _user_code_error(data.source, "importing it", error) from error
    except (Exception, SystemExit) as error:
        raise _user_code_error(data.source, "importing it", error) from error
    make = getattr(module, name, None)
    if not (callable(make) or hasattr(as_dataset(make), "train_len")):
        near = difflib.get_close_matches(name, [n for n, v in vars(module).items() if callable(v)], n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise JobError(f"data.source {data.source}: {module_name} has no function or class {name!r}{hint}")
    try:
        with seeded(job.train.seed):
            inner = as_dataset(make if not callable(make) else make(data) if _takes_arguments(make) else make())
    except (Exception, SystemExit) as error:
        raise _user_code_error(data.source, "calling it with the data section", error) from error
    return UserDataset(inner, data.source, job.model, bool(data.tasks), job.train.seed)


def _takes_arguments(make: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # it is not written in Python
        return True


def _user_code_error(source: str, doing: str, error: BaseException) -> JobError:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return JobError(f"data.source {source}: {doing} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})")


class UserDataset:
    """A user's dataset with checked lengths and samples: arrays, always with `valid`.

    Where samples draw from the global random generators, these are seeded for each from (seed, index, epoch).
    """

    def __init__(self, inner: Any, source: str, model: Model, several: bool = False, seed: int = 0) -> None:
        self._inner, self._source, self._seed = inner, source, seed
        given = model.vocab if model.module or model.takes_tokens or model.takes_patches else None
        self._vocab = given
        """Integer targets, and integer inputs, must be below it; None where it is not known."""
        self._labels = model.classes
        """Integer targets must be below it instead, where the model gives labels."""
        self._tokens, self._classes = model.takes_tokens, model.takes_tokens or model.takes_patches
        self._per_token = model.takes_tokens and not model.has_source and not model.labels_samples
        """Whether each token has a target."""
        self._plain, self._several = not model.module, several or isinstance(model.loss, dict)
        self._per_token &= not self._several
        self._rows = {key: (table.name, table.rows) for table in model.tables for key in table.keys}
        """By key of a sample with ids: the table and its number of rows."""
        self._patch_dim = model.patch_dim if model.takes_patches else None
        self._model = model
        self.train_len = self._length("train_len", least=1)
        self.val_len = self._length("val_len", least=0)
        for name in ("train", "val"):
            if not callable(getattr(inner, name, None)):
                raise self._refuse(f"has no method {name}(index); {_NEEDS}")
        self._given_epoch = _has_parameter(inner.train, "epoch")
        self.draws = False
        """Whether samples draw from the global generators, which no other thread may use while one is read."""
        try:
            with seeded(self._seed, 0, 0):
                before = generator_state()
                once = self.train(0)
                if self.val_len:
                    self.val(0)
                with suppress(Exception):  # it is refused when its turn comes
                    inner.train(min(1, self.train_len - 1))
                self.draws = generator_state() != before
            again = self.train(0)
        except JobError:
            raise
        except (Exception, SystemExit) as error:
            raise _user_code_error(source, "reading its first sample", error) from error
        self.takes_epoch = self._given_epoch or self.draws
        """Whether a training sample depends on the epoch too, as augmented ones do."""
        same = once.keys() == again.keys() and all(once[k].tobytes() == again[k].tobytes() for k in once)
        self.own_sources = {0: OwnSource(source, varies=not same)}

    def train(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        read = partial(self._inner.train, epoch=epoch) if self._given_epoch else self._inner.train
        with seeded(self._seed, index, epoch) if self.draws else nullcontext():
            return self._sample(read, "train", index)

    def val(self, index: int) -> dict[str, np.ndarray]:
        with seeded(self._seed, index, -1) if self.draws else nullcontext():
            return self._sample(self._inner.val, "val", index)

    def _length(self, name: str, least: int) -> int:
        if not hasattr(self._inner, name):
            raise self._refuse(f"has no {name}; {_NEEDS}")
        value = getattr(self._inner, name)
        try:
            number = operator.index(value)
        except TypeError:
            raise self._refuse(f"has {name} = {value!r}, which is not a whole number") from None
        if not least <= number <= MAX_LENGTH:
            limit = f"at least {least}" if number < least else f"at most {MAX_LENGTH}"
            raise self._refuse(f"has {name} = {number}; it must be {limit}")
        return number

    def _sample(self, read: Callable[[int], Any], name: str, index: int) -> dict[str, np.ndarray]:
        where = f"{name}({index})"
        sample = self._arrays(read(index), where)
        if self._patch_dim is not None:
            sample["inputs"] = self._patches(sample["inputs"], where)
        for key, (table, rows) in self._rows.items():
            ids = sample.get(f"inputs/{key}")
            if ids is not None and ids.size and not (int(ids.min()) >= -1 and int(ids.max()) < rows):
                wrong = int(ids.max() if ids.max() >= rows else ids.min())
                raise self._refuse(f"gave the id {wrong} in {key} of {where}, and the table {table} has rows={rows}; "
                                   "ids are from 0 to rows - 1, or -1 for none")  # fmt: skip
        if "targets" in sample:
            self._check_targets(sample, where)
        elif "valid" not in sample:
            sample["valid"] = np.ones((), dtype=np.bool_)
        if self._several and sample["valid"].ndim:
            raise self._refuse(f"gave valid of shape {list(sample['valid'].shape)} for {where}; with several losses it "
                               f"is one value, and integer targets of {IGNORED_TARGET} are masked")  # fmt: skip
        if problem := misfit(self._model, sample):
            raise self._refuse(f"gave for {where} {problem}")
        return sample

    def _arrays(self, raw: Any, where: str) -> dict[str, np.ndarray]:
        """A sample as a flat dict of arrays: inputs and targets, which may be trees (models/user/sample_tree.py)."""
        rest: Mapping[Any, Any] = {}
        targets = None
        if isinstance(raw, Mapping) and "inputs" in raw:
            inputs, targets = raw["inputs"], raw.get("targets")
            rest = {k: v for k, v in raw.items() if k not in ("inputs", "targets")}
        elif isinstance(raw, Mapping):
            target = next((name for name in TARGET_NAMES if name in raw), None)
            targets, rest = raw.get(target), {k: v for k, v in raw.items() if k == "valid"}
            inputs = {k: v for k, v in raw.items() if k not in (target, "valid")}
        elif isinstance(raw, tuple | list) and len(raw) > 1:
            *first, targets = raw
            inputs = tuple(first) if len(first) > 1 else first[0]
        else:
            inputs = raw[0] if isinstance(raw, tuple | list) and raw else raw
        sample = flatten(inputs, "inputs", self._leaf(where))
        sample |= {} if targets is None else flatten(targets, "targets", self._leaf(where))
        for key, value in rest.items():
            sample |= flatten(value, str(key), self._leaf(where))
        if not sample or (self._plain and not {"inputs", "targets"} <= sample.keys()):
            shown = f"the keys {', '.join(map(str, raw)) or 'none'}" if isinstance(raw, Mapping) else type(raw).__name__
            raise self._refuse(f"gave {shown} for {where}; a sample is a dict with inputs, targets and valid")
        if "valid" in sample:
            sample["valid"] = sample["valid"].astype(np.bool_, copy=False)
        return sample

    def _leaf(self, where: str) -> Callable[[Any, str], np.ndarray]:
        def convert(value: Any, path: str) -> np.ndarray:
            array = _array(value)
            if array.dtype.kind not in "biuf":
                raise self._refuse(f"gave {type(value).__name__} at {path} of {where}; a sample is made of numbers")
            return array

        return convert

    def _check_targets(self, sample: dict[str, np.ndarray], where: str) -> None:
        """Add `valid`, mask targets of -100, and refuse values that the model cannot take."""
        targets = sample["targets"]
        integers = np.issubdtype(targets.dtype, np.integer)
        if "valid" not in sample:
            # integer targets have one loss each; other targets are one vector with one loss
            sample["valid"] = np.ones(targets.shape if integers and not self._several else (), dtype=np.bool_)
        shares = self._patch_dim is not None and targets.shape == (self._vocab,)  # probabilities of the classes
        for key, needed in (("inputs", self._tokens), ("targets", self._classes and not shares)):
            if needed and not np.issubdtype(sample[key].dtype, np.integer):
                raise self._refuse(f"gave {key} of {sample[key].dtype} for {where}; the model takes integers")
        if self._patch_dim is not None and not np.issubdtype(sample["inputs"].dtype, np.floating):
            raise self._refuse(f"gave inputs of {sample['inputs'].dtype} for {where}; the model takes floats: pixels "
                               "are divided by 255, for example")  # fmt: skip
        shapes = [list(sample[key].shape) for key in ("inputs", "targets", "valid")] if self._per_token else []
        if shapes and (len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes)):
            raise self._refuse(f"gave inputs, targets and valid of shapes {shapes[0]}, {shapes[1]} and {shapes[2]} for "
                               f"{where}; the model takes a row of tokens with one target each")  # fmt: skip
        if self._several:
            return
        if integers and sample["valid"].shape == targets.shape:
            sample["valid"] = sample["valid"] & (targets != IGNORED_TARGET)
            sample["targets"] = np.where(sample["valid"], targets, 0)
        for key in ("inputs", "targets"):
            if key in sample:
                self._check_range(sample[key], key, where)

    def _patches(self, inputs: np.ndarray, where: str) -> np.ndarray:
        """The patches of an image; patches stay as they are."""
        patch, channels = self._model.patch or 4, self._model.channels or 3
        if inputs.ndim == 3:
            try:
                return image_patches(inputs, self._model)
            except ValueError as error:
                raise self._refuse(f"gave an image for {where} that {error}") from None
        if inputs.ndim != 2 or inputs.shape[-1] != self._patch_dim:
            raise self._refuse(
                f"gave inputs of shape {list(inputs.shape)} for {where}; the model takes [{channels}, height, width], "
                f"or [patches, {self._patch_dim}] with model.patch={patch} and model.channels={channels}"
            )
        return with_token_row(inputs) if self._model.class_token and len(inputs) + 1 == self._model.max_len else inputs

    def _check_range(self, values: np.ndarray, key: str, sample: str) -> None:
        """Refuse integers outside the vocabulary, which would train the wrong thing or index out of bounds."""
        limit, field = (self._labels, "classes") if self._labels and key == "targets" else (self._vocab, "vocab")
        if limit is None or not values.size or not np.issubdtype(values.dtype, np.integer):
            return
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            place = np.unravel_index(int(values.argmin() if low < 0 else values.argmax()), values.shape)
            hint = f"write model.{field}={high + 1} or correct the sample" if low >= 0 else "correct the sample"
            also = f"; {IGNORED_TARGET} or valid=False masks a target" if key == "targets" else ""
            raise self._refuse(
                f"gave {key} {wrong} at {[int(i) for i in place]} of sample {sample}, outside of "
                f"model.{field}={limit}; {hint}{also}"
            )

    def _refuse(self, what: str) -> JobError:
        name = self._inner.name if isinstance(self._inner, MapStyle) else type(self._inner).__name__
        return JobError(f"data.source {self._source}: the {name} it returned {what}")


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _array(value: Any) -> np.ndarray:
    """An array of a dtype that training uses: float64 becomes float32, integers become int64."""
    array = np.asarray(value)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64, copy=False)
    return array

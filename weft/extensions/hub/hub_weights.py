"""Reads the weights of a checkpoint of transformers into the shards that a rank holds, one parameter at a time.

Names and forms of the files are those of transformers' conversion tables, which also merge the matrices of experts.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of, shard_of
from weft.extensions.hub.model import build_hub_model, quiet
from weft.extensions.pretrained.checkpoint_folder import WeightFiles, find_folder, weight_files
from weft.extensions.pretrained.reader import MAX_MAPPED_BYTES
from weft.extensions.pretrained.weight_file import equal_tensors, open_file
from weft.job.errors import JobError
from weft.job.schema import Model

Group = list[tuple[str, str]]
"""Tensors that become one or several parameters: each its name in the files, and the pattern that it matched."""
IGNORED = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
"""Ends of the names of tensors in older files that are no parameters."""


class HubWeights:
    """The weights of one checkpoint, under the names of the parameters of its class."""

    def __init__(self, name: str, model: Model):
        self.folder = find_folder(name)
        self.files: WeightFiles = weight_files(self.folder)
        self.module: Any = build_hub_model(model.model_copy(update={"lora": None}))
        self.state = {n: tuple(t.shape) for n, t in self.module.state_dict(keep_vars=True).items()}
        """Shapes of parameters and buffers under all their names."""
        aliases: Any = self.module.aliases
        self.aliases: dict[str, str] = dict(aliases)
        self.shapes = {n: shape for n, shape in self.state.items() if n not in self.aliases}
        self.buffers = self.shapes.keys() - {n for n, _ in self.module.named_parameters()}
        self.file_of: dict[str, str] = {}
        """By the name of a tensor, its file."""
        self.groups: dict[str, Group] = defaultdict(list)
        """By the first parameter that they become, the tensors of the files."""
        self.converters: dict[str, Any] = {}
        """By the first parameter, what converts its tensors; none for those that only have another name."""
        self.conversions: list[Any] = []
        """The conversions of transformers that apply to these files, in their order."""
        self._find()

    def _find(self) -> None:
        """Find the tensors of every parameter; refuse files that lack one, or hold one of another shape."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        with quiet():
            table = get_model_conversion_mapping(self.module)
        renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files.files:
            with open_file(self.folder / file, self.files.format) as opened:
                for name in opened.names:
                    self.file_of[name], shapes[name] = file, opened.shape(name)
        prefix, unknown = self.module.base_model_prefix, []
        for name in sorted(self.file_of, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self.state)
            if target not in self.state and name in self.state:
                target, pattern = name, None
            if target not in self.state:
                unknown += [] if name.endswith(IGNORED) else [name]
                continue
            self.groups[target].append((name, pattern or name))
            if pattern is not None:
                self.converters[target] = by_pattern[pattern]
            elif shapes[name] != self.state[target]:
                raise JobError(
                    f"{self.folder} holds {name} as {list(shapes[name])}, and its config asks for "
                    f"{list(self.state[target])}"
                )
        self.conversions = [entry for entry in table if entry.was_used()]
        self.sources = {name for group in self.groups.values() for name, _ in group}
        filled = self._targets()
        tied = {self.aliases.get(n, n) for n in filled}
        for alias, name in self.aliases.items():
            self._check_tied(alias, name)
        params = {n for n, _ in self.module.named_parameters()}
        if missing := sorted(params - tied):
            raise JobError(f"{self.folder} has no tensor {missing[0]}, which its config asks for")
        if unknown and not self._may_ignore(unknown):
            raise JobError(
                f"{self.folder} holds {unknown[0]!r}, which {type(self.module).__name__} of transformers does not have"
            )

    def _check_tied(self, alias: str, name: str) -> None:
        """Refuse two tensors with different values for one parameter."""
        one, other = (self.groups.get(n, [("", "")])[0][0] for n in (alias, name))
        if not one or not other or {alias, name} & self.converters.keys():
            return
        first, second = ((self.folder / self.file_of[n], n) for n in (one, other))
        if not equal_tensors(first, second, self.files.format):
            raise JobError(
                f"{self.folder} has different values for {one} and {other}, which its config ties; write "
                "tie_word_embeddings: false in its config.json"
            )

    def _targets(self) -> set[str]:
        """All parameters and buffers that the files hold; a converter may make several of a group."""
        targets = set(self.groups)
        for first, converter in self.converters.items():
            patterns = converter.target_patterns
            targets |= {first.replace(patterns[0], other, 1) for other in patterns[1:]}
        return targets & self.state.keys()

    def _may_ignore(self, names: list[str]) -> bool:
        """Whether transformers leaves these tensors of files out, too."""
        import re

        patterns = getattr(self.module, "_keys_to_ignore_on_load_unexpected", None) or ()
        return all(any(re.search(pattern, name) for pattern in patterns) for name in names)

    def _made(self, first: str) -> list[str]:
        converter = self.converters.get(first)
        patterns = converter.target_patterns if converter is not None else [first]
        return [first.replace(patterns[0], other, 1) for other in patterns]

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read this rank's shards of parameters and buffers in place; the tensors of one parameter are in memory at a
        time."""
        by_name: dict[str, list[str]] = defaultdict(list)
        for name in targets:
            by_name[self.aliases.get(name, name)].append(name)
        wanted = [first for first in self.groups if any(self.aliases.get(n, n) in by_name for n in self._made(first))]
        wanted = [f for f in wanted if any(_has_any(targets[n]) for m in self._made(f)
                                           for n in by_name.get(self.aliases.get(m, m), ()))]  # fmt: skip
        while wanted:
            with OpenFiles(self) as files:
                while wanted and files.read < MAX_MAPPED_BYTES:
                    for name, value in self.values(wanted.pop(0), files).items():
                        for target in by_name.get(self.aliases.get(name, name), ()):
                            shard, local = shard_of(targets[target]), local_of(targets[target].detach())
                            if local.numel():
                                local.copy_(value[shard.box])

    def values(self, first: str, files: OpenFiles) -> dict[str, Tensor]:
        """The parameters that a group of tensors becomes, whole."""
        group = self.groups[first]
        converter = self.converters.get(first)
        if converter is None:
            return {first: files.tensor(group[0][0])}
        converter = copy.deepcopy(converter)
        for name, pattern in group:
            converter.add_tensor(first, name, pattern, files.tensor(name))
        made = converter.convert(first, model=self.module, config=self.module.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    def file_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor in the files, by its name there."""
        dtypes: dict[str, torch.dtype] = {}
        for file in self.files.files:
            with open_file(self.folder / file, self.files.format) as opened:
                dtypes |= {name: opened.dtype(name) for name in opened.names if self._is_read(name)}
        return dtypes

    def _is_read(self, name: str) -> bool:
        return name in self.sources

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter: the widest of the tensors that hold it."""
        widest: dict[str, torch.dtype] = {}
        by_file = self.file_dtypes()
        for first, group in self.groups.items():
            for made in self._made(first):
                name = self.aliases.get(made, made)
                for source, _ in group:
                    widest[name] = torch.promote_types(widest.get(name, by_file[source]), by_file[source])
        return widest

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole parameter."""
        out = torch.empty(self.shapes[name], dtype=dtype)
        self.fill({name: out})
        return out


class OpenFiles:
    """The files of a checkpoint, opened when a tensor of them is read."""

    def __init__(self, weights: HubWeights):
        self.weights, self.read = weights, 0
        self.opened: dict[str, Any] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for manager, _ in self.opened.values():
            manager.__exit__(None, None, None)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        file = self.weights.file_of[name]
        if file not in self.opened:
            manager = open_file(self.weights.folder / file, self.weights.files.format)
            self.opened[file] = manager, manager.__enter__()
        tensor: Tensor = self.opened[file][1].tensor(name)
        self.read += tensor.element_size() * math.prod(tensor.shape)
        return tensor


def _has_any(target: Tensor) -> bool:
    """Whether this rank holds any of a tensor."""
    return bool(local_of(target).numel())

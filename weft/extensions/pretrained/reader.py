"""Reads the weights of a Hugging Face checkpoint, file by file, into the shards that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from weft.comm.shards import local_of, shard_of
from weft.extensions.pretrained.checkpoint_folder import CONFIG, WeightFiles, find_folder, weight_files
from weft.extensions.pretrained.config import read_fields
from weft.extensions.pretrained.family_entry import family_of
from weft.extensions.pretrained.published_weights import open_published
from weft.extensions.pretrained.quantized import BLOCKS, SCALE, SCALES, expand_fp8, expand_mxfp4, mxfp4_shapes
from weft.extensions.pretrained.tensor_forms import FileTensor, Shape, TensorPart, file_tensors, named_shapes
from weft.extensions.pretrained.weight_file import OpenFile, open_file
from weft.job.errors import JobError
from weft.job.files.checked_files import read_json
from weft.job.schema import Model
from weft.models.build_model import build_model, meta_model
from weft.models.init import initialise
from weft.planner.model.counts import count_parameters

MAX_MAPPED_BYTES = 128 << 20
"""A file is opened again after this many bytes: pages that were read count as memory of the process until then."""


class PretrainedWeights:
    """The weights of one checkpoint, under the names of Weft's parameters."""

    def __init__(self, name: str, model: Model):
        self.folder, self.model = find_folder(name), model.model_copy(update={"lora": None})
        config = read_json(self.folder / CONFIG)
        written_by, fields = read_fields(config, str(self.folder / CONFIG))
        self.family = family_of(written_by.kind, labels=bool(model.classes))
        self.config_tied = bool(fields.get("tied")) or self.family.always_tied
        self.may_lack = self.family.fresh if self.family.architecture not in (config.get("architectures") or ()) else ()
        self.new_labels = model.takes_patches and fields.get("vocab") != model.vocab
        """Whether the head has other labels than the files."""
        quantization = config.get("quantization_config") or {}
        self.blocks: list[int] = quantization.get("weight_block_size", [])
        self.mxfp4 = quantization.get("quant_method") == "mxfp4"
        self.files: WeightFiles = weight_files(self.folder)
        self._check_size()
        module = meta_model(self.model)
        self.shapes: dict[str, Shape] = named_shapes(self.family, module)
        self.buffers = {n for n, _ in module.named_buffers()}
        self.tensors: list[FileTensor] = file_tensors(self.family, model, self.shapes.items())
        self.fresh: set[str] = set()
        """Parameters that the files lack, which get initial values."""
        self.where: dict[str, tuple[str, str]] = {}
        """By the family's name of a tensor, its file and its name there."""
        self.packed: set[str] = set()
        """Tensors in MXFP4; `where` has their bytes under their own names."""
        self._find()

    def _check_size(self) -> None:
        """Refuse a config of a larger model than the files can hold, before anything is built from it."""
        counts = count_parameters(self.model)
        size = sum((self.folder / file).stat().st_size for file in self.files.files)
        if counts is not None and counts.total > size * (2 if self.mxfp4 else 1):
            raise JobError(
                f"{self.folder} describes a model of {counts.total:,} parameters, and its weights have {size:,} bytes"
            )

    def _find(self) -> None:
        """Find every tensor, and refuse files that lack one, hold another or hold one of another shape."""
        found: dict[str, str] = {}
        shapes: dict[str, Shape] = {}
        fp8: set[str] = set()
        expected = {t.name for t in self.tensors}
        for file in self.files.files:
            with open_file(self.folder / file, self.files.format) as opened:
                for name in opened.names:
                    if self.files.listed is not None and self.files.listed.get(name) != file:
                        raise JobError(f"{self.folder / file} holds {name!r}, which the index does not list for it")
                    found[name] = file
                    shapes[name] = opened.shape(name)
                    if not self._is_ignored(name):
                        opened.dtype(name)
                        fp8 |= {name} if opened.is_fp8(name) else set()
        today = {n: self._name_today(n) for n in found}
        bare = self.family.prefix
        if not any(n.startswith(bare) for n in found) and any(bare + n in expected for n in today.values()):
            today = {n: bare + name if bare + name in expected else name for n, name in today.items()}
        self.where = {name: (found[n], n) for n, name in today.items()}
        for one, other in self._repeats():
            for name, repeated in ((one, other), (other, one)):
                if name not in self.where and name in expected and repeated in self.where:
                    self.where[name] = self.where[repeated]
        for tensor in list(self.tensors):
            need: Shape | None = tensor.shape(self.model)
            if self.mxfp4 and tensor.name + BLOCKS in self.where and (both := mxfp4_shapes(tensor.shape(self.model))):
                self.packed.add(tensor.name)
                self.where[tensor.name] = self.where.pop(tensor.name + BLOCKS)
                need = both[0] if shapes.get(tensor.name + SCALES) == both[1] else None
            if tensor.name not in self.where or (self.new_labels and tensor.parts[0].name.startswith("head.")):
                if self.new_labels or all(
                    any(fnmatchcase(part.name, p) for p in self.may_lack) for part in tensor.parts
                ):
                    self.fresh |= {part.name for part in tensor.parts}
                    self.tensors.remove(tensor)
                    continue
                raise JobError(f"{self.folder} has no tensor {tensor.name}, which its config asks for")
            if need is None:
                raise JobError(f"{self.folder} holds {tensor.name} in MXFP4 without the exponents of its blocks")
            have = shapes.get(self.where[tensor.name][1])
            if have != need:
                raise JobError(
                    f"{self.folder} holds {tensor.name} as {list(have or ())}, and its config asks for {list(need)}"
                )
            if self.where[tensor.name][1] in fp8:
                self._check_scales(tensor.name, have, shapes)
        expected |= {name + SCALES for name in self.packed}
        for name in self.where:
            if name not in expected and not self._is_ignored(name):
                raise JobError(f"{self.folder} holds {name!r}, which a model of {self.family.help} does not have")

    def _repeats(self) -> Iterator[tuple[str, str]]:
        """Pairs of tensors of which the files may have only one."""
        if self.config_tied:
            yield from self.family.repeats.items()
            if self.model.tied and self.family.head:
                yield self.family.head

    def _name_today(self, name: str) -> str:
        for ending, new in self.family.older_endings.items():
            if name.endswith(ending):
                return name.removesuffix(ending) + new
        return name

    def _is_ignored(self, name: str) -> bool:
        """Whether a tensor of a file is no parameter, or repeats the embedding that the head is tied to."""
        tied = self.model.tied and self.family.head and name == self.family.head[0]
        patterns = (pattern.replace("{layers}", str(self.model.layers)) for pattern in self.family.ignored)
        scale = bool(self.blocks) and name.endswith(SCALE)
        return bool(tied) or scale or any(fnmatchcase(name, pattern) for pattern in patterns)

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read this rank's shards of the parameters in place; at most one file is open at a time, and about
        MAX_MAPPED_BYTES or one tensor of it are in memory."""
        by_file: dict[str, list[FileTensor]] = {}
        for tensor in self.tensors:
            if any(part.name in targets for part in tensor.parts):
                by_file.setdefault(self.where[tensor.name][0], []).append(tensor)
        for file, tensors in by_file.items():
            while tensors:
                mapped = 0
                with open_file(self.folder / file, self.files.format) as opened:
                    while tensors and mapped < MAX_MAPPED_BYTES:
                        tensor = tensors.pop(0)
                        self._copy(opened, tensor, targets)
                        mapped += _bytes_read(tensor, targets)

    def _copy(self, opened: OpenFile, tensor: FileTensor, targets: Mapping[str, Tensor]) -> None:
        if not any(part.name in targets and _overlaps(part, targets[part.name]) for part in tensor.parts):
            return
        if tensor.name in self.packed:
            return self._copy_packed(opened, tensor, targets)
        content = opened.tensor(self.where[tensor.name][1])
        if content.dtype == torch.float8_e4m3fn:
            content = self._unscaled(content, tensor.name)
        values = tensor.form.split(content, [part.shape for part in tensor.parts], self.model)
        for part, value in zip(tensor.parts, values, strict=True):
            if (target := targets.get(part.name)) is not None:
                copy_part(part, value, target)

    def _check_scales(self, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> None:
        """Refuse a tensor in fp8 whose blocks do not all have a scale."""
        if name + SCALE not in self.where or len(shape) != 2 or not self.blocks:
            raise JobError(f"{self.folder} holds {name} in fp8 without the scales of its blocks")
        needed = tuple(-(-size // block) for size, block in zip(shape, self.blocks, strict=True))
        have = shapes[self.where[name + SCALE][1]]
        if have != needed:
            raise JobError(f"{self.folder} holds {name + SCALE} as {list(have)} instead of {list(needed)}")

    def _unscaled(self, content: Tensor, name: str) -> Tensor:
        """A matrix in fp8 times the scales of its blocks, in fp32."""
        file, there = self.where[name + SCALE]
        with open_file(self.folder / file, self.files.format) as opened:
            return expand_fp8(content, opened.tensor(there).float(), self.blocks)

    def _copy_packed(self, opened: OpenFile, tensor: FileTensor, targets: Mapping[str, Tensor]) -> None:
        """The matrices of experts in MXFP4, one expert at a time."""
        blocks = opened.tensor(self.where[tensor.name][1])
        file, there = self.where[tensor.name + SCALES]
        with open_file(self.folder / file, self.files.format) as other:
            scales = other.tensor(there)
        for e in range(len(blocks)):
            parts = [TensorPart(part.name, part.shape[1:], e) for part in tensor.parts]
            wanted = [part for part in parts if part.name in targets and _overlaps(part, targets[part.name])]
            if not wanted:
                continue
            matrix = expand_mxfp4(blocks[e : e + 1], scales[e : e + 1])
            values = tensor.form.split(matrix, [(1, *part.shape) for part in parts], self.model)
            for part, value in zip(parts, values, strict=True):
                if part in wanted:
                    copy_part(part, value[0], targets[part.name])

    def file_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor in the files, by the family's name of it."""
        dtypes: dict[str, torch.dtype] = {}
        by_file: dict[str, list[str]] = {}
        for tensor in self.tensors:
            by_file.setdefault(self.where[tensor.name][0], []).append(tensor.name)
        for file, names in by_file.items():
            with open_file(self.folder / file, self.files.format) as opened:
                dtypes |= {name: opened.dtype(self.where[name][1]) for name in names}
        return dtypes

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter: the widest of the tensors that hold it."""
        widest, dtypes = dict.fromkeys(self.fresh, torch.float32), self.file_dtypes()
        for tensor in self.tensors:
            for part in tensor.parts:
                dtype = dtypes[tensor.name]
                widest[part.name] = torch.promote_types(widest.get(part.name, dtype), dtype)
        return widest

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole parameter."""
        out = torch.empty(self.shapes[name], dtype=dtype)
        if name in self.fresh:
            initialise(name, out, build_model(self.model), 0)
        self.fill({name: out})
        return out


def _overlaps(part: TensorPart, target: Tensor) -> bool:
    """Whether this rank holds any of a part."""
    shard = shard_of(target)
    inside = part.index is None or shard.offset[0] <= part.index < shard.offset[0] + shard.size[0]
    return inside and all(shard.size)


def _bytes_read(tensor: FileTensor, targets: Mapping[str, Tensor]) -> int:
    """About the bytes of a file that this rank's shards of a tensor are read from: whole rows."""
    held = [(part, shard_of(targets[part.name])) for part in tensor.parts if part.name in targets]
    return sum(4 * math.prod(part.shape) * shard.size[0] // max(1, shard.shape[0]) for part, shard in held)


def copy_part(part: TensorPart, value: Tensor, target: Tensor) -> None:
    """Copy this rank's shard of a parameter, or of one expert's matrix of it."""
    shard, local = shard_of(target), local_of(target.detach())
    box = shard.box
    if part.index is not None:
        if not shard.offset[0] <= part.index < shard.offset[0] + shard.size[0]:
            return
        local, box = local[part.index - shard.offset[0]], box[1:]
    if local.numel():
        local.copy_(value[box])


def from_hf(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A published checkpoint as a module of one process: tokens [batch, seq] → logits [batch, seq, vocab], or
    [batch, labels] for sequence classification; of a ViT, images [batch, colours, height, width] → [batch, labels]. Of
    CLIP, `logits(images, tokens)` gives [images, texts], and a call the vectors of both. An encoder also takes `types`,
    and `features=True` gives its last hidden states.

    `name` is a folder in the format of Hugging Face, or a name in the local hub cache.
    """
    from weft.job.load import parse_job
    from weft.job.shapes import resolve

    job = resolve(parse_job({"model": {"pretrained": str(name)}, "data": {"source": "synthetic", "seq_len": 1}}))
    weights, module = open_published(str(name), job.model), meta_model(job.model)
    values: dict[int, nn.Parameter] = {}
    for path, param in list(module.named_parameters(remove_duplicate=False)):
        if id(param) not in values:
            values[id(param)] = nn.Parameter(torch.empty(param.shape, dtype=dtype))
        owner, _, key = path.rpartition(".")
        module.get_submodule(owner).register_parameter(key, values[id(param)])
    targets = {n: p.detach() for n, p in (*module.named_parameters(), *module.named_buffers())}
    for path in getattr(weights, "fresh", ()):
        initialise(path, targets[path], module, 0)
    weights.fill(targets)
    return module.eval()

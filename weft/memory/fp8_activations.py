"""`memory.activations: fp8`: what blocks save for the backward pass is stored in e4m3 with a scale for 128 elements.

The forward pass is exact. The backward pass reads rounded activations, so gradients have a rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from weft.comm.shards import local_of
from weft.memory.activation_internals import value_version
from weft.memory.host_offload import HostOffload, OffloadedTensors
from weft.planner.engine_constants import ACTIVATION_SCALE_BLOCK, CODED_ELEMENTS, SMALL_ACTIVATIONS

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CodedTensor(NamedTuple):
    """A tensor in e4m3, in the order of its memory, and what it was."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks, [blocks, ACTIVATION_SCALE_BLOCK]."""
    values = blocks.float()
    largest = values.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (values / scales).to(E4M3), scales


def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales).to(dtype)


class Fp8Codec:
    """Encodes and decodes tensors; `compiled` runs each as one kernel, else parts of a tensor bound the fp32 copies."""

    def __init__(self, compiled: bool = False):
        self.step = 0 if compiled else CODED_ELEMENTS // ACTIVATION_SCALE_BLOCK
        self.quantize: Callable[[Tensor], tuple[Tensor, Tensor]] = _quantize
        self.dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _dequantize
        if compiled:
            self.quantize = torch.compile(_quantize, dynamic=True)
            self.dequantize = torch.compile(_dequantize, dynamic=True)

    @torch.no_grad()
    def encode(self, x: Tensor) -> CodedTensor:
        if not is_dense(x):
            x = x.contiguous()
        flat = x.detach().as_strided((x.numel(),), (1,))
        flat = F.pad(flat, (0, -x.numel() % ACTIVATION_SCALE_BLOCK))
        blocks = flat.view(-1, ACTIVATION_SCALE_BLOCK)
        codes, scales = torch.empty_like(blocks, dtype=E4M3), blocks.new_empty(len(blocks), 1, dtype=torch.float32)
        for part in self._parts(len(blocks)):
            codes[part], scales[part] = self.quantize(blocks[part])
        return CodedTensor(codes, scales, x.shape, x.stride(), x.dtype)

    @torch.no_grad()
    def decode(self, coded: CodedTensor) -> Tensor:
        out = torch.empty_like(coded.codes, dtype=coded.dtype)
        for part in self._parts(len(out)):
            out[part] = self.dequantize(coded.codes[part], coded.scales[part], coded.dtype)
        return out.view(-1).as_strided(coded.shape, coded.stride)

    def _parts(self, blocks: int) -> Iterator[slice]:
        step = self.step or blocks
        return (slice(first, first + step) for first in range(0, blocks, step))


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill a part of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_coded(x: Tensor, smallest: int) -> bool:
    """Whether a saved tensor is stored in fp8: numbers, not statistics of rows, ids or masks, nor an expanded view."""
    repeated = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.dtype in CODED_DTYPES and x.numel() >= smallest and not repeated


def smallest_coded(inputs: Iterable[Tensor]) -> int:
    """Elements of the smallest tensor that is encoded in a block with these inputs."""
    sizes = [x.numel() for x in inputs if x.is_floating_point()]
    return max(ACTIVATION_SCALE_BLOCK, max(sizes, default=0) // SMALL_ACTIVATIONS)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def save_as_fp8(block: nn.Module, codec: Fp8Codec) -> None:
    """Make a block store what autograd saves in its forward pass in fp8; with recompute this is the block's input.

    Weights, and inputs without a gradient (positions, masks), are kept as they are.
    """
    forward = block.forward

    def saving(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        saver = _Saver(block, codec, list(tensors_in([args, kwargs])))
        with saved_tensors_hooks(saver.pack, saver.unpack):
            out = forward(*args, **kwargs)
        saver.coded.clear()  # the graph holds them from here on
        return out

    block.forward = saving


class _Saver:
    """Stores the tensors that one forward pass of a block saves; one that several operators save is encoded once."""

    def __init__(self, block: nn.Module, codec: Fp8Codec, inputs: list[Tensor]):
        self.block, self.codec, self.smallest = block, codec, smallest_coded(inputs)
        self.constants = {_memory_of(x) for x in inputs if not x.requires_grad}
        # references to storages keep their addresses from being used again
        self.coded: dict[Hashable, CodedTensor] = {}

    def pack(self, x: Tensor) -> Tensor | CodedTensor:
        if not is_coded(x, self.smallest) or _memory_of(x) in self.constants or self._is_weight(x):
            return x.detach()  # an operator that saves its output would hold itself by it
        place = (x.numel(),) if is_dense(x) else (x.shape, x.stride())
        key = _memory_of(x), x.storage_offset(), *place, x.dtype, value_version(x)
        if key not in self.coded:
            self.coded[key] = self.codec.encode(x)
        return self.coded[key]._replace(shape=x.shape, stride=x.stride()) if is_dense(x) else self.coded[key]

    def unpack(self, saved: Tensor | CodedTensor) -> Tensor:
        return self.codec.decode(saved) if isinstance(saved, CodedTensor) else saved

    def _is_weight(self, x: Tensor) -> bool:
        """Whether it is a view of a weight. FSDP gathers the weights of experts when they are used."""
        same = (w for w in map(local_of, self.block.parameters()) if w.numel() == x.numel())
        return any(_memory_of(w) == _memory_of(x) for w in same)


def _memory_of(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())


class Fp8HostOffload(HostOffload):
    """The same with what blocks save in fp8, in host memory and where it stays on the device."""

    def __init__(self, device: torch.device, limit_gib: float, codec: Fp8Codec):
        super().__init__(device, limit_gib)
        self.codec = codec

    def put(self, tensors: list[Tensor]) -> OffloadedTensors:
        smallest = smallest_coded(tensors[:1])
        coded = [self.codec.encode(t) if is_coded(t, smallest) else None for t in tensors]
        stored = [s for t, c in zip(tensors, coded, strict=True) for s in ((t,) if c is None else (c.codes, c.scales))]
        entry = super().put(stored)
        entry.forms = [None if c is None else (c.shape, c.stride, c.dtype) for c in coded]
        return entry

    def get(self, entry: OffloadedTensors) -> list[Tensor]:
        stored = iter(super().get(entry))
        return [
            next(stored) if form is None else self.codec.decode(CodedTensor(next(stored), next(stored), *form))
            for form in entry.forms
        ]

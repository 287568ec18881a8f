"""Traces blocks of the engine on tensors without data: the tables from which the planner knows their memory.

Every size of the traced model and layout is another prime number, so the bytes of a tensor factor into the sizes that
it has: 8 · b · s · D for an fp32 tensor [2 b, s, D]. Live bytes are then polynomials in these sizes, exact for any
model of the same structure. `python -m weft.verify.block_traces` writes the tables of known structures.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from weft.comm.dtensor_internals import forget_meshes, local_tensor
from weft.comm.fake_internals import real_meshes
from weft.job import parse_job
from weft.job.schema import Job, Model
from weft.job.shapes import SHAPES, resolve
from weft.memory import fp8_activations
from weft.memory.tensor_tracer import Tracer
from weft.memory.tensor_tracer_internals import fake_tensors, storage_key
from weft.mesh import Mesh, fake_mesh
from weft.models import attention_kernels
from weft.models.build_model import build_model, loss_sum
from weft.parallel.apply import spread_stage
from weft.parallel.context.sequence_split import SequenceSplit
from weft.parallel.expert.expert_load import ExpertLoad
from weft.parallel.pipeline.split_backward import backward_input
from weft.parallel.units import find_units
from weft.planner.memory.block_tables import TABLES, BlockVariant, Poly, block_structure, file_name, model_sizes
from weft.planner.plan import Plan
from weft.precision import COMPUTE_DTYPES
from weft.verify.dryrun import make_batch
from weft.verify.dryrun_internals import gpu_allocations

PRIMES = {
    "b": 11, "s": 17, "t": 7, "c": 3, "p": 13, "e": 23, "k": 5, "K": 37, "g": 41, "G": 43, "d": 149, "o": 31, "n": 59,
    "v": 61, "D": 4999, "F": 9973, "f": 5003, "w": 3001, "r": 47, "Q": 1009, "L": 1013,
}  # fmt: skip
"""The prime of each size; block_tables.sizes() gives their values for a model and layouts."""
VOCAB = 101
"""Of the traced model; no tensor of a block depends on it."""
SCALE_BLOCK = fp8_activations.ACTIVATION_SCALE_BLOCK
MODES = ("none", "selective", "full")
"""Recompute of the traced blocks."""
NEXT = "none"
"""That of the block after them."""
LARGEST_FACTOR = 1 << 12
"""What is left of a tensor's bytes after its sizes, at most: bytes of an element times a small number."""


NEAR = 0.997
"""A moment with this share of the highest one's bytes stands for it."""


class Recorder(Tracer):
    """Every change of live bytes, as (storage, bytes, sizes it is a product of), and where passes begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.rounding, self.scores, self.symbols = 1, False, frozenset(PRIMES)
        """What lengths are a multiple of; whether scores of attention are computed in tiles; the sizes of the model."""
        self.events: list[tuple[int, int]] = []
        self.marks: dict[tuple[str, str], int] = {}
        self.limited = ""
        """The symbol of a limit on what is allocated now: attention in tiles, encoding in parts."""
        self.limits: dict[int, str] = {}
        """By event, the limit on the tensor."""
        self.weights: list[tuple[int, int]] = []
        """Events and storages of complete gradients of weights."""

    def _now(self, key: int, size: int) -> None:
        if change := size - self.sizes[key]:
            if self.limited:
                self.limits[len(self.events)] = self.limited
            self.events.append((key, change))
        super()._now(key, size)

    def _gone(self, key: int) -> None:
        if size := self.sizes.get(key, 0):
            self.events.append((key, -size))
        super()._gone(key)

    def term(self, at: int) -> tuple[str, float]:
        """Bytes that an event allocates or frees, as a product of sizes and its factor."""
        size, limit = abs(self.events[at][1]), self.limits.get(at, "")
        return term(size, limit, self.rounding, self.scores, self.symbols)

    def mark(self, *name: str) -> None:
        self.marks[name] = len(self.events)  # type: ignore[index]

    @contextmanager
    def limit(self, owner: Any, name: str, symbol: str) -> Iterator[None]:
        """What a function allocates is limited by its own parts."""
        function = getattr(owner, name)

        def limited(*args: Any, **kwargs: Any) -> Any:
            outer, self.limited = self.limited, symbol
            try:
                return function(*args, **kwargs)
            finally:
                self.limited = outer

        setattr(owner, name, limited)
        try:
            yield
        finally:
            setattr(owner, name, function)


def sized_model(m: Model, v: BlockVariant, blocks: int) -> Model:
    """A model of the same structure, of some blocks of each kind, whose sizes are primes."""
    z, cut = PRIMES, (PRIMES["t"] if v.tp else 1)
    heads = z["K"] * cut * (z["c"] if v.ulysses else 1)
    new: dict[str, Any] = {
        "dim": z["D"], "layers": blocks, "kv_heads": heads, "ffn": z["F"] * cut, "vocab": VOCAB * cut,
        "heads": heads * (z["g"] if m.kv_heads != m.heads else 1), "head_dim": 2 * z["d"],
        "max_len": sequence_length(m, v),
        "window": None, "window_layers": None, "tied": False, "pretrained": None, "shape": None, "classes": None,
    }  # fmt: skip
    if m.positions == "rope":
        new["rope_dim"] = 2 * z["o"] if m.rope_dim not in (None, m.head_dim) else 2 * z["d"]
    if m.latent is not None:
        narrow = m.latent.v_dim < (m.head_dim or 0)
        new["latent"] = m.latent.model_copy(update={
            "kv_rank": z["L"], "q_rank": m.latent.q_rank and z["Q"], "v_dim": z["v"] if narrow else 2 * z["d"],
        })  # fmt: skip
    if m.has_source:
        new |= {"layers": 2 * blocks, "encoder_layers": blocks}
    if m.lora is not None:
        new["lora"] = m.lora.model_copy(update={"rank": z["r"]})
    if m.experts is not None:
        e, count = m.experts, z["e"] * (z["p"] if v.ep else 1)
        new["experts"] = e.model_copy(update={
            "count": count, "top_k": z["k"] if e.top_k > 1 else 1, "ffn": z["f"], "first_dense": 0, "groups": 1,
            "top_groups": None, "shared_ffn": z["w"] * cut if e.shared else None,
        })  # fmt: skip
    return m.model_copy(update=new)


def sequence_length(m: Model, v: BlockVariant) -> int:
    """Tokens of a sequence, of which every rank has s times what its parts must be a multiple of."""
    z = PRIMES
    parts = (z["t"] if v.tp else 1) * (z["c"] if v.cp else 1) * (2 if v.zigzag else 1) * _rounding(v)
    return z["s"] * parts * (z["e"] * (z["p"] if v.ep else 1) if m.experts is not None else 1)


def _rounding(v: BlockVariant) -> int:
    """What every tensor's elements are a multiple of: encoding pads them."""
    return SCALE_BLOCK if v.coded else 1


def traced_plan(v: BlockVariant) -> Plan:
    """One rank of tp, cp and ep."""
    z = PRIMES
    return Plan(
        device="cuda" if v.fused else "cpu", device_name="", backend="fake", tp=z["t"] if v.tp else 1,
        cp=z["c"] if v.cp else 1, ep=z["p"] if v.ep else 1, dp_shard=z["p"] if v.ep else 1, sequence=v.sequence,
        cp_style="ulysses" if v.ulysses else "ring", cp_group=z["c"] if v.ulysses else 1, zigzag=v.zigzag,
        microbatch=z["b"], precision="bf16" if v.half else "fp32", activations="fp8" if v.coded else "exact",
    )  # fmt: skip


@cache
def _job() -> Job:
    return parse_job({"model": {"family": "mlp", "dim": 8, "layers": 2}, "data": {"source": "synthetic"}})


def record(m: Model, v: BlockVariant, split: bool) -> Recorder:
    """A forward and a backward pass of one microbatch; with `split`, the first half of a split backward pass."""
    plan, sized = traced_plan(v), sized_model(m, v, len(MODES) if split else len(MODES) + 1)
    base = _job()
    job = base.model_copy(
        update={"model": sized, "data": base.data.model_copy(update={"seq_len": sequence_length(m, v)})}
    )
    mesh = fake_mesh(plan, 0)
    allocations = gpu_allocations(attention=v.kernels) if v.fused else nullcontext()
    parts = fp8_activations.CODED_ELEMENTS, attention_kernels.MAX_SCORES
    fp8_activations.CODED_ELEMENTS = attention_kernels.MAX_SCORES = 1 << 60
    try:
        with warnings.catch_warnings(), real_meshes(), allocations, fake_tensors(), Recorder() as recorder:
            warnings.simplefilter("ignore")
            recorder.rounding, recorder.scores = _rounding(v), not m.has_source and not v.kernels
            recorder.symbols = model_sizes(m)
            with (
                recorder.limit(fp8_activations, "_quantize", "C"),
                recorder.limit(fp8_activations, "_dequantize", "C"),
            ):
                _run(recorder, job, plan, mesh, split)
    finally:
        fp8_activations.CODED_ELEMENTS, attention_kernels.MAX_SCORES = parts
        mesh.close()
        forget_meshes(())
    return recorder


def _run(recorder: Recorder, job: Job, plan: Plan, mesh: Mesh, split: bool) -> None:
    module = build_model(job.model)
    units = list(find_units(module))
    modes = {unit: mode for unit, mode in zip(units, (*MODES, NEXT) * 2, strict=False) if mode != "none"}
    without_data = replace(mesh, axes={n: a for n, a in mesh.axes.items() if n in ("tp", "cp", "ep")})
    model = spread_stage(module, without_data, plan, 0, {} if split else modes, summed=False)
    load = ExpertLoad(model.module, mesh.device, mesh.everyone, plan.ep)
    load.watch(model.module)
    load.begin(1.0)
    for name, unit in find_units(model.module).items():
        unit.forward = _marking(recorder, name, unit.forward)
    for name, weight in model.module.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(_gradient_mark(recorder, name))
    batch = make_batch(job, plan)
    if (axis := mesh.axis("cp")) is not None:
        cut = SequenceSplit.of(plan, axis.rank)
        batch = (cut.pairs if job.model.has_source else cut.batch)(batch)
    recorder.start()
    loss = loss_sum(model.module, batch, job.model, dtype=COMPUTE_DTYPES[plan.precision])
    recorder.mark("loss")
    if split:
        outs = [loss]
        del loss
        kept = backward_input(outs, [None], [], model.module.parameters())
        recorder.mark("end")
        del kept
    else:
        loss.backward()
        recorder.mark("end")
    recorder.stop()


def _marking(recorder: Recorder, name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def marking(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorder.mark("forward", name)
        if not x.requires_grad:  # a frozen embedding
            x = x.detach().requires_grad_()
        x.register_hook(lambda grad: recorder.mark("done", name))
        y = forward(x, *args, **kwargs)
        recorder.mark("made", name)
        y.register_hook(lambda grad: recorder.mark("backward", name))
        return y

    return marking


def _gradient_mark(recorder: Recorder, name: str) -> Callable[[Tensor], None]:
    def marking(weight: Tensor) -> None:
        if weight.grad is not None:
            recorder.weights.append((len(recorder.events), storage_key(local_tensor(weight.grad).untyped_storage())))
        if ".experts." in name:
            recorder.mark("experts", name.partition(".mlp")[0])

    return marking


def factors(size: int, symbols: Collection[str] = frozenset(PRIMES)) -> tuple[str, int]:
    """The sizes that a number is a product of, and what is left."""
    product = []
    for symbol, prime in PRIMES.items():
        while symbol in symbols and size % prime == 0:
            size //= prime
            product.append(symbol)
    return " ".join(product), size


def term(size: int, limit: str, rounding: int, scores: bool, symbols: Collection[str]) -> tuple[str, float]:
    """Bytes as a product of sizes and its factor; constants if they are small."""
    product, left = factors(size, symbols)
    if left > LARGEST_FACTOR * rounding:
        if size < LARGEST_FACTOR * SCALE_BLOCK:
            return "", float(size)
        raise ValueError(f"{size} bytes are no product of sizes: {left} is left of {product!r}")
    tokens = product.split().count("s")
    if scores and tokens > 1:
        limit = "A"
    return f"{product} {limit}".strip(), left / rounding**tokens


class Window:
    """Live bytes between two events, relative to those at the first."""

    def __init__(self, recorder: Recorder, first: int, last: int, consumed: bool, since: int = 0):
        """`consumed`: gradients of weights are freed as soon as they are complete. Tensors from before `since` stay."""
        terms: dict[int, tuple[str, float]] = {}
        """By storage, its term."""
        grads = dict((key, at) for at, key in recorder.weights if first <= at <= last)
        self.live: Poly = {}
        self.peaks: list[Poly] = [{}]
        rising = False
        born = {key: at for at, (key, change) in enumerate(recorder.events[first:last], first) if change > 0}
        grads = {key: at for key, at in grads.items() if born.get(key, last) < at}  # others are of the block after
        gone = sorted((at, key) for key, at in grads.items()) if consumed else []
        for at in range(first, last):
            while gone and gone[0][0] <= at:
                rising = self._change(rising, *terms[gone.pop(0)[1]], -1)
            key, change = recorder.events[at]
            if change > 0:
                terms[key] = recorder.term(at)
                self.live[terms[key][0]] = self.live.get(terms[key][0], 0.0) + terms[key][1]
                rising = True
                continue
            if consumed and key in grads and grads[key] <= at:
                continue
            born_at = None if key in terms else _born(recorder, key, first)
            if born_at is None or born_at >= since:
                rising = self._change(rising, *(terms[key] if born_at is None else recorder.term(born_at)), -1)
        if rising:
            self.peaks.append(dict(self.live))
        for _, key in gone:
            self._change(False, *terms[key], -1)

    def _change(self, rising: bool, product: str, factor: float, sign: int) -> bool:
        if rising:
            self.peaks.append(dict(self.live))
        self.live[product] = self.live.get(product, 0.0) + sign * factor
        return False


def _born(recorder: Recorder, key: int, before: int) -> int:
    """The event that allocated a storage."""
    return next(at for at in range(before - 1, -1, -1) if recorder.events[at][0] == key and recorder.events[at][1] > 0)


def clean(poly: Poly) -> Poly:
    """Products whose factor is not 0. As many tensors of one expert's rows as there are experts are one of all rows."""
    out = defaultdict[str, float](float)
    for product, factor in poly.items():
        symbols = product.split()
        every = 0
        if {"s", "k"} <= set(symbols) and "e" not in symbols:
            every = round(factor / PRIMES["e"])
            symbols.append("e")
            out[" ".join(symbol for symbol in (*PRIMES, "A", "C") for _ in range(symbols.count(symbol)))] += every
        out[product] += factor - every * PRIMES["e"]
    return {product: factor for product, factor in out.items() if abs(factor) > 1e-9}


@cache
def samples() -> tuple[dict[str, float], ...]:
    """Sizes that jobs may have, from small to large, to find out which moments can be peaks."""
    rng, out = random.Random(0), []
    for _ in range(300):
        large, tp = rng.random() < 0.5, float(rng.choice((1, 2, 4, 8)))
        dim = 2.0 ** (rng.randint(10, 14) if large else rng.randint(5, 9))
        heads = rng.choice((4, 8, 16, 32))
        g = min(float(rng.choice((1, 2, 4, 8))), heads / tp if heads > tp else 1.0)
        experts, ranks = float(rng.choice((1, 2, 4, 8, 16))), float(rng.choice((2, 4, 8)))
        tokens = 2.0 ** (rng.randint(9, 14) if large else rng.randint(4, 9))
        out.append({
            "b": float(rng.choice((1, 2, 4, 8))), "s": tokens / rng.choice((1.0, experts * ranks)), "t": tp,
            "c": float(rng.choice((2, 4, 8))), "p": ranks, "e": experts, "k": float(rng.choice((1, 2, 4, 8))),
            "K": max(1.0, heads / tp) / g, "g": g, "G": g + 2, "d": dim / heads / 2, "o": dim / heads / 4,
            "n": dim / heads / 8, "v": dim / heads / 2, "D": dim, "F": dim * rng.choice((2, 2.7, 3.5, 4)) / tp,
            "f": dim * rng.choice((0.25, 0.5, 1, 2)), "w": dim / tp, "r": float(rng.choice((4, 8, 64))),
            "Q": dim / 4, "L": dim / 8, "A": rng.choice((1.0, 0.05)), "C": rng.choice((1.0, 0.1)),
        })  # fmt: skip
    return tuple(out)


def highest(peaks: list[Poly]) -> list[Poly]:
    """The moments that are the peak for some sizes."""
    unique = list({tuple(sorted(p.items())): p for p in map(clean, peaks)}.values())
    products = sorted({product for p in unique for product in p})
    if not products:
        return [{}]
    factor = np.array([[p.get(product, 0.0) for product in products] for p in unique])
    above = (factor[:, None] >= factor[None]).all(2).sum(0) > 1  # another one is as high in every product
    left = np.flatnonzero(~above)
    sizes = [[prod(s[symbol] for symbol in product.split()) for s in samples()] for product in products]
    best: list[int] = []
    for column in (factor[left] @ np.array(sizes)).T:
        if not best or column[best].max() < NEAR * column.max():
            best.append(int(column.argmax()))
    return [unique[left[i]] for i in best]


def trace_blocks(m: Model, v: BlockVariant) -> dict[str, Any]:
    """By kind of block, what each recompute mode keeps and the peaks of its passes."""
    if dist.is_initialized():  # traced ranks need a group of their own
        return _in_new_process(m, v)
    recorder = record(m, v, split=False)
    halves = record(m, v, split=True) if not v.coded else None
    kinds = {"encoder": "blocks.encoder", "decoder": "blocks.decoder"} if m.has_source else {"block": "blocks."}
    return {kind: _block(recorder, halves, prefix) for kind, prefix in kinds.items()}


def _block(recorder: Recorder, halves: Recorder | None, prefix: str) -> dict[str, Any]:
    marks, rows = recorder.marks, dict[str, Any]()
    for i, mode in enumerate(MODES):
        block, after = f"{prefix}{i}", f"{prefix}{i + 1}"
        forward = Window(recorder, marks["forward", block], marks["forward", after], False)
        row: dict[str, Any] = {"kept": clean(forward.live), "forward": highest(forward.peaks)}
        begun = marks["forward", block]
        start, end = marks["backward", block], marks["done", block]
        for name, consumed in (("consumed", True), ("retained", False)):
            row[f"backward_{name}"] = highest(Window(recorder, start, end, consumed, begun).peaks)
        if ("experts", block) in marks:
            freed = Window(recorder, start, marks["experts", block], True, begun).live
            row["inner"] = clean({product: -factor for product, factor in freed.items()})
        if mode == "none" and halves is not None:
            # the first half ends at the first weight, so the second block is the first one that it passes
            begin, end, since = (halves.marks[name, after] for name in ("backward", "done", "forward"))
            first = Window(halves, begin, end, True, since)
            row["later"], row["input_pass"] = clean(first.live), highest(first.peaks)
        rows[mode] = row
    return rows


def _in_new_process(m: Model, v: BlockVariant) -> dict[str, Any]:
    given = json.dumps([m.model_dump(mode="json"), list(v)])
    done = subprocess.run(
        [sys.executable, "-m", __name__, "-"], input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    table: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return table


MORE: tuple[dict[str, Any], ...] = (
    {"family": "llama", "dim": 64, "layers": 2, "heads": 4, "experts": {"count": 4, "top_k": 2}},
    {"family": "llama", "dim": 64, "layers": 2, "heads": 4, "experts": {"count": 4, "top_k": 1}},
    {"family": "llama", "dim": 64, "layers": 2, "heads": 4, "experts": {"count": 4, "top_k": 2, "shared": 1}},
    {"family": "vit", "dim": 64, "layers": 2, "heads": 4, "vocab": 10},
)  # fmt: skip
"""Models with other blocks than those of named shapes."""


class TracedStructure(NamedTuple):
    """A model with blocks of a structure."""

    model: Model
    routed: bool
    """Whether the blocks have experts."""
    on_cpu: bool
    """Whether models of this structure are small enough for CPUs."""


def structures() -> dict[str, TracedStructure]:
    """By structure, as JSON, a model with such blocks."""
    out: dict[str, TracedStructure] = {}
    for given in (*({"shape": name} for name in SHAPES), *MORE):
        data = {"source": "synthetic", "seq_len": 64}
        m = resolve(parse_job({"model": {"vocab": 1000} | given, "data": data})).model
        if not (m.takes_tokens or m.takes_patches):
            continue
        for routed in sorted({False, m.experts is not None}):
            one = m if routed else m.model_copy(update={"experts": None})
            key = json.dumps(block_structure(one, routed), sort_keys=True)
            small = "shape" not in given or m.experts is None
            first = out.setdefault(key, TracedStructure(one, routed, small))
            out[key] = first._replace(on_cpu=first.on_cpu or small)
    return out


def variants(structure: TracedStructure) -> list[BlockVariant]:
    """The variants that are written: those of layouts that are searched, on GPUs and, for small models, on CPUs, in
    half precision and in fp32. Others are traced when they are planned."""
    m = structure.model
    ring, ulysses = {"cp": True, "zigzag": bool(m.causal) and not m.has_source}, {"cp": True, "ulysses": True}
    whole, cut, cut_sums = dict[str, bool](), {"tp": True, "sequence": True}, {"tp": True}
    searched = [whole, cut, ring, ring | cut] if m.causal else [whole, cut, ring]
    gpu = {"fused": True, "kernels": True}
    options = [gpu | {"half": True} | layout for layout in (*searched, cut_sums, ulysses)]
    options += [gpu | layout for layout in searched]
    if structure.on_cpu:
        on_cpu = [whole, cut, cut_sums, *([] if structure.routed else [ring, ulysses])]
        options += [{"half": half} | layout for half in (True, False) for layout in on_cpu]
    return [BlockVariant(ep=ep, **option) for option in options for ep in sorted({False, structure.routed})]


def main() -> None:
    """Write the tables that are missing: of all structures, or of those with the given numbers. With `-`, print that of
    the model and the variant on stdin."""
    if sys.argv[1:] == ["-"]:
        model, v = json.load(sys.stdin)
        print(json.dumps(trace_blocks(Model(**model), BlockVariant(*v))))
        return
    TABLES.mkdir(exist_ok=True)
    known = list(structures().items())
    for key, structure in [known[int(arg)] for arg in sys.argv[1:]] or known:
        path = TABLES / file_name(key)
        tables = json.loads(path.read_text(encoding="utf-8"))["variants"] if path.exists() else {}
        for v in variants(structure):
            if v.key in tables:
                continue
            tables[v.key] = trace_blocks(structure.model, v)
            path.write_text(dump(key, tables), encoding="utf-8")


def dump(structure: str, tables: dict[str, Any]) -> str:
    """A file of tables, a line for each row."""
    lines = [f'{{"structure": {structure}, "variants": {{']
    for i, (key, kinds) in enumerate(tables.items()):
        lines.append(f'{"," if i else ""}"{key}": {{')
        for j, (kind, modes) in enumerate(kinds.items()):
            rows = ",\n".join(f'  "{mode}": {json.dumps(row)}' for mode, row in modes.items())
            lines.append(f'{"," if j else ""}"{kind}": {{\n{rows}}}')
        lines.append("}")
    return "\n".join([*lines, "}}"]) + "\n"


if __name__ == "__main__":
    main()

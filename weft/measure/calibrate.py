"""`weft calibrate`: measures this machine's matrix products, attention, memory, collectives and disk in minutes."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.hardware.catalog import device_by_product
from weft.hardware.measured import (
    Measured,
    MeasuredAttention,
    MeasuredBlock,
    MeasuredHead,
    MeasuredMessage,
    MeasuredProduct,
    file_name,
)
from weft.hardware.probe import Machine, probe
from weft.job.schema import Job, Optim
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.measure import collective_times as bench
from weft.measure.collective_times import Case
from weft.measure.tiers import measure_disk, measure_links
from weft.measure.timing import timed
from weft.mesh import connect
from weft.models.attention import TokenInfo, attention
from weft.models.build_model import build_model
from weft.models.loss import linear_cross_entropy
from weft.models.rope import frequencies, rotation
from weft.optim.build_optimizers import build_optimizers
from weft.parallel.compiled_units import compile_parts
from weft.parallel.units import find_units
from weft.planner.plan import Plan
from weft.precision import COMPUTE_DTYPES, choose_cpu_kernels

MIB = 2**20
DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp32")}
WIDTHS = {"cpu": (128, 512), "cuda": (1024, 2048, 3072, 4096, 8192)}
ROWS = {"cpu": (128, 1024), "cuda": (1024, 4096, 16384)}
SEQS = {"cpu": (128, 512), "cuda": (2048, 8192, 32768)}
BLOCKS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "cpu": ((128, 4, 4, 352), (256, 8, 4, 704)),
    "cuda": ((2048, 32, 8, 8192), (4096, 32, 8, 14336)),
}
"""dim, heads, kv_heads, ffn"""
VOCAB = {"cpu": ((256, 128), (8192, 256)), "cuda": ((128256, 2048), (32000, 4096))}
"""vocabulary, dim"""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = {"cpu": (4096, 2**18, 2**22), "cuda": (2**16, 2**20, 2**24, 2**28)}
"""Bytes of a collective."""


def measure(quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Measured:
    """Measure this machine, on its first GPU if it has one."""
    began = time.perf_counter()
    machine = probe()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    choose_cpu_kernels()
    budget = 0.02 if quick else 0.2
    steps: dict[str, Callable[[], object]] = {
        "products": lambda: _products(kind, device, budget, quick),
        "attention": lambda: _attention(kind, device, budget, quick),
        "blocks": lambda: _blocks(kind, device, budget, quick),
        "heads": lambda: _heads(kind, device, budget, quick),
        "copy_gb_s": lambda: _copies(kind, device, budget),
        "launch_s": lambda: _launch(device, budget),
        "optimizer_ns": lambda: _optimizer(kind, device, budget),
        "collectives": lambda: _collectives(kind, machine, budget, quick),
    }
    found = {}
    for name, step in steps.items():
        report(name.removesuffix("_s").removesuffix("_gb").removesuffix("_ns"))
        found[name] = step()
    product = torch.cuda.get_device_name(device) if kind == "cuda" else machine.cpu
    known = device_by_product(product) if kind == "cuda" else None
    report("tiers")
    links = measure_links(device, budget, (16 if quick else 256) * MIB)
    states = measure_disk(Path.cwd(), (32 if quick else 256) * MIB)
    write, read = _disk(32 * MIB if quick else 256 * MIB)
    return Measured(
        name=known.name if known else ("cpu" if kind == "cpu" else file_name(product)), device=kind, product=product,
        torch=torch.__version__, threads=torch.get_num_threads(), disk_write_gb_s=write, disk_read_gb_s=read,
        to_device_gb_s=links["to_device_gb_s"] if kind == "cuda" else None,
        from_device_gb_s=links["from_device_gb_s"] if kind == "cuda" else None,
        both_ways_gb_s=links["both_ways_gb_s"], beside_gb_s=links["beside_products_gb_s"],
        states_read_gb_s=states["read_gb_s"], states_write_gb_s=states["write_gb_s"],
        seconds=time.perf_counter() - began, **found,  # type: ignore[arg-type]
    )  # fmt: skip


def _products(kind: str, device: torch.device, budget: float, quick: bool) -> tuple[MeasuredProduct, ...]:
    out = []
    widths, rows = WIDTHS[kind], ROWS[kind]
    shapes = [(m, k, n) for m in rows for k in widths for n in sorted({k, 4 * k, widths[0]})]
    for dtype in DTYPES[kind]:
        usual = dtype == DTYPES[kind][0]
        for m, k, n in shapes[:: 5 if quick or not usual else 1]:
            a = torch.randn(m, k, device=device, dtype=COMPUTE_DTYPES[dtype])
            b = torch.randn(n, k, device=device, dtype=COMPUTE_DTYPES[dtype])
            out.append(MeasuredProduct(dtype, m, k, n, timed(lambda a=a, b=b: F.linear(a, b), device, budget)))  # type: ignore[misc]
    return tuple(out)


def _attention(kind: str, device: torch.device, budget: float, quick: bool) -> tuple[MeasuredAttention, ...]:
    out = []
    dtype = DTYPES[kind][0]
    for seq in SEQS[kind][: 1 if quick else None]:
        for heads, kv, width in ((16, 16, 64), (16, 4, 128)) if kind == "cuda" else ((4, 4, 32), (8, 4, 32)):
            batch = max(1, SEQS[kind][1] // seq)

            def make(count: int, seq: int = seq, width: int = width, batch: int = batch) -> Tensor:
                return torch.randn(
                    batch, seq, count, width, device=device, dtype=COMPUTE_DTYPES[dtype], requires_grad=True
                )

            q, k, v = make(heads), make(kv), make(kv)

            rows = torch.arange(seq, device=device)

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, rows: Tensor = rows) -> Tensor:
                return attention(q, k, v, True, TokenInfo(None, None, None, rows, rows.shape[0]))

            out.append(MeasuredAttention(dtype, batch, heads, kv, seq, width, *_passes(forward, device, budget)))
    return tuple(out)


def _passes(forward: Callable[[], Tensor], device: torch.device, budget: float) -> tuple[float, float]:
    """Seconds of a forward pass and of its backward pass.

    The backward pass is timed together with a forward pass. It has two products for each product of the forward pass,
    so a difference below the forward pass is noise of a busy machine.
    """
    with torch.no_grad():
        forward_s = timed(forward, device, budget)
    grad = torch.ones_like(forward())
    both_s = timed(lambda: forward().backward(grad), device, budget)
    return forward_s, max(both_s - forward_s, forward_s)


def _blocks(kind: str, device: torch.device, budget: float, quick: bool) -> tuple[MeasuredBlock, ...]:
    out = []
    dtype = DTYPES[kind][0]
    for dim, heads, kv, ffn in BLOCKS[kind][: 1 if quick else None]:
        for seq in SEQS[kind][: 1 if quick else 2]:
            batch = max(1, SEQS[kind][1] // seq)
            model = {
                "family": "llama", "dim": dim, "layers": 1, "heads": heads, "kv_heads": kv, "ffn": ffn, "vocab": 64,
            }  # fmt: skip
            job = resolve(Job.model_validate({"model": model, "data": {"source": "synthetic", "seq_len": seq}}))
            block = next(iter(find_units(build_model(job.model)).values()))
            block = block.to_empty(device=device).to(COMPUTE_DTYPES[dtype])
            for p in block.parameters():
                torch.nn.init.normal_(p, std=0.02)
            x = torch.randn(batch, seq, dim, device=device, dtype=COMPUTE_DTYPES[dtype], requires_grad=True)
            freq = frequencies(dim // heads, 10_000.0, None, device)
            rows = torch.arange(seq, device=device)
            where = TokenInfo(rotation(rows, freq), None, None, rows, seq)
            if kind == "cuda":  # the default of a plan
                compile_parts(block, ("forward",))
            passes = _passes(lambda b=block, x=x, w=where: b(x, w), device, budget)  # type: ignore[misc]
            out.append(MeasuredBlock(dtype, dim, heads, kv, dim // heads, ffn, batch, seq, *passes))
    return tuple(out)


def _heads(kind: str, device: torch.device, budget: float, quick: bool) -> tuple[MeasuredHead, ...]:
    out = []
    dtype, tokens = DTYPES[kind][0], ROWS[kind][1]
    for vocab, dim in VOCAB[kind][: 1 if quick else None]:
        x = torch.randn(tokens, dim, device=device, dtype=COMPUTE_DTYPES[dtype], requires_grad=True)
        weight = torch.randn(vocab, dim, device=device, dtype=COMPUTE_DTYPES[dtype], requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64, device=device)

        def work(x: Tensor = x, weight: Tensor = weight, targets: Tensor = targets) -> None:
            linear_cross_entropy(x, weight, targets).backward()

        out.append(MeasuredHead(dtype, dim, vocab, tokens, timed(work, device, budget)))
    return tuple(out)


def _copies(kind: str, device: torch.device, budget: float) -> dict[str, float]:
    out = {}
    for size in (MIB, 16 * MIB, (1024 if kind == "cuda" else 64) * MIB):
        source = torch.ones(size // 4, device=device)
        to = torch.empty_like(source)
        out[str(size)] = 2 * size / timed(lambda a=to, b=source: a.copy_(b), device, budget) / 1e9  # type: ignore[misc]
    return out


def _launch(device: torch.device, budget: float) -> float:
    x = torch.zeros(1, device=device)
    return timed(lambda: x.add_(1), device, budget)


def _optimizer(kind: str, device: torch.device, budget: float) -> float:
    """Nanoseconds per parameter of an AdamW step, on a GPU with bf16 gradients and compute weights."""
    count, size = (8, 2**24) if kind == "cuda" else (16, 2**16)  # on a GPU large, or a slow host would be measured
    master_params: dict[str, Tensor] = {
        str(i): torch.zeros(size, device=device, requires_grad=True) for i in range(count)
    }
    compute_params = (
        {n: m.detach().bfloat16().requires_grad_() for n, m in master_params.items()} if kind == "cuda" else {}
    )
    for leaf in (compute_params or master_params).values():
        leaf.grad = torch.ones_like(leaf)
    optimizer = build_optimizers(
        Optim(lr=1e-4), master_params, lambda name: True, compute_params or master_params, compute_params
    )
    factor = torch.ones((), device=device)
    return timed(lambda: optimizer.step(1e-4, factor), device, budget) / (count * size) * 1e9


def _disk(size: int) -> tuple[float, float]:
    """GB/s of durable writes to the disk of the current folder, and of reads that bypass the page cache."""
    data = os.urandom(MIB) * (size // MIB)
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".weft-calibrate-") as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write = size / (time.perf_counter() - began) / 1e9
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(8 * MIB):
            pass
        return write, size / (time.perf_counter() - began) / 1e9


def _collectives(kind: str, machine: Machine, budget: float, quick: bool) -> tuple[MeasuredMessage, ...]:
    """Times of collectives over local ranks, adjacent and strided; none with a single device."""
    ranks = torch.cuda.device_count() if kind == "cuda" else min(4, max(2, machine.cores_physical))
    ranks = 1 << (ranks.bit_length() - 1)
    if ranks < 2:
        return ()
    sizes = SIZES[kind][:: 2 if quick else 1]
    with RankPool(timeout_s=240) as pool:
        found: list[MeasuredMessage] = pool.run(_collectives_on_rank, ranks, kind, ranks, sizes, budget)[0]
    return tuple(found)


def _collectives_on_rank(kind: str, ranks: int, sizes: tuple[int, ...], budget: float) -> list[MeasuredMessage]:
    """On one rank: time every collective on every axis."""
    inner = 2 if ranks > 2 else ranks
    backend = "nccl" if kind == "cuda" else "gloo"
    plan = Plan(device=kind, device_name=kind, backend=backend, dp_replicate=ranks // inner, tp=inner)
    mesh = connect(plan, 120.0)
    assert mesh.everyone is not None
    asked = [Case(kind_, "native", "fp32", size) for size in sizes for kind_ in COLLECTIVES]
    axes = {**mesh.axes, "everyone": mesh.everyone} if ranks > inner else mesh.axes
    return [
        MeasuredMessage(axis.name, case.kind, axis.size, bytes_, seconds)
        for axis in axes.values()
        for case, (bytes_, seconds) in zip(asked, bench.measure(axis, mesh.device, asked, budget), strict=True)
    ]


def show(found: Measured, path: Path) -> str:
    """The best figure of each kind, for a terminal."""
    best = {d: max((p.tflops for p in found.products if p.dtype == d), default=0.0) for d in DTYPES[found.device]}
    rows = [f"{found.product}, torch {found.torch}, {platform.system()}"]
    rows.append("products  " + ", ".join(f"{d} {t:.3g} TFLOP/s" for d, t in best.items()))
    rows.append(
        f"memory    {max(found.copy_gb_s.values()):.3g} GB/s; an operator starts in {found.launch_s * 1e6:.1f} µs"
    )
    rows.append(f"adamw     {found.optimizer_ns:.3g} ns a parameter")
    rows.append(f"disk      write {found.disk_write_gb_s:.2f}, read {found.disk_read_gb_s:.2f} GB/s")
    if found.to_device_gb_s and found.from_device_gb_s:
        rows.append(f"host      to device {found.to_device_gb_s:.1f}, back {found.from_device_gb_s:.1f} GB/s")
    if found.both_ways_gb_s and found.beside_gb_s and found.states_read_gb_s and found.states_write_gb_s:
        rows.append(
            f"tiers     both ways {found.both_ways_gb_s:.1f} GB/s each, beside products {found.beside_gb_s:.1f}; "
            f"states on disk: write {found.states_write_gb_s:.2f}, read {found.states_read_gb_s:.2f} GB/s"
        )
    for axis in sorted({m.axis for m in found.collectives}):
        largest = max(m.bytes for m in found.collectives)
        speeds = [
            f"{m.kind} {m.bytes / m.seconds / 1e9:.2g}"
            for m in found.collectives
            if (m.axis, m.bytes) == (axis, largest)
        ]
        rows.append(f"{axis:9} " + ", ".join(speeds) + f" GB/s at {largest // 1024} KiB")
    return "\n".join([*rows, f"{path}: measured in {found.seconds:.0f} s"])

"""Rows of a table of published runs: each CSV line gives a model, a cluster, a layout and the measurements."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.hardware.catalog import Device, device_by_product, find_device, find_network
from weft.job.errors import JobError
from weft.planner.model.cluster_facts import ClusterFacts, default_network, make_cluster
from weft.planner.model.model_facts import ModelFacts
from weft.planner.published.known_models import known_model
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES
from weft.planner.search.candidates import PRECISIONS, RECOMPUTES

MAX_TABLE_BYTES = 2**28
REQUIRED_COLUMNS = ("layers", "hidden", "seq_len", "gpu", "gpus")
"""Columns that a table must have; all others are optional."""
BITSANDBYTES_NF4_BYTES, DOUBLE_QUANTIZATION_BYTES = 0.94, 0.05
"""Bytes for each weight that bitsandbytes keeps in 4 bits, read from runs of LitGPT; and what quantized scales save."""
USUAL_HEAD_DIM = 128
FP4_SPEEDUP = 2.0
"""Peak of fp4 products over that of fp8."""
USABLE_MEMORY, SAME_MEMORY = 0.99, 0.08
"""GiB that a program can use of a nominal GB of a device; and a difference from the catalog that is only rounding."""
IDLE_POWER, CLOCK_EXPONENT = 0.17, 0.4
"""Power of a device without products, as a share of its limit; and the clock's exponent over the power above that."""


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    source: str
    row_id: str
    model_name: str
    text: Mapping[str, str]
    model: ModelFacts
    cluster: ClusterFacts
    layout: dict[str, int]
    """The arguments of Layouts.of."""
    global_batch: float
    seconds: float | None
    """Measured step time; None if it is not usable."""
    why_not: str
    """Why the time is not usable."""
    memory_gib: float | None
    fitted: bool | None
    """Whether it fitted into memory; None if unknown."""
    kernel: str
    """The attention kernel, if the notes name it."""

    @property
    def sweep(self) -> tuple[Any, ...]:
        """Rows with the same key differ only in their layout."""
        shape = (self.model.layers, self.model.dim, self.model.ffn, self.model.heads, self.model.vocab)
        machine = (self.text.get("gpu"), self.text.get("gpus"), self.text.get("precision"))
        return (
            self.source,
            self.text.get("table"),
            self.model_name,
            shape,
            self.model.seq_len,
            machine,
            self.global_batch,
            self.kernel,
        )


def read_table(path: Path) -> tuple[list[PublishedRun], dict[str, int]]:
    """The usable rows, and the number of unusable ones by reason."""
    if not path.is_file():
        raise JobError(f"--table {path}: no such file")
    if (size := path.stat().st_size) > MAX_TABLE_BYTES:
        raise JobError(f"--table {path} has {size:,} bytes, which is too large")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte-order mark
            head = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(",;\t", key=head.count))
            columns = [(name or "").strip() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            lines = list(reader)
    except UnicodeDecodeError as error:
        raise JobError(f"--table {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise JobError(f"--table {path} is not CSV: {error}") from None
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise JobError(f"--table {path}: the columns {', '.join(missing)} are missing; see the columns of a runs.csv")
    rows: list[PublishedRun] = []
    skipped: dict[str, int] = {}
    for number, line in enumerate(lines):
        try:
            rows.append(_row({k: (v or "").strip() for k, v in line.items() if k}, number))
        except Unusable as reason:
            skipped[str(reason)] = skipped.get(str(reason), 0) + 1
    return rows, skipped


class Unusable(Exception):
    """A row that does not describe a whole run."""


def _number(text: str) -> float | None:
    """The number of a cell, or None if it is not a number above 0."""
    try:
        value = float(text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text) else text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _need(line: Mapping[str, str], name: str) -> int:
    value = _number(line.get(name, ""))
    if value is None:
        raise Unusable(f"no {name}")
    return max(1, round(value))


def _count(line: Mapping[str, str], name: str) -> int:
    """A degree; 1 if the row does not give it."""
    return max(1, round(_number(line.get(name, "")) or 1))


def _flag(line: Mapping[str, str], name: str, usual: str) -> bool:
    """A flag, as 1, 1.0 or true; `usual` if the table has no such column."""
    return line.get(name, usual).lower() in ("1", "1.0", "true", "yes")


def _row(line: dict[str, str], number: int) -> PublishedRun:
    status = (line.get("status") or "ok").lower()
    if status not in ("ok", "oom"):
        raise Unusable("status is neither ok nor OOM")
    if not line.get("layers") or not line.get("hidden"):
        raise Unusable("the model's shape is not given")
    model = row_model(line)
    gpus = _need(line, "gpus")
    cluster = row_cluster(line, gpus)
    layout, batch = _layout(line, gpus)
    seconds, why_not = _time(line, status, gpus, batch, model.seq_len)
    memory = _number(line.get("peak_mem_gb", ""))
    basis = _memory_basis(line)
    if memory is not None:
        memory = None if "formula" in basis else memory * (1 if "GiB" in basis else 1e9 / 2**30)
    kernel = re.search(r"kernel=([^;]*)", line.get("notes", ""))
    return PublishedRun(
        source=line.get("source") or "unnamed", row_id=line.get("row_id") or str(number),
        model_name=line.get("model") or "unnamed", text=line,
        model=model, cluster=cluster, layout=layout, global_batch=batch, seconds=seconds, why_not=why_not,
        memory_gib=memory, fitted=status == "ok" if _flag(line, "complete", "1") else None,
        kernel=kernel.group(1).strip() if kernel else "",
    )  # fmt: skip


def _memory_basis(line: Mapping[str, str]) -> str:
    """How the memory was measured. `A: GiB …; B: GB …` gives the basis by the name of a table."""
    parts = [part.strip().partition(":") for part in line.get("mem_basis", "").split(";")]
    return next((how for name, _, how in parts if how and name.lower() in line.get("table", "").lower()), parts[0][0])


def row_model(line: Mapping[str, str]) -> ModelFacts:
    """The model of a row; facts without a column follow from the model's name."""
    dim = _need(line, "hidden")
    heads = _need(line, "heads") if line.get("heads") else max(1, dim // USUAL_HEAD_DIM)
    experts = int(_number(line.get("moe_experts", "")) or 0)
    ffn = int(_number(line.get("ffn", "")) or (0 if experts else 4 * dim))
    known = known_model(line.get("model", ""), dim, heads, ffn, experts, _need(line, "layers"))
    moe_ffn = int(_number(line.get("moe_ffn", "")) or ffn)
    vocab = int(_number(line.get("vocab", "")) or 50304)
    return ModelFacts(
        layers=_need(line, "layers"), dim=dim, ffn=ffn or moe_ffn, heads=heads,
        kv_heads=int(_number(line.get("kv_heads", "")) or heads), vocab=vocab, seq_len=_need(line, "seq_len"),
        embedding_rows=vocab, experts=experts, top_k=int(_number(line.get("moe_topk", "")) or 0),
        moe_ffn=moe_ffn if experts else 0, shared_ffn=known.pop("shared", 0) * moe_ffn,
        frozen=int(line.get("task", "") == "lora"), frozen_bytes=_frozen_bytes(line),
        kept_outputs=int(_scales_outputs(line, dim * _need(line, "layers"))), in_flight=2.0 if _is_zb_2p(line) else 1.0,
        **known,
    )  # fmt: skip


def _frozen_bytes(line: Mapping[str, str]) -> float:
    """Bytes of a weight that is not trained: bf16, or 4 bits with scales; bitsandbytes allocates more while it runs."""
    precision = line.get("precision", "")
    if "nf4" not in precision:
        return 2.0
    return (
        BITSANDBYTES_NF4_BYTES - ("nf4-dq" in precision) * DOUBLE_QUANTIZATION_BYTES
        if "base" not in precision
        else 0.53
    )


def _scales_outputs(line: Mapping[str, str], rows: int) -> bool:
    """Whether an adapter scales the output of every matrix (LLaMA-Adapter V2): then it trains more than a prompt of 10
    tokens for each block."""
    trained = re.search(r"trainable params ([\d,]+)", line.get("notes", ""))
    return "adapter" in line.get("table", "").lower() and int(trained[1].replace(",", "") if trained else 0) > 15 * rows


def _is_zb_2p(line: Mapping[str, str]) -> bool:
    """Zero-bubble schedules that hold twice the microbatches of 1F1B."""
    return re.search(r"schedule=ZB-(2p|H2)", line.get("notes", "")) is not None


def row_device(name: str) -> Device:
    """The device of a row, in any of the spellings of published tables."""
    try:
        return find_device(name)
    except JobError:
        found = device_by_product(name) or device_by_product(re.sub(r"[-_]", " ", name))
        if found is None:
            found = next((find_device(known) for words, known in _SPELLINGS if re.search(words, name, re.I)), None)
        if found is None:
            raise Unusable(f"unknown device {name}" if name else "no gpu") from None
        return found


# Spellings that the catalog does not know, narrower patterns first
_SPELLINGS = (
    (r"gb300", "gb300"), (r"gb200", "gb200"), (r"gh200", "gh200"), (r"b300", "b300"), (r"b200", "b200"),
    (r"h200", "h200"), (r"h800", "h800"), (r"h100.*pcie", "h100-pcie"), (r"h100.*nvl", "h100-nvl"), (r"h100", "h100"),
    (r"h20", "h20"), (r"a100.*pcie.*80|a100.*80.*pcie", "a100-pcie"),
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100-pcie-40gb"), (r"a[18]00.*40", "a100-40gb"), (r"a[18]00", "a100"),
    (r"v100.*16", "v100-sxm-16gb"), (r"v100", "v100"), (r"l40s", "l40s"), (r"a10g", "a10g"), (r"\ba40\b", "a40"),
    (r"\ba10\b", "a10"), (r"\bl4\b", "l4"), (r"\bt4\b", "t4"), (r"a6000", "a6000"), (r"4090", "rtx-4090"),
    (r"3090", "rtx-3090"), (r"5090", "rtx-5090"), (r"6000.ada", "rtx-6000-ada"), (r"mi250", "mi250x"),
    (r"mi300", "mi300x"), (r"mi325", "mi325x"), (r"mi350", "mi350x"), (r"mi355", "mi355x"),
)  # fmt: skip


def as_described(device: Device, line: Mapping[str, str]) -> Device:
    """The device with the memory, bandwidth and power limit that the row gives, where they differ from the catalog's.

    Under a power limit the clock is lower: power above idle rises with about its 2.5th power.
    """
    text = f"{line['gpu']}; {line.get('notes', '')}"
    size = re.search(r"(?<![\d.])(\d{1,3})\s*-?GB\b", line["gpu"], re.I)
    memory = int(size[1]) * USABLE_MEMORY if size else device.memory_gib
    if abs(memory / device.memory_gib - 1) < SAME_MEMORY or not 0.4 < memory / device.memory_gib < 2.5:
        memory = device.memory_gib
    bandwidth = re.search(r"(\d(?:\.\d+)?)\s*TB/s(?:ec)?\b", text)
    limit = re.search(r"(\d{2,4})\s*W\b[^;,]*\b(?:limit|cap)|(?:limit|cap)[^;,\d]*(\d{2,4})\s*W\b", text, re.I)
    watts = min(float(limit[1] or limit[2]), device.tdp_w) if limit else device.tdp_w
    idle = IDLE_POWER * device.tdp_w
    clock = (max(watts - idle, 0.1 * idle) / (device.tdp_w - idle)) ** CLOCK_EXPONENT
    return replace(
        device, memory_gib=memory, tdp_w=watts, matmul_share=device.matmul_share * clock,
        memory_tb_s=float(bandwidth[1]) if bandwidth else device.memory_tb_s,
    )  # fmt: skip


def row_cluster(line: Mapping[str, str], gpus: int) -> ClusterFacts:
    device = as_described(row_device(line["gpu"]), line)
    per_node = int(_number(line.get("gpus_per_node", "")) or 8)
    gb_s, latency = network_of(line.get("inter_net", ""), per_node, device)
    facts = make_cluster(device, gpus, min(per_node, gpus), gb_s, latency)
    peaks = dict(facts.peak_tflops)
    if "fp4" in line.get("precision", ""):
        peaks["fp8"] *= FP4_SPEEDUP
    if "tf32" in line.get("precision", "").lower():
        peaks["fp32"] = max(peaks["fp32"], peaks["bf16"] / 2)
    return replace(facts, peak_tflops=peaks)


def network_of(text: str, per_node: int, device: Device) -> tuple[float, float]:
    """GB/s per device and latency in µs, from text such as `IB HDR 8x200Gb`, `IB NDR` or
    `1600Gb/s per node`."""
    usual = find_network(default_network(device))
    latency = 5.0 if re.search(r"roce|ethernet|efa", text, re.I) else usual.latency_us
    cards = re.findall(r"(\d+)\s*x\s*(?:\S* ?ConnectX-\d+ (?:IB \w+ )?)?(\d+)\s*(Gb|GB)", text)
    total = max((int(count) * int(speed) / (8 if unit == "Gb" else 1) for count, speed, unit in cards), default=0)
    if total:  # the compute network, where storage has its own
        return total / per_node, latency
    if found := re.search(r"\b([xnhe]dr|slingshot)\b", text, re.I):
        word = found[1].lower()
        return find_network("slingshot-11" if word == "slingshot" else f"ib-{word}").gb_s, latency
    if found := re.search(r"([1-9]\d*)\s*Gb(?:ps|/s)", text):
        return int(found[1]) / 8 / per_node, latency
    return usual.gb_s, latency


def _layout(line: Mapping[str, str], gpus: int) -> tuple[dict[str, int], float]:
    tp, pp, cp, ep, vpp = (_count(line, name) for name in ("tp", "pp", "cp", "ep", "vpp"))
    dp = _count(line, "dp") if _number(line.get("dp", "")) else gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise Unusable("the layout does not multiply to the number of GPUs")
    batch, micro = _number(line.get("global_batch_seqs", "")), _number(line.get("micro_batch", ""))
    if batch is None and micro is None:
        raise Unusable("neither micro_batch nor global_batch_seqs")
    words = line.get("fsdp_or_zero", "").lower()
    if not micro and batch and pp > 1 and "fsdp" in words:  # torchtitan has as many microbatches as pipeline ranks
        micro = batch / (dp * pp)
    micro = micro or 1.0
    batch = batch or micro * dp
    zero = int(_named(_ZERO_STAGES, words, "0"))
    if pp > 1 and "fsdp" in words:  # weights stay gathered and gradients whole until the last microbatch
        zero = 1
    shard = re.search(r"shard=(\d+)", words)
    shards = int(shard.group(1)) if shard else dp
    if "hsdp" in words:
        shards = min(dp, int(_number(line.get("gpus_per_node", "")) or 8))
    if shards < 1 or dp % shards:
        shards = dp
    code = _named(_PRECISIONS, line.get("precision", ""), "bf16")
    recompute = _named(_RECOMPUTES, line.get("recompute", ""), "none")
    schedule = "interleaved-1f1b" if vpp > 1 and pp > 1 else "1f1b"
    if re.search(r"schedule=ZB-(1p|H1)", line.get("notes", "")):
        schedule = "zb-h1"
    elif "schedule=ZB" in line.get("notes", ""):
        schedule = "zbv"
    return {
        "dp_replicate": dp // shards if zero else dp, "dp_shard": shards if zero else 1, "zero": zero, "tp": tp,
        "sequence": int(_flag(line, "sp", "") and tp > 1), "cp": cp, "pp": pp,
        "virtual_stages": vpp if pp > 1 else 1, "schedule": SCHEDULE_NAMES.index(schedule), "ep": ep,
        "microbatch": max(1, round(micro)), "accumulation": max(1, round(batch / (dp * micro))),
        "recompute": RECOMPUTES.index(recompute), "precision": PRECISIONS.index(code),
        "offload": int("offload" in words + line.get("table", "").lower()),
    }, batch  # fmt: skip


# What tables write, and what it means: the first pattern that matches
_PRECISIONS = (
    (r"fp8|fp4|float8", "fp8"), (r"bf16|bfloat", "bf16"), (r"fp16|float16|half|amp|\b16", "fp16"),
    (r"[ft][fl].*32|\b32|fp64", "fp32"),
)  # fmt: skip
_RECOMPUTES = ((r"selective|partial|^sac", "selective"), (r"^(full|true|yes|on|1|all|block|uniform)", "full"))
_ZERO_STAGES = (
    (r"not stated", "0"), *((rf"(zero|stage)[-_ ]?(stage[-_ ]?)?{n}", str(n)) for n in (2, 3, 1, 0)),
    (r"shard_grad_op", "2"), (r"fsdp|full_shard|hsdp", "3"), (r"distributed.?optim|distributed$", "1"),
)  # fmt: skip


def _named(table: tuple[tuple[str, str], ...], text: str, usual: str) -> str:
    return next((name for words, name in table if re.search(words, text, re.I)), usual)


def _time(line: Mapping[str, str], status: str, gpus: int, batch: float, seq_len: float) -> tuple[float | None, str]:
    """Measured seconds of a step, or why there are none."""
    if status == "oom":
        return None, "ran out of memory (scored under fits)"
    if not _flag(line, "complete", "1"):
        return None, "incomplete row"
    if line.get("trust", "A") not in ("A", ""):
        return None, f"trust {line['trust']}"
    derived = line.get("derived_fields", "").split("|")
    step, tokens = _number(line.get("step_time_s", "")), _number(line.get("tokens_per_s_per_gpu", ""))
    if tokens and not any(d.startswith("tokens_per_s_per_gpu") for d in derived):
        return batch * seq_len / (tokens * gpus), ""
    if step and not any(d.startswith("step_time_s") for d in derived):
        return step, ""
    return None, "no measured time (derived, or none)" if step or tokens else "no time (memory only)"

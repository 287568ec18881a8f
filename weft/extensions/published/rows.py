"""Rows of a table of published runs: each CSV line gives a model, a cluster, a layout and the measurements."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.extensions.published.cells import Unusable, count_of, flag_of, need, number_of
from weft.extensions.published.known_models import known_model
from weft.extensions.published.row_cluster import row_cluster
from weft.job.errors import JobError
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import ModelFacts
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES
from weft.planner.search.candidates import PRECISIONS, RECOMPUTES

MAX_TABLE_BYTES = 2**28
REQUIRED_COLUMNS = ("layers", "hidden", "seq_len", "gpu", "gpus")
"""Columns that a table must have; all others are optional."""
_COLUMNS = {
    "num_layers": "layers", "n_layers": "layers", "hidden_size": "hidden", "d_model": "hidden",
    "sequence_length": "seq_len", "num_gpus": "gpus", "n_gpus": "gpus", "mbs": "micro_batch",
    "micro_batch_size": "micro_batch", "gbs": "global_batch_seqs", "global_batch_size": "global_batch_seqs",
    "software": "framework", "stack": "framework",
}  # fmt: skip
"""Other names of columns. Headers are read in lower case, with _ for blanks."""
BITSANDBYTES_NF4_BYTES, DOUBLE_QUANTIZATION_BYTES = 0.94, 0.05
"""Bytes for each weight that bitsandbytes keeps in 4 bits, read from runs of LitGPT; and what quantized scales save."""
USUAL_HEAD_DIM = 128


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
            columns = [(name or "").strip().lower().replace(" ", "_") for name in reader.fieldnames or []]
            columns = [_COLUMNS.get(name, name) for name in columns]
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


def _row(line: dict[str, str], number: int) -> PublishedRun:
    status = _named(_STATUS, line.get("status") or "ok", "")
    if not status:
        raise Unusable("status is neither ok nor OOM")
    if not line.get("layers") or not line.get("hidden"):
        raise Unusable("the model's shape is not given")
    model = row_model(line)
    gpus = need(line, "gpus")
    cluster = row_cluster(line, gpus)
    layout, batch = _layout(line, gpus)
    seconds, why_not = _time(line, status, gpus, batch, model.seq_len)
    memory = number_of(line.get("peak_mem_gb", ""))
    basis = _memory_basis(line)
    if memory is not None:
        memory = None if "formula" in basis else memory * (1 if "GiB" in basis + line["peak_mem_gb"] else 1e9 / 2**30)
    kernel = re.search(r"kernel=([^;]*)", line.get("notes", ""))
    return PublishedRun(
        source=line.get("source") or "unnamed", row_id=line.get("row_id") or str(number),
        model_name=line.get("model") or "unnamed", text=line,
        model=model, cluster=cluster, layout=layout, global_batch=batch, seconds=seconds, why_not=why_not,
        memory_gib=memory, fitted=status == "ok" if flag_of(line, "complete", "1") else None,
        kernel=kernel.group(1).strip() if kernel else "",
    )  # fmt: skip


def _memory_basis(line: Mapping[str, str]) -> str:
    """How the memory was measured. `A: GiB …; B: GB …` gives the basis by the name of a table."""
    parts = [part.strip().partition(":") for part in line.get("mem_basis", "").split(";")]
    return next((how for name, _, how in parts if how and name.lower() in line.get("table", "").lower()), parts[0][0])


def row_model(line: Mapping[str, str]) -> ModelFacts:
    """The model of a row; facts without a column follow from the model's name."""
    dim = need(line, "hidden")
    heads = need(line, "heads") if line.get("heads") else max(1, dim // USUAL_HEAD_DIM)
    experts = int(number_of(line.get("moe_experts", "")) or 0)
    ffn = int(number_of(line.get("ffn", "")) or (0 if experts else 4 * dim))
    known = known_model(line.get("model", ""), dim, heads, ffn, experts, need(line, "layers"))
    moe_ffn = int(number_of(line.get("moe_ffn", "")) or ffn)
    vocab = int(number_of(line.get("vocab", "")) or 50304)
    return ModelFacts(
        layers=need(line, "layers"), dim=dim, ffn=ffn or moe_ffn, heads=heads,
        kv_heads=int(number_of(line.get("kv_heads", "")) or heads), vocab=vocab, seq_len=need(line, "seq_len"),
        embedding_rows=vocab, experts=experts, top_k=int(number_of(line.get("moe_topk", "")) or 0),
        moe_ffn=moe_ffn if experts else 0, shared_ffn=known.pop("shared", 0) * moe_ffn,
        frozen=int(line.get("task", "") == "lora"), frozen_bytes=_frozen_bytes(line),
        kept_outputs=int(_scales_outputs(line, dim * need(line, "layers"))), in_flight=2.0 if _is_zb_2p(line) else 1.0,
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


def _layout(line: Mapping[str, str], gpus: int) -> tuple[dict[str, int], float]:
    tp, pp, cp, ep = (count_of(line, name) for name in ("tp", "pp", "cp", "ep"))
    vpp = count_of(line, "vpp") if line.get("vpp") else _usual_stages(line, pp)
    dp = count_of(line, "dp") if number_of(line.get("dp", "")) else gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise Unusable("the layout does not multiply to the number of GPUs")
    batch, micro = number_of(line.get("global_batch_seqs", "")), number_of(line.get("micro_batch", ""))
    if batch is None and micro is None:
        raise Unusable("neither micro_batch nor global_batch_seqs")
    words = (line.get("fsdp_or_zero") or line.get("framework", "")).lower()
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
        shards = min(dp, int(number_of(line.get("gpus_per_node", "")) or 8))
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
        "sequence": int(flag_of(line, "sp", "") and tp > 1), "cp": cp, "pp": pp,
        "virtual_stages": vpp if pp > 1 else 1, "schedule": SCHEDULE_NAMES.index(schedule), "ep": ep,
        "microbatch": max(1, round(micro)), "accumulation": max(1, round(batch / (dp * micro))),
        "recompute": RECOMPUTES.index(recompute), "precision": PRECISIONS.index(code),
        "offload": int("offload" in words + line.get("table", "").lower()),
    }, batch  # fmt: skip


_INTERLEAVED = r"nemo|dgxc|bridge|mlperf"
"""Sources whose pipelines are interleaved where a row does not say how often."""


def _usual_stages(line: Mapping[str, str], pp: int) -> int:
    """Stages a rank of a row without `vpp`: in stages of two blocks or more, as far as they divide evenly."""
    each, left = divmod(need(line, "layers"), pp)
    if left or pp == 1 or not re.search(_INTERLEAVED, line.get("source", ""), re.I):
        return 1
    return max(stages for stages in range(1, max(2, each // 2 + 1)) if each % stages == 0)


# What tables write, and what it means: the first pattern that matches
_PRECISIONS = (
    (r"fp8|fp4|float8", "fp8"), (r"bf16|bfloat", "bf16"), (r"fp16|float16|half|amp|\b16", "fp16"),
    (r"[ft][fl].*32|\b32|fp64", "fp32"),
)  # fmt: skip
_RECOMPUTES = (
    (r"selective|partial|^sac", "selective"),
    (r"^(full|true|yes|on|1|all|block|uniform|(gradient|activation)?.?checkpoint)", "full"),
)  # fmt: skip
_STATUS = ((r"oom|out.?of.?memory", "oom"), (r"^(ok|ran|success\w*|completed?|finished|done|pass(ed)?)$", "ok"))
_ZERO_STAGES = (
    (r"not stated", "0"), *((rf"(zero|stage)[-_ ]?(stage[-_ ]?)?{n}", str(n)) for n in (2, 3, 1, 0)),
    (r"shard_grad_op", "2"), (r"fsdp|full_shard|hsdp|torchtitan", "3"),
    (r"distributed.?optim|distributed$|megatron.?bridge|nemo", "1"),
)  # fmt: skip


def _named(table: tuple[tuple[str, str], ...], text: str, usual: str) -> str:
    return next((name for words, name in table if re.search(words, text, re.I)), usual)


def _time(line: Mapping[str, str], status: str, gpus: int, batch: float, seq_len: float) -> tuple[float | None, str]:
    """Measured seconds of a step, or why there are none."""
    if status == "oom":
        return None, "ran out of memory (scored under fits)"
    if not flag_of(line, "complete", "1"):
        return None, "incomplete row"
    if line.get("trust", "A") not in ("A", ""):
        return None, f"trust {line['trust']}"
    derived = line.get("derived_fields", "").split("|")
    step, tokens = number_of(line.get("step_time_s", "")), number_of(line.get("tokens_per_s_per_gpu", ""))
    if tokens and not any(d.startswith("tokens_per_s_per_gpu") for d in derived):
        return batch * seq_len / (tokens * gpus), ""
    if step and not any(d.startswith("step_time_s") for d in derived):
        return step, ""
    return None, "no measured time (derived, or none)" if step or tokens else "no time (memory only)"

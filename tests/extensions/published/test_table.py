"""Scoring a table of published runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command import weft

from weft.extensions.published.framework import calibration_of, framework_of
from weft.extensions.published.row_cluster import network_of, row_device
from weft.extensions.published.rows import read_table
from weft.extensions.published.score import predict, rank_correlation, score_table, show_table, sweeps
from weft.hardware.catalog import find_device
from weft.job.errors import JobError
from weft.planner.calibration import read_calibration
from weft.planner.search.candidates import PRECISIONS, RECOMPUTES

COLUMNS = [
    "source",
    "table",
    "row_id",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "vocab",
    "seq_len",
    "gpu",
    "gpus",
    "gpus_per_node",
    "dp",
    "fsdp_or_zero",
    "tp",
    "sp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "micro_batch",
    "global_batch_seqs",
    "recompute",
    "precision",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "peak_mem_gb",
    "mem_basis",
    "notes",
    "derived_fields",
    "status",
    "complete",
    "trust",
    "task",
    "inter_net",
]
LLAMA = {
    "model": "Llama3-8B",
    "layers": 32,
    "hidden": 4096,
    "ffn": 14336,
    "heads": 32,
    "kv_heads": 8,
    "vocab": 128256,
    "seq_len": 8192,
}
PLAIN = {
    "source": "somebody",
    "table": "t",
    "gpu": "H100-SXM-80GB",
    "gpus": 64,
    "gpus_per_node": 8,
    "dp": 64,
    "fsdp_or_zero": "FSDP(ZeRO-3)",
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "micro_batch": 1,
    "global_batch_seqs": 128,
    "recompute": "full",
    "precision": "bf16",
    "status": "ok",
    "complete": 1,
    "trust": "A",
    "task": "pretrain",
    "inter_net": "IB NDR 8x400Gb",
}


def table(path: Path, *rows: dict[str, object]) -> Path:
    lines = [",".join(COLUMNS)]
    for number, row in enumerate(rows):
        filled = {**LLAMA, **PLAIN, "row_id": number, **row}
        lines.append(",".join(str(filled.get(c, "")) for c in COLUMNS))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_json_has_exactly_its_keys(tmp_path: Path) -> None:
    path = table(
        tmp_path / "runs.csv",
        {"tokens_per_s_per_gpu": 6000, "derived_fields": "step_time_s", "step_time_s": 2.9},
        {"tp": 2, "dp": 32, "tokens_per_s_per_gpu": 5500},
        {"status": "OOM", "micro_batch": 8, "recompute": "none", "global_batch_seqs": 512},
        {"tokens_per_s_per_gpu": 6000, "trust": "B", "peak_mem_gb": 40, "mem_basis": "GiB"},
        {"layers": "", "tokens_per_s_per_gpu": 1},
        {"dp": 7},
        {"gpu": "Abacus-9000"},
        {"tokens_per_s_per_gpu": 6000, "derived_fields": "tokens_per_s_per_gpu(from tflops)"},
    )
    output = json.loads(weft(tmp_path, "estimate", "--table", str(path), "--json").out)
    four = {"rows", "median_abs_error", "mean_abs_error", "p90_abs_error"}
    assert {"overall", "sources", "skipped"} <= output.keys()
    for part in (output["overall"], output["sources"]["somebody"]):
        assert part.keys() == {"step_time", "peak_memory", "fits", "regret"}
        assert part["step_time"].keys() == four and part["peak_memory"].keys() == four
        assert part["fits"].keys() == {"rows", "accuracy", "false_fits", "false_ooms"}
        assert part["regret"].keys() == {"sweeps", "mean", "p95", "spearman"}
    assert output["overall"]["step_time"]["rows"] == 2
    assert output["overall"]["peak_memory"]["rows"] == 1
    assert output["overall"]["fits"]["rows"] == 5
    assert output["overall"]["regret"]["sweeps"] == 1
    assert sum(output["skipped"].values()) == 6
    assert output["skipped"] == {
        "ran out of memory (scored under fits)": 1,
        "trust B": 1,
        "the model's shape is not given": 1,
        "the layout does not multiply to the number of GPUs": 1,
        "unknown device Abacus-9000": 1,
        "no measured time (derived, or none)": 1,
    }
    assert "Rows without a time to compare: " in show_table(score_table(path))


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("source,model\na,b\n", encoding="utf-8")
    with pytest.raises(JobError, match=r"the columns layers, hidden, .* are missing"):
        read_table(path)
    done = weft(tmp_path, "estimate", "--table", str(tmp_path / "none.csv"))
    assert done.code == 2 and "no such file" in done.err


def test_tables_of_other_spreadsheets(tmp_path: Path) -> None:
    """A byte-order mark, spaces in the heading, decimals where numbers are whole, and no columns beyond the needed."""
    path = tmp_path / "theirs.csv"
    head = "layers, hidden ,heads,seq_len,gpu,gpus,micro_batch,tokens_per_s_per_gpu\n"
    lines = [
        "32.0,4096.0,32.0,8192.0,NVIDIA H100 80GB HBM3,8.0,1.0,9000.5",
        "32,4096,32,8192,H100SXM5,8,1,9000,a cell too many",
        "32,4096,32,8192,H100SXM5,8,1",
        "32,4096,32,nan,H100,8,1,9000",
        "32,-4096,32,8192,H100,8,1,9000",
        "32,4096,0,8192,H100,8,1,9000",
        "32,4096,32,8192,,8,1,9000",
        ",,,,,,,",
    ]
    text = head + "\n".join(lines) + "\n"
    path.write_text(text.replace(",", ";"), encoding="utf-8-sig")
    separated = score_table(path)
    path.write_text(text, encoding="utf-8-sig")
    output = score_table(path)
    assert separated == output
    assert output["overall"]["step_time"]["rows"] == 2 and list(output["sources"]) == ["unnamed"]
    assert output["skipped"] == {
        "the model's shape is not given": 1,
        "no gpu": 1,
        "no heads": 1,
        "no hidden": 1,
        "no seq_len": 1,
        "no time (memory only)": 1,
    }
    path.write_text(head, encoding="utf-8")
    empty = score_table(path)
    assert empty["overall"]["step_time"] == dict.fromkeys(("median_abs_error", "mean_abs_error", "p90_abs_error")) | {
        "rows": 0
    }
    assert "overall" in show_table(empty)
    path.write_bytes(head.encode() + b"\xff\xfe,1\n")
    with pytest.raises(JobError, match="is not UTF-8 text"):
        read_table(path)


def test_flags_may_be_decimals(tmp_path: Path) -> None:
    [row], _ = read_table(
        table(tmp_path / "f.csv", {"complete": "1.0", "sp": "1.0", "tp": 8, "dp": 8, "tokens_per_s_per_gpu": 1})
    )
    assert row.seconds and row.fitted and row.layout["sequence"] == 1
    [row], _ = read_table(table(tmp_path / "f.csv", {"complete": "0.0", "tokens_per_s_per_gpu": 1}))
    assert row.seconds is None and row.fitted is None and row.why_not == "incomplete row"


@pytest.mark.parametrize(
    ("result", "name"),
    [
        ("H200SXM", "h200-sxm"),
        ("nvidia_h100_pcie", "h100-pcie"),
        ("A100 40GB", "a100-sxm-40gb"),
        ("A800-80G", "a100-sxm-80gb"),
        ("Tesla V100 16G", "v100-sxm-16gb"),
        ("DGX-B200x8", "b200-sxm"),
        ("Instinct MI300", "mi300x"),
    ],
)
def test_spellings_of_devices(result: str, name: str) -> None:
    assert row_device(result).name == name


def test_a_calibration_file_and_a_wrong_name(tmp_path: Path) -> None:
    path = table(tmp_path / "s.csv", {"tokens_per_s_per_gpu": 6000})
    (tmp_path / "mine.json").write_text('{"matmul": 0.5}', encoding="utf-8")
    assert score_table(path, stack=str(tmp_path / "mine.json"))["overall"]["step_time"]["rows"] == 1
    for text, message in (("{", "is not JSON"), ("[]", "must be an object"), ('{"link": "x"}', "link is 'x'")):
        (tmp_path / "mine.json").write_text(text, encoding="utf-8")
        with pytest.raises(JobError, match=message):
            read_calibration(str(tmp_path / "mine.json"))
    done = weft(tmp_path, "estimate", "--table", str(path), "--stack", "nobody")
    assert done.code == 2 and "no calibration is named 'nobody'; known: " in done.err


def test_a_job_or_a_table_but_not_both(tmp_path: Path) -> None:
    done = weft(tmp_path, "estimate")
    assert done.code == 2 and "takes a JOB or --table FILE.csv" in done.err


def test_a_job_by_the_command_line(tmp_path: Path) -> None:
    done = weft(tmp_path, "estimate", "demo", "--nproc", "2", "--json")
    output = json.loads(done.out)
    assert {
        "step_time_s",
        "mfu",
        "peak_memory_gib",
        "fits",
        "memory",
        "time",
        "energy_kwh",
        "cost_usd",
    } <= output.keys()
    result = weft(tmp_path, "estimate", "demo", "--nproc", "2").out
    assert "memory " in result and "whole run " in result


def test_an_unknown_source_is_scaled_by_its_other_models_only(tmp_path: Path) -> None:
    """Twice as slow as the stack: a model's own times never enter its factor."""
    bare = read_table(table(tmp_path / "a.csv", {"tokens_per_s_per_gpu": 1000}))[0]
    seconds = predict(bare, scale=False).seconds[0]
    rate = 128 * 8192 / seconds / 64
    other = {"model": "Llama3-9B", "layers": 36}
    same = [{"tokens_per_s_per_gpu": rate / 2} for _ in range(6)]
    one_model = predict(read_table(table(tmp_path / "b.csv", *same))[0])
    assert (one_model.factor == 1).all()
    both = predict(read_table(table(tmp_path / "c.csv", *same, {**other, "tokens_per_s_per_gpu": rate}))[0])
    assert both.factor[-1] == pytest.approx(2 ** (6 / 8), rel=1e-3)
    assert score_table(tmp_path / "c.csv")["scaled"]["somebody"] != 1
    assert "as_shipped" in score_table(tmp_path / "c.csv")
    assert score_table(tmp_path / "c.csv", scale=False)["scaled"] == {}


def test_regret_counts_what_the_choice_costs(tmp_path: Path) -> None:
    rows = read_table(
        table(
            tmp_path / "s.csv",
            {"tokens_per_s_per_gpu": 4000},
            {"tp": 8, "dp": 8, "fsdp_or_zero": "ZeRO-1", "tokens_per_s_per_gpu": 5000},
        )
    )[0]
    output = predict(rows, scale=False)
    [sweep] = sweeps(output, range(2))
    chosen = int(np.argmin(output.seconds))
    assert sweep["regret"] == pytest.approx([0.25, 0.0][chosen])
    assert sweep["spearman"] == pytest.approx([-1.0, 1.0][chosen])


def test_rank_correlation() -> None:
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([30.0, 20, 10])) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("text", "per_node", "gb_s"),
    [
        ("IB HDR 8x200Gb", 8, 25.0),
        ("RoCE 1600Gb/s per node", 8, 25.0),
        ("Omni-Path 4x100Gb", 8, 6.25),
        ("IB 8x50GB/s", 8, 50.0),
        ("4x ConnectX-8 IB XDR 800 Gb/s", 4, 100.0),
        ("8x Thor2 400GbE, Storage: 1x BlueField-3 800Gb/s", 8, 50.0),
        ("2 x Ethernet Controller X710 for 10GBASE-T, 8 x BCM57608 100Gb/200Gb/400Gb Ethernet", 8, 50.0),
        # MLPerf: the compute network, where cards for storage and management come first, or have no counterpart
        (
            "Storage+Management: 1x NVIDIA BlueField 2 DPU 100Gb/s, Compute: 8x NVIDIA ConnectX-7 IB NDR 400Gb/s",
            8,
            50.0,
        ),
        ("Storage: 2x BF3 ConnectX-7 400Gb/s, Compute: 8x BF3 ConnectX-7 200Gb/s, Manageme", 8, 25.0),
        ("Storage&Compute: 4x ConnectX-7 IB NDR 400Gb/s, Management: 25Gb/s Ethernet NIC", 4, 50.0),
        ("Storage+Management: 1x NVIDIA BlueField 2 DPU 100Gb/s, Compute: 8x NVIDIA Connect", 8, 25.0),
        ("Management: 1x Ethernet 10Gb/s", 8, 25.0),
    ],
)
def test_spellings_of_networks(text: str, per_node: int, gb_s: float) -> None:
    assert network_of(text, per_node, row_device("A100-SXM-80GB"))[0] == pytest.approx(gb_s)


def test_the_framework_is_recognised(tmp_path: Path) -> None:
    rows = read_table(
        table(
            tmp_path / "r.csv",
            {"source": "vtrain"},
            {"source": "a blog", "notes": "torchtitan"},
            {"source": "a paper", "notes": "Megatron-LM", "fsdp_or_zero": "", "gpu": "A100-SXM-80GB"},
            {"source": "a paper", "fsdp_or_zero": "distributed-optimizer(ZeRO-1)", "gpu": "B200"},
            {"source": "someone", "fsdp_or_zero": "", "gpu": "MI300X"},
            {"source": "LitGPT", "fsdp_or_zero": "FSDP"},
            {"source": "a chart", "table": "Liger (HF)"},
        )
    )[0]
    assert [framework_of(r) for r in rows] == [
        "megatron-deepspeed", "fsdp", "megatron", "megatron-bridge", "default", "litgpt", "huggingface"
    ]  # fmt: skip
    assert [calibration_of(r).name for r in rows] == [framework_of(r) for r in rows]


def memory_of(path: Path, **row: object) -> float:
    [one], _ = read_table(table(path, row))
    return float(predict([one], scale=False).peak_gib[0])


def test_what_a_row_describes_changes_its_memory(tmp_path: Path) -> None:
    """Adapters, quantized weights, offload, small optimizers and schedules that hold more."""
    path = tmp_path / "m.csv"
    one = {"gpus": 1, "dp": 1, "fsdp_or_zero": "none", "global_batch_seqs": 1, "seq_len": 512, "recompute": "none",
           "precision": "bf16-true", "source": "LitGPT"}  # fmt: skip
    full, lora = memory_of(path, **one), memory_of(path, **one, task="lora")
    quantized = memory_of(path, **{**one, "task": "lora", "precision": "bf16-true+bnb.nf4"})
    assert full > 3 * lora > 4.5 * quantized
    # all of the base weights in bf16, and in about a byte without embedding and head
    assert 14.9 < lora < 21 and lora - quantized == pytest.approx(6.98e9 * 1.06 / 2**30, rel=0.01)
    adapters = [
        memory_of(path, **one, task="lora", table="Adapter", notes=f"trainable params {n}") for n in (10**6, 10**7)
    ]
    assert adapters[0] == lora < adapters[1]
    small = {"source": "a paper", "notes": "Megatron-DeepSpeed; 8-bit Adam", "fsdp_or_zero": "ZeRO-1"}
    assert memory_of(path, **small) < memory_of(path, **{**small, "notes": "Megatron-DeepSpeed"})
    offload = {**small, "fsdp_or_zero": "ZeRO-3 +opt offload"}
    assert memory_of(path, **offload) < memory_of(path, **{**small, "fsdp_or_zero": "ZeRO-3"})
    piped = {"pp": 4, "dp": 16, "fsdp_or_zero": "none", "recompute": "none"}
    held = [memory_of(path, **piped, notes=f"Megatron schedule={name}") for name in ("1F1B", "ZB-1p", "ZB-2p")]
    assert held[0] <= held[1] < held[2]


def test_fsdp_with_several_microbatches_and_tp(tmp_path: Path) -> None:
    """Until gradients are reduced, whole gradients and weights stay; what tp gathers is not cut; and torchtitan has as
    many microbatches as pipeline ranks and a loss that tp cuts."""
    path, one = tmp_path / "f.csv", {"source": "a paper", "fsdp_or_zero": "FSDP2", "recompute": "full"}
    few, many = (memory_of(path, **one, global_batch_seqs=n * 64, micro_batch=1) for n in (1, 4))
    assert many - few == pytest.approx(8.03e9 * (2 + 4) / 2**30, rel=0.15)
    split = {**one, "tp": 8, "dp": 8, "sp": 1, "micro_batch": 8, "global_batch_seqs": 64}
    plain, cut = memory_of(path, **split), memory_of(path, **{**split, "source": "torchtitan"})
    assert cut < plain
    piped = {**one, "pp": 4, "dp": 16, "micro_batch": "", "global_batch_seqs": 256}
    [row], _ = read_table(table(path, piped))
    assert (row.layout["microbatch"], row.layout["accumulation"]) == (4, 4)


def test_memory_is_in_the_unit_of_its_table(tmp_path: Path) -> None:
    basis = "torchtune: GiB peak active; LitGPT: GB torch max_memory_allocated"
    for name, gib in (("torchtune README", 10.0), ("LitGPT tables", 10e9 / 2**30)):
        [row], _ = read_table(table(tmp_path / "u.csv", {"table": name, "peak_mem_gb": 10, "mem_basis": basis}))
        assert row.memory_gib == pytest.approx(gib)
    [row], _ = read_table(table(tmp_path / "u.csv", {"peak_mem_gb": 10, "mem_basis": "GiB, torch max_allocated"}))
    assert row.memory_gib == 10


def test_what_a_row_says_of_its_device_and_settings(tmp_path: Path) -> None:
    """Memory in the device's name, a power limit, and the words of other tables for ZeRO, recompute and precision."""
    rows, skipped = read_table(
        table(
            tmp_path / "d.csv",
            {"gpu": "NVIDIA H100 80GB HBM3"},
            {"gpu": "H100-SXM-96GB", "notes": "500 W power limit; HBM2e 2.4 TB/s"},
            {"fsdp_or_zero": "DeepSpeed ZeRO stage 2", "recompute": "True", "precision": "float16"},
            {"fsdp_or_zero": "zero3", "recompute": "Selective (ops)", "precision": "tf32"},
            {"fsdp_or_zero": "DDP", "recompute": "no", "precision": "BFloat16", "heads": ""},
        )
    )
    assert not skipped
    plain, limited, *others = rows
    assert plain.cluster.memory_gib == find_device("h100").memory_gib and limited.cluster.memory_gib > 90
    assert limited.cluster.memory_gb_s == 2400 and 0.8 < limited.cluster.reach / plain.cluster.reach < 0.88
    read = [
        (row.layout["zero"], RECOMPUTES[row.layout["recompute"]], PRECISIONS[row.layout["precision"]]) for row in others
    ]
    assert read == [(2, "full", "fp16"), (3, "selective", "fp32"), (0, "none", "bf16")]
    assert others[1].cluster.peak_tflops["fp32"] == plain.cluster.peak_tflops["bf16"] / 2
    assert others[2].model.heads == plain.model.heads
    seconds = predict(rows, scale=False).seconds
    assert np.all(np.isfinite(seconds)) and seconds[1] > 1.1 * seconds[0]


def test_a_run_that_cannot_have_kept_its_activations_is_timed_with_recompute(tmp_path: Path) -> None:
    large = {"layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96, "kv_heads": 96, "micro_batch": 6, "gpus": 256,
             "dp": 256, "global_batch_seqs": 1536, "model": "GPT3-175B", "seq_len": 2048, "vocab": 51200}  # fmt: skip
    rows, _ = read_table(table(tmp_path / "s.csv", {**large, "recompute": ""}, {**large, "recompute": "full"}))
    assert len(set(predict(rows, scale=False).seconds)) == 1

"""Tables of other people: their words for columns, frameworks and results, and what their software does differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weft.extensions.published.cells import number_of
from weft.extensions.published.fitting import fit, from_free, to_free
from weft.extensions.published.framework import Framework, framework_of
from weft.extensions.published.row_arrays import estimate_rows
from weft.extensions.published.rows import PublishedRun, read_table
from weft.extensions.published.score import predict
from weft.planner.calibration import Calibration

HEAD = (
    "source,table,model,num_layers,hidden_size,ffn,heads,kv_heads,vocab,Sequence Length,gpu,gpus,software,tp,pp,vpp,"
    "mbs,gbs,precision,recompute,tokens_per_s_per_gpu,peak_mem_gb,status,moe_experts,moe_topk,moe_ffn,ep,notes"
)
LLAMA = "Llama3-8B,32,4096,14336,32,8,128256"
QWEN = "Qwen3-30B-A3B,48,2048,,32,4,151936"


def rows(path: Path, *lines: str) -> list[PublishedRun]:
    (path / "runs.csv").write_text("\n".join([HEAD, *lines]) + "\n", encoding="utf-8")
    found, skipped = read_table(path / "runs.csv")
    assert not skipped
    return found


def test_other_words_for_columns_frameworks_and_results(tmp_path: Path) -> None:
    titan, hugging, oom = rows(
        tmp_path,
        f'a,t,{LLAMA},8k,NVIDIA H100 80GB HBM3,8,TorchTitan,1,1,,1,8,BF16,None,"6,700",70 GiB,Completed,,,,,',
        f"a,t,{LLAMA},8192,NVIDIA A100-SXM4-80GB,8,HF Transformers,1,1,-,1,8,bfloat16,checkpointing,2000,,success,,,,,",
        f"a,t,{LLAMA},8192,H100,8,Megatron-Bridge,1,1,,8,64,NVFP4,,,,CUDA out of memory,,,,,",
    )
    assert [framework_of(row) for row in (titan, hugging, oom)] == ["fsdp", "huggingface", "megatron-bridge"]
    assert (titan.model.seq_len, titan.memory_gib, titan.fitted, titan.layout["zero"]) == (8192, 70, True, 3)
    assert titan.seconds == pytest.approx(8192 / 6700)
    assert (hugging.layout["recompute"], oom.fitted, oom.layout["zero"]) == (2, False, 1)
    assert oom.cluster.peak_tflops["fp8"] == 2 * titan.cluster.peak_tflops["fp8"]
    assert [number_of(text) for text in ("0.5 s", "k", "1e400", "-3", "")] == [0.5, None, None, None, None]


def test_headers_in_capitals_and_with_blanks(tmp_path: Path) -> None:
    line = f"a,t,{LLAMA},8192,H100,8,FSDP,1,1,,1,8,bf16,none,6700,70,ok,,,,,"
    (tmp_path / "runs.csv").write_text(f"{HEAD.title().replace('_', ' ')}\n{line}\n", encoding="utf-8")
    [row], skipped = read_table(tmp_path / "runs.csv")
    assert not skipped and [row] == [replace(r, text=row.text) for r in rows(tmp_path, line)]


def test_states_that_are_not_said_to_be_whole_are_judged_as_shards(tmp_path: Path) -> None:
    [silent] = rows(tmp_path, f"a,t,{LLAMA},4096,H100,64,OLMo-core,1,1,,1,64,bf16,,9000,,ok,,,,,")
    assert silent.layout["zero"] == 0
    assert predict([silent]).fits.tolist() == [True]


def test_stages_that_a_table_leaves_out_and_the_fp4_of_blackwell_ultra(tmp_path: Path) -> None:
    line = "{source},t,Llama3-70B,80,8192,28672,64,8,128256,8192,{gpu},64,,1,4,{vpp},1,128,nvfp4,,1000,,ok,,,,,"
    nemo, said, other = rows(
        tmp_path,
        line.format(source="nvidia_nemo", gpu="GB300", vpp=""),
        line.format(source="nvidia_nemo", gpu="GB200", vpp="1"),
        line.format(source="vtrain", gpu="GB200", vpp=""),
    )
    assert [row.layout["virtual_stages"] for row in (nemo, said, other)] == [10, 1, 1]
    assert nemo.cluster.peak_tflops["fp8"] == 1.5 * said.cluster.peak_tflops["fp8"]


def test_experts_in_one_kernel_fill_the_device_together_in_the_releases_that_have_it(tmp_path: Path) -> None:
    line = "b,{table},{model},4096,GB200,8,Megatron-Bridge,1,1,,1,512,mxfp8,,30000,,ok,128,8,768,8,"
    old, new = rows(
        tmp_path, line.format(table="26.04 pretrain", model=QWEN), line.format(table="26.06 pretrain", model=QWEN)
    )
    stack = Framework("x", Calibration(host_moe_us=5, wave=2), {r"table:^26\.0[6-9]": {"grouped": 1}})
    apart, together = (estimate_rows([row], stack.of(row)).step_time_s[0] for row in (old, new))
    assert stack.of(new).grouped and together < 0.95 * apart


def test_a_fit_moves_an_overlap_that_begins_at_none(tmp_path: Path) -> None:
    lines = [f"a,t,{LLAMA},8192,H100,64,,{tp},1,,{mb},128,bf16,,1000,,ok,,,,," for tp in (2, 4, 8) for mb in (1, 2)]
    runs = rows(tmp_path, *lines)
    truth = estimate_rows(runs, Calibration(overlap_tp=0.6)).step_time_s
    timed = [PublishedRun(**{**run.__dict__, "seconds": float(s)}) for run, s in zip(runs, truth, strict=True)]
    assert fit(timed, Calibration(), ("overlap_tp",)).overlap_tp == pytest.approx(0.6, abs=0.03)
    for name, value in (("overlap_dp", 0.7), ("traffic", 2.0)):
        assert np.isclose(from_free(to_free(value, name), name), value)

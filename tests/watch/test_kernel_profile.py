"""A trace by class: overlapped time counts once, rows add up to the step, and each has its distance to the roof."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.watch.kernel_profile import ProfileRow, Rooflines, StepFacts, from_json, short, summarise, table, to_json
from weft.watch.profiler_trace import cover, overlap, parse_trace, read_trace

ROOFS = Rooflines(tflops=100.0, low_tflops=200.0, memory_gb_s=1000.0, link_gb_s=50.0)
FACTS = StepFacts(True, None, None, optimizer_bytes=40e3, loss_bytes=10e3, communication_bytes=5e3)


class Recording:
    """A trace as torch.profiler writes it, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.launches = 0

    def on_host(
        self, name: str, start: float, length: float, kind: str = "cpu_op", thread: int = 1, **args: Any
    ) -> None:
        event = {
            "ph": "X",
            "cat": kind,
            "name": name,
            "pid": 7,
            "tid": thread,
            "ts": start,
            "dur": length,
            "args": args,
        }
        self.events.append(event)

    def mark(self, name: str, start: float, length: float) -> None:
        self.on_host(name, start, length, "user_annotation")

    def kernel(self, name: str, launched: float, start: float, length: float, stream: int = 7, thread: int = 1) -> None:
        self.launches += 1
        self.on_host("cuLaunchKernelEx", launched, 1.0, "cuda_driver", thread, correlation=self.launches)
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length}
        self.events.append({**event, "args": {"correlation": self.launches, "stream": stream}})


def step_on_a_gpu() -> Recording:
    """One step of 1000 µs: 200 of products (which overlap 100 of communication), and so on."""
    r = Recording()
    r.mark("weft.window", 0, 1000)
    r.mark("weft.data", 0, 60)
    r.mark("weft.gradients", 60, 500)
    r.mark("weft.update", 560, 100)
    r.kernel("Memcpy HtoD (Pinned -> Device)", 20, 40, 10)
    r.on_host("aten::mm", 70, 10, **{"Input Dims": [[100, 1000], [1000, 50]], "Input type": ["c10::BFloat16"] * 2})
    r.kernel("nvjet_tst_192", 72, 100, 150)
    r.on_host(
        "aten::_scaled_mm", 82, 8, **{"Input Dims": [[10, 1000], [1000, 500]], "Input type": ["c10::Float8_e4m3fn"] * 2}
    )
    r.kernel("sm90_fp8_gemm", 84, 250, 50)
    q = [1, 4, 64, 8]
    r.on_host(
        "aten::_scaled_dot_product_cudnn_attention",
        92,
        8,
        **{"Input Dims": [q, q, q], "Input type": ["c10::BFloat16"] * 3},
    )
    r.kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 93, 300, 100)
    # from the backward pass's own thread
    r.on_host(
        "triton_poi_fused_silu_0",
        110,
        8,
        thread=2,
        **{"Input Dims": [[100, 100], [100, 100]], "Input type": ["c10::BFloat16"] * 2},
    )
    r.kernel("triton_poi_fused_silu_0", 112, 400, 80, thread=2)
    r.kernel("ncclDevKernel_AllReduce_Sum_f32", 115, 200, 100, stream=20)
    r.kernel("ncclDevKernel_AllReduce_Sum_f32", 118, 460, 60, stream=20)
    r.kernel("vectorized_elementwise_kernel", 600, 700, 80)
    r.kernel("weft_cross_entropy", 120, 520, 20)
    return r


def by_name(rows: list[ProfileRow]) -> dict[str, ProfileRow]:
    return {r.name: r for r in rows}


def test_a_step_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": step_on_a_gpu().events}))
    rows = by_name(summarise(read_trace(path), steps=1, step_ms=0.9, facts=FACTS, roofs=ROOFS))
    assert sum(r.ms for r in rows.values()) == pytest.approx(0.9)
    assert sum(r.share for r in rows.values()) == pytest.approx(1.0)
    took = {name: round(r.ms * 1000) for name, r in rows.items()}
    # the first message hides behind a product; of the second, 40 µs stick out; the host waits 50 µs for data
    assert took == {
        "matmul": 200, "attention": 100, "loss": 20, "optimizer": 80, "communication": 40, "elementwise": 80,
        "data/host": 60, "idle": 320,
    }  # fmt: skip
    assert rows["communication"].busy_ms == pytest.approx(0.160)
    products = rows["matmul"]
    assert products.flops == 2 * 100 * 1000 * 50 + 2 * 10 * 1000 * 500
    assert products.roof_ms == pytest.approx(1e7 / 100e12 * 1e3 + 1e7 / 200e12 * 1e3)
    assert products.distance == pytest.approx(0.2 / products.roof_ms)
    assert products.tflops == pytest.approx(2e7 / 200e-6 / 1e12)
    assert rows["attention"].flops == 4 * 4 * 64 * 64 * 8 / 2
    assert rows["elementwise"].bytes == 2 * 100 * 100 * 2
    assert rows["optimizer"].distance == pytest.approx(80e-6 / (40e3 / 1000e9))
    assert rows["communication"].roof == 50.0
    assert rows["idle"].distance is None
    assert products.top[0] == {"name": "nvjet_tst_192", "ms": pytest.approx(0.15), "calls": 1.0}


def test_without_shapes_the_flops_of_the_model_are_used() -> None:
    """A CUDA graph launches all of its kernels at once, without operators in the trace."""
    r = Recording()
    r.mark("weft.window", 0, 100)
    r.kernel("nvjet_tst_192", 5, 10, 40)
    facts = StepFacts(True, 1e9, 1e8, 0.0, 0.0, 0.0)
    rows = by_name(summarise(parse_trace(r.events), 1, 0.1, facts, ROOFS))
    assert rows["matmul"].flops == 1e9
    assert "attention" not in rows


def step_on_a_cpu() -> Recording:
    r = Recording()
    r.mark("weft.window", 0, 1000)
    r.mark("weft.gradients", 100, 600)
    shapes = {"Input Dims": [[10, 20], [20, 30]], "Input type": ["float", "float"]}
    r.on_host("autograd::engine::evaluate_function: MmBackward0", 100, 300)
    r.on_host("aten::mm", 150, 200, **shapes)
    r.on_host("aten::mul", 500, 100, **{"Input Dims": [[10, 20], []], "Input type": ["float", "Scalar"]})
    r.on_host("aten::empty", 510, 20, **{"Input Dims": [[]], "Input type": ["ScalarList"]})
    # a message that is under way while the thread computes, and 100 µs longer
    r.on_host("gloo:all_reduce", 520, 180, "user_annotation", thread=1)
    r.on_host("aten::mm", 0, 900, thread=3, **shapes)  # the loader's thread is not the step's
    r.events.append({"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}})
    return r


def test_a_step_on_a_cpu_is_scaled_to_the_time_without_the_profiler() -> None:
    rows = by_name(summarise(parse_trace(step_on_a_cpu().events), 1, 0.5, FACTS, ROOFS))
    assert sum(r.ms for r in rows.values()) == pytest.approx(0.5)
    took = {name: round(2 * r.ms * 1000) for name, r in rows.items()}
    assert took == {"matmul": 200, "elementwise": 100, "communication": 100, "data/host": 600, "idle": 0}
    assert rows["elementwise"].bytes == 2 * 10 * 20 * 4


def test_rows_round_trip_through_json() -> None:
    rows = summarise(parse_trace(step_on_a_gpu().events), 1, 0.9, FACTS, ROOFS)
    assert from_json(json.loads(json.dumps(to_json(rows)))) == rows
    lines = table(rows)
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[:3] == ["matmul", "0.20", "22.2%"]
    assert "TFLOP/s" in lines[3] or "GFLOP/s" in lines[3]


def test_cover_and_overlap() -> None:
    covered = cover([(5, 7), (0, 2), (1, 3), (7, 8), (9, 9)])
    assert covered == [(0, 3), (5, 8)]
    assert overlap(covered, 2, 6) == 2
    assert overlap(covered, 3, 5) == 0
    assert overlap(covered, -5, 20) == 6


def test_short_names() -> None:
    assert short("void at::native::(anonymous namespace)::foo<4>(int, float*)") == "foo<4>"
    assert len(short("x" * 500)) == 72

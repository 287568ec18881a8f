"""Memory of Weft's own runs: the plan's prediction and the peak of live tensors on real CPU ranks.

    python bench/memory.py [--models llama gpt2 …] [--precision fp32 bf16] [--recompute none full] [--json]
    python bench/memory.py --models experts --layouts 1 tp2 'dp_shard=4 ep=2' 'tp2 ep2' 'pp2 dp_shard=2 ep=2'

Every rank is a process that builds its part of the model and takes a real step under weft/memory/tensor_tracer.py,
which counts the bytes of live tensors, not the pages of the process. The table has the fullest rank of each layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from weft.job import parse_job  # noqa: E402
from weft.launch.rank_pool import RankPool  # noqa: E402
from weft.planner import make_plan  # noqa: E402
from weft.planner.rules.layout_syntax import parse_layout, ranks  # noqa: E402
from weft.verify.dryrun import measured_peak  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 2048},
    "gpt2": {"family": "gpt2", "dim": 256, "layers": 4, "heads": 8, "ffn": 1024, "vocab": 2048},
    "deep": {"family": "llama", "dim": 128, "layers": 8, "heads": 4, "ffn": 384, "vocab": 512},
    "experts": {
        "family": "llama",
        "dim": 256,
        "layers": 4,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 704,
        "vocab": 2048,
        "experts": {"count": 8, "top_k": 2, "ffn": 256, "shared": 1},
    },
    "vit": {"family": "vit", "dim": 192, "layers": 4, "heads": 4, "ffn": 768, "vocab": 10},
    "mlp": {"family": "mlp", "dim": 256, "layers": 8},
}
LAYOUTS = ("1", "ddp2", "zero1", "zero2", "zero3", "hsdp", "tp2", "dp_shard=2 tp=2", "pp2", "pp2 dp_shard=2")
AIM_MEAN, AIM_WORST = 0.03, 0.06


@dataclass(frozen=True)
class Row:
    """One layout of one model. MiB of the fullest rank."""

    model: str
    precision: str
    recompute: str
    layout: str
    predicted_mib: float
    measured_mib: float
    error: float


def make(model: str, layout: str, precision: str, recompute: str) -> Any:
    section = {"dp_replicate": 1, "dp_shard": 1} if layout == "1" else parse_layout(layout)
    return parse_job(
        {
            "model": MODELS[model],
            "data": {"source": "synthetic", "seq_len": 128},
            "train": {"global_batch": 16, "microbatch": 2},
            "precision": precision,
            "memory": {"recompute": recompute},
            "cluster": {"device": "cpu", "devices_per_node": ranks(section)},
            "parallel": section,
        }
    )


def measure(pool: RankPool, model: str, layout: str, precision: str, recompute: str) -> Row:
    job = make(model, layout, precision, recompute)
    _, plan = make_plan(job)
    predicted = plan.predicted
    promised = (predicted["memory_gib"] - predicted["runtime_gib"]) * 1024
    seen = max(pool.run(measured_peak, plan.world, job)) / 2**20
    return Row(model, precision, recompute, layout, promised, seen, promised / seen - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[m for m in MODELS if m != "experts"], choices=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--recompute", nargs="+", default=["none", "full"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with RankPool(timeout_s=600) as pool:
        for model in args.models:
            for precision in args.precision:
                for recompute in args.recompute:
                    for layout in args.layouts:
                        row = measure(pool, model, layout, precision, recompute)
                        rows.append(row)
                        if not args.json:
                            words = f"{row.model:6} {row.precision} {row.recompute:5} {row.layout:18}"
                            print(
                                f"{words} predicted {row.predicted_mib:8.2f} MiB, measured {row.measured_mib:8.2f}, "
                                f"off by {row.error:+.1%}",
                                flush=True,
                            )
    mean = sum(abs(r.error) for r in rows) / len(rows)
    worst = max(abs(r.error) for r in rows)
    if args.json:
        print(json.dumps({"mean_error": mean, "worst_error": worst, "rows": [asdict(r) for r in rows]}, indent=2))
        return
    print(f"\n{len(rows)} runs: mean error {mean:.2%} (aim {AIM_MEAN:.0%}), worst {worst:.2%} (aim {AIM_WORST:.0%})")


if __name__ == "__main__":
    main()

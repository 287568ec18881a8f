"""Proves a tiny random model of every causal type of the installed transformers in one layout of each axis, and writes
docs/models.md from the results.

    python bench/any_model.py [--types a,b] [--part 3/8] [--axes ddp2,zero3] [--again] [--write]

Results are kept in bench/any_model.json, so that a later call goes on where this one stopped. --again repeats those
that differ or failed. --write makes docs/models.md of them and proves nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from weft.extensions.hub.tiny import causal_types, tiny_args, tiny_job
from weft.job.errors import JobError
from weft.launch.rank_pool import RankPool
from weft.verify.compare import Verdict
from weft.verify.prove import prove

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench" / "any_model.json", ROOT / "docs" / "models.md"
AXES = {
    "ddp2": "ddp2", "zero3": "zero3", "tp2": "tp2", "pp2": "pp2", "cp2 ring": "cp2 ring", "cp2 ulysses": "cp2 ulysses",
    "ep2": "dp_shard=2 ep=2",
}  # fmt: skip
STEPS = 2
Row = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas; all without it")
    parser.add_argument("--part", default="1/1", help="the part K/N of the types")
    parser.add_argument("--axes", default=",".join(AXES), help="columns of the table, separated by commas")
    parser.add_argument("--again", action="store_true", help="repeat what differs or failed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--write", action="store_true", help="write docs/models.md from the results")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.write:
        PAGE.write_text(page(results), encoding="utf-8")
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    part, parts = (int(n) for n in args.part.split("/"))
    kinds = args.types.split(",") if args.types else causal_types()[part - 1 :: parts]
    with RankPool(timeout_s=120) as pool:
        for kind in kinds:
            row: Row = results.setdefault("types", {}).setdefault(kind, {})
            wanted = [a for a in args.axes.split(",") if a not in row or (args.again and row[a]["verdict"] in AGAIN)]
            if wanted:
                row |= proofs(kind, wanted, pool)
                results["transformers"] = _version()
                args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                print(
                    kind,
                    *(f"{a}: {v['verdict']} {v.get('why', '')[:300]}" for a, v in row.items()),
                    sep="\n   ",
                    flush=True,
                )


AGAIN = ("differs", "failed")


def proofs(kind: str, axes: list[str], pool: RankPool) -> Row:
    """The verdict of each axis for a type."""
    try:
        job = tiny_job(tiny_args(kind))
        verdicts = prove(job, [", ".join(AXES[axis] for axis in axes)], STEPS, pool=pool)
    except JobError as error:
        return {axis: {"verdict": "refused", "why": str(error)} for axis in axes}
    except Exception as error:  # a type whose tiny model is not built, or whose ranks died
        return {axis: {"verdict": "failed", "why": last_line(error)} for axis in axes}
    return dict(zip(axes, map(described, verdicts), strict=True))


def last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    return f"{type(error).__name__}: {lines[-1]}"[:500]


def described(verdict: Verdict) -> dict[str, Any]:
    """What the table and a reader of the results need of a verdict."""
    made: dict[str, Any] = {"verdict": verdict.verdict}
    if "no answer within" in (verdict.why or ""):  # the machine was busy
        made["verdict"] = "failed"
    if verdict.verdict == "differs":
        made |= {"why": f"{', '.join(verdict.differs)}; {verdict.worst_parameter} {verdict.max_grad_diff:.1e}"}
    elif verdict.why:
        made["why"] = verdict.why.strip().splitlines()[-1] if verdict.verdict == "failed" else verdict.why
    return made


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def page(results: dict[str, Any]) -> str:
    """docs/models.md."""
    rows: dict[str, Row] = results.get("types", {})
    reasons: dict[str, int] = {}

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "–"
        if found["verdict"] in ("same", "differs"):
            return str(found["verdict"])
        return f"{found['verdict']} ({reasons.setdefault(general(found.get('why', '')), len(reasons) + 1)})"

    lines = [
        f"| `{kind}` | " + " | ".join(cell(row.get(axis)) for axis in AXES) + " |" for kind, row in sorted(rows.items())
    ]
    counts = {axis: Counter(row[axis]["verdict"] for row in rows.values() if axis in row) for axis in AXES}
    total = [f"| {axis} | " + " | ".join(str(counts[axis][v]) for v in VERDICTS) + " |" for axis in AXES]
    return "\n".join([
        "# Which models of transformers can be trained, and how?", "",
        f"A tiny random model of every type that transformers {results.get('transformers', '')} can continue text "
        "with, proven in one layout of each axis against one process ([`weft prove`](layouts.md#how-is-it-proven)). "
        "`python bench/any_model.py` proves them and writes this page. [hub.md](hub.md) says how such models train.",
        "", "| layout | " + " | ".join(VERDICTS) + " |", "|---|" + "---|" * len(VERDICTS), *total, "",
        "| type | " + " | ".join(AXES) + " |", "|---|" + "---|" * len(AXES), *lines, "",
        *(f"{number}. {why}" for why, number in reasons.items()), "",
    ])  # fmt: skip


VERDICTS = ("same", "refused", "differs", "failed")


def general(why: str) -> str:
    """A reason on one line."""
    return " ".join(why.split()).replace("|", "/")[:300]


if __name__ == "__main__":
    main()

"""Writes every generated table and output into the pages of docs/ and the README: python docs/make_figures.py

A page marks the place of a generated block; what is between the comments is replaced:

    <!-- made: faults -->
    …
    <!-- end -->

tests/docs/test_docs_figures.py fails if a page differs from what this script writes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import weft
from weft.extensions.convert.settings import Result, Rule, Settings, Table, find_rule
from weft.job import parse_job
from weft.job.errors import JobError

ROOT = Path(__file__).resolve().parent.parent
VALUES = "known here: "
BLOCK = re.compile(r"(<!-- made: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def faults() -> str:
    """The kinds of faults that `weft chaos` injects."""
    from weft.extensions.chaos.faults import KINDS

    return "\n".join(
        ["| kind | what happens |", "|---|---|", *(f"| `{name}` | {k.what} |" for name, k in KINDS.items())]
    )


def pretrained_families() -> str:
    """The families of published checkpoints that Weft reads and writes."""
    from weft.extensions.pretrained.family_entry import PRETRAINED

    rows = [f"| {family.help} | `{family.kind}` | `{family.architecture}` |" for family in PRETRAINED]
    return "\n".join(["| models | model_type | class of transformers |", "|---|---|---|", *rows])


def command(*arguments: str, first: bool = False) -> str:
    """The output of a weft command without the line that depends on this machine's speed; or its first part."""
    done = subprocess.run(
        [sys.executable, "-m", "weft", *arguments], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "140"},
    )  # fmt: skip
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("searched")]
    shown = [*lines[: lines.index("")], "…"] if first else lines
    return "\n".join(["```text", *shown, "```"])


def plan_70b() -> str:
    """The first lines of the README's plan."""
    return command("plan", "llama-70b-64xh100", first=True)


def plan_seven() -> str:
    """The worked example of docs/how-weft-chooses.md, whose job is in the page itself."""
    page = (ROOT / "docs" / "how-weft-chooses.md").read_text(encoding="utf-8")
    job = re.search(r"<<'YAML'\n(.*?)^YAML$", page, re.MULTILINE | re.DOTALL)
    assert job, "how-weft-chooses.md has no seven.yaml"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "seven.yaml").write_text(job[1], encoding="utf-8")
        return command("plan", f"{folder}/seven.yaml", "--why-not", "ddp8")


LAYOUTS_8B = (
    {"dp_replicate": 8, "dp_shard": 1}, {"dp_shard": 8, "zero": 1}, {"dp_shard": 8, "zero": 2},
    {"dp_shard": 8, "zero": 3}, {"dp_replicate": 2, "dp_shard": 4, "zero": 3}, {"dp_shard": 1, "tp": 8},
    {"dp_shard": 4, "zero": 3, "tp": 2},
)  # fmt: skip


FIXED_8B = ("train.global_batch=8", "train.microbatch=1", "memory.recompute=full")


def layouts_8b() -> str:
    """Memory and traffic of Llama 8B in some layouts."""
    from weft.hardware.catalog import find_device

    limit = find_device("h100-sxm").memory_gib
    rows = ["| layout | memory a rank | traffic a rank and step |", "|---|---|---|"]
    for layout in LAYOUTS_8B:
        job = weft.load_job("llama-8b-8xh100", [f"parallel={json.dumps(layout)}", *FIXED_8B])
        plan = weft.make_plan(job)[1]
        memory, traffic = plan.predicted["memory_gib"], plan.predicted["communication_mib"] / 1024
        note = f": does not fit in {limit:.1f}" if memory > limit else ""
        rows.append(f"| `{plan.layout()}` | {memory:.1f} GiB{note} | {traffic:.1f} GiB |")
    return "\n".join(rows)


REFUSED = (
    (["parallel.tp=3"], 3), (["model.heads=12", "model.kv_heads=4", "model.dim=48", "parallel.tp=6"], 6),
    (["model.ffn=191", "parallel.tp=2"], 2),
    (["train.global_batch=9", "parallel.dp_shard=2"], 2), (["train.microbatch=3"], 2),
    (["parallel={dp_shard: 2, tp: 2}"], 3), (["parallel={dp_shard: -1, tp: -1}"], 2), (["parallel.ep=2"], 2),
    (["parallel.pp=2", "parallel.schedule=1f1"], 2),
)  # fmt: skip
"""Overrides of the recipe `tiny`, and ranks."""


def refusals() -> str:
    """Settings that cannot work, and the messages."""
    rows = ["| `weft plan tiny …` | message |", "|---|---|"]
    for overrides, ranks in REFUSED:
        try:
            weft.make_plan(weft.load_job("tiny", overrides), ranks)
        except JobError as error:
            words = " ".join(f"'{o}'" if " " in o else o for o in overrides)
            rows.append(f"| `{words} --nproc {ranks}` | {error} |")
        else:
            raise SystemExit(f"{overrides} is not refused any more")
    return "\n".join(rows)


MEASURED = (
    ("llama-1b", 2048, 1, 1, "none", 22.92, 0.045), ("llama-1b", 2048, 4, 2, "none", 36.50, 0.247),
    ("llama-1b", 8192, 1, 1, "none", 30.92, 0.152), ("llama-1b", 8192, 2, 1, "selective", 34.28, 0.293),
    ("llama-1b", 8192, 2, 2, "full", 29.31, 0.699), ("llama-1b", 32768, 1, 1, "full", 25.92, 1.224),
    ("llama-3b", 2048, 4, 1, "none", 68.96, 0.313), ("llama-3b", 8192, 1, 1, "selective", 62.84, 0.364),
)  # fmt: skip
"""bench/gpu_memory.py on an H200: shape, tokens, microbatch, microbatches, recompute, GiB, seconds a step."""
MEASURED_FP8: tuple[tuple[str, str, int, list[str], float, float], ...] = (
    ("1B", "as by default", 2, [], 37.8, 0.2198),
    ("1B", "dynamic scales, head in bf16", 2, ["fp8.amax=dynamic", "fp8.head=false"], 34.3, 0.2545),
    ("3B", "as by default", 1, [], 65.6, 0.2778),
    ("3B", "dynamic scales, head in bf16", 1, ["fp8.amax=dynamic", "fp8.head=false"], 62.8, 0.3284),
)  # fmt: skip
"""bench/gpu_memory.py (GiB) and bench/gpu.py (seconds a step) on an H200: shape, setting, batch, overrides."""


def on_h200(shape: str, tokens: int, microbatch: int, count: int, *overrides: str) -> dict[str, float]:
    """What the planner predicts for one H200."""
    fields = [
        f"model={{shape: {shape}}}", f"data.seq_len={tokens}", f"train.microbatch={microbatch}",
        f"train.global_batch={microbatch * count}", *overrides,
    ]  # fmt: skip
    return allocated(weft.make_plan(weft.load_job("llama-1b-h200", fields))[1].predicted)


def allocated(predicted: dict[str, float]) -> dict[str, float]:
    """The prediction without the memory that torch's allocator does not see."""
    return {**predicted, "memory_gib": predicted["memory_gib"] - predicted["runtime_gib"]}


def beside(predicted: float, measured: float, digits: int) -> str:
    """Predicted, measured and the difference, as cells of a table."""
    off = f"{100 * (predicted / measured - 1):+.1f} %".replace("-", "−")
    return f"{predicted:.{digits}f} | {measured:.{digits}f} | {off}"


def compared(found: dict[str, float], gib: float, seconds: float, errors: list[tuple[float, float]]) -> str:
    """Cells for memory and step time of a run; adds both errors to the list."""
    memory, step = found["memory_gib"], found["step_time_s"]
    errors.append((abs(memory / gib - 1), abs(step / seconds - 1)))
    return f"{beside(memory, gib, 2)} | {beside(step, seconds, 3)}"


def summary(errors: list[tuple[float, float]], name: str, average: Callable[[Iterable[float]], float]) -> str:
    """The errors of all runs in a sentence."""
    memory, time = zip(*errors, strict=True)
    return (
        f"Memory: {name} error {100 * average(memory):.1f} %, worst {100 * max(memory):.1f} %. "
        f"Step time: {name} {100 * average(time):.1f} %, worst {100 * max(time):.1f} %."
    )


def own_runs() -> str:
    """Predicted and measured memory and step time on one H200, and the errors."""
    rows = [
        "| shape | tokens | microbatch × microbatches | recompute | predicted GiB | measured | | predicted s | "
        "measured | |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    errors: list[tuple[float, float]] = []
    for shape, tokens, microbatch, count, recompute, gib, seconds in MEASURED:
        found = on_h200(shape, tokens, microbatch, count, f"memory.recompute={recompute}")
        cells = compared(found, gib, seconds, errors)
        rows.append(f"| {shape} | {tokens:,} | {microbatch} × {count} | {recompute} | {cells} |")
    return "\n".join([*rows, "", summary(errors, "mean", fmean)])


def own_runs_fp8() -> str:
    """The same in fp8."""
    rows = [
        "| shape | fp8 | predicted GiB | measured | | predicted s | measured | |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, setting, batch, overrides, gib, seconds in MEASURED_FP8:
        name = f"llama-{shape.lower()}, vocab: 128256, tied: false"
        found = on_h200(name, 8192, batch, 1, "precision=fp8", "memory.recompute=none", *overrides)
        cells = f"{beside(found['memory_gib'], gib, 1)} | {beside(found['step_time_s'], seconds, 3)}"
        rows.append(f"| {shape} | {setting} | {cells} |")
    return "\n".join(rows)


RANDOM_RUNS = Path(__file__).parent.parent / "bench" / "gpu_runs.json"
"""bench/gpu_random.py on an H200: jobs, GiB, seconds a step."""
LATER_RUNS = RANDOM_RUNS.with_stem("gpu_runs_later")


def random_runs(path: Path = RANDOM_RUNS) -> str:
    """Predicted and measured memory and step time of jobs that were drawn at random."""
    rows = [
        "| model | vocabulary | tokens | precision | optimizer | recompute | predicted GiB | measured | | "
        "predicted s | measured | |",
        "|---|---:|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    errors: list[tuple[float, float]] = []
    for run in json.loads(path.read_text()):
        job, model, train = run["job"], run["job"]["model"], run["job"]["train"]
        one_gpu = {"device": "h200-sxm", "nodes": 1, "devices_per_node": 1}
        found = allocated(weft.make_plan(parse_job({**job, "cluster": one_gpu}))[1].predicted)
        parts = [key for key in ("lora", "window", "norm_at", "qk_norm", "tied", "experts") if key in model]
        name = f"{model['family']}, {model['layers']} × {model['dim']}{''.join(f', {part}' for part in parts)}"
        samples = f"{train['microbatch']} × {train['global_batch'] // train['microbatch']}"
        tokens = f"{samples} × {job['data'].get('seq_len') or 'an image'}"
        cells = compared(found, run["gib"], run["s"], errors)
        kind = f"{job['precision']} | {job['optim']['name']} | {job['memory']['recompute']}"
        rows.append(f"| {name} | {model['vocab']:,} | {tokens} | {kind} | {cells} |")
    return "\n".join([*rows, "", summary(errors, "median", median)])


MODELS = (
    ("3.6B", {"shape": "llama-3b", "tied": False}), ("8B", {"shape": "llama-8b"}), ("13B", {"shape": "llama-13b"}),
    ("32B", {"family": "llama", "dim": 5120, "layers": 64, "heads": 40, "kv_heads": 8, "head_dim": 128, "ffn": 27648,
             "vocab": 152064}),
    ("70B", {"shape": "llama-70b"}),
)  # fmt: skip
MACHINES = (("rtx-4090", 64), ("a100-sxm-80gb", 256), ("h200-sxm", 125))
"""Device, and GiB of host memory."""
TIERS: tuple[tuple[str, dict[str, Any], dict[str, Any], float], ...] = (
    ("on the device", {}, {}, 0.7), ("`offload: auto`", {"offload": "auto"}, {}, 0.7),
    ("and `states: 8bit`", {"offload": "auto", "states": "8bit"}, {}, 0.7),
    ("and `states: 24bit-master`", {"offload": "auto", "states": "24bit-master"}, {}, 0.7),
    ("and Adafactor", {"offload": "auto", "states": "24bit-master"}, {"name": "adafactor"}, 0.7),
    ("and `optim.clip: 0`, 88 % of host memory", {"offload": "auto", "states": "24bit-master"},
     {"name": "adafactor", "clip": 0}, 0.88),
)  # fmt: skip
"""Settings of memory and optim, and the share of host memory that states may take (memory.host_gib)."""


def what_fits() -> str:
    """The largest model that one device trains with each setting of memory, and its predicted tokens a second."""
    from weft.planner.make_plan import fitting_plan, start_plan

    rows = [
        "| setting of `memory` | " + " | ".join(f"{d}, {h} GiB of host memory" for d, h in MACHINES) + " |",
        "|---|" + "---|" * len(MACHINES),
    ]
    best = [0] * len(MACHINES)
    for setting, memory, optim, share in TIERS:
        cells = []
        for column, (device, ram) in enumerate(MACHINES):
            shown = "none of these"
            for index in range(best[column], len(MODELS)):
                name, model = MODELS[index]
                given = {**memory, **({"host_gib": share * ram} if memory else {})}
                job = weft.Job.model_validate({
                    "model": model, "data": {"source": "synthetic", "seq_len": 4096}, "optim": optim,
                    "train": {"global_batch": 1, "microbatch": 1}, "precision": "bf16", "memory": given,
                    "cluster": {"device": device, "nodes": 1, "devices_per_node": 1},
                    "parallel": {"dp_replicate": 1, "dp_shard": 1},
                })  # fmt: skip
                if (plan := fitting_plan(start_plan(job, 1))) is None:
                    break
                best[column] = index
                shown = f"{name}, {4096 / plan.predicted['step_time_s']:,.0f} tokens/s"
            cells.append(shown)
        rows.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(rows)


def own_code() -> str:
    """What the adapters of other libraries take, ignore and refuse, from the tables that they apply."""
    from weft import accelerate
    from weft.extensions.adapters import hvd, lightning_callbacks, lightning_loop
    from weft.extensions.adapters.accelerate import accelerate_state, accelerator
    from weft.extensions.adapters.deepspeed_engine import DeepSpeedEngine
    from weft.extensions.adapters.transformers.hf_arguments import HANDLED, WITHOUT_EFFECT
    from weft.extensions.adapters.transformers.hf_seq2seq import WeftSeq2SeqTrainer
    from weft.extensions.adapters.transformers.hf_trainer import WeftTrainer
    from weft.extensions.convert.deepspeed import DEEPSPEED
    from weft.extensions.convert.training_arguments import TABLE

    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(found)) or "none"

    def methods(*kinds: type) -> str:
        found = {n: v for kind in kinds for n, v in vars(kind).items() if n[0] != "_"}
        return names(n for n, v in found.items() if callable(v) or isinstance(v, property))

    def refused(table: Table) -> dict[str, str]:
        """By setting, why it is refused, or which values are not."""
        notes = {key: found.note for key, rule in table.items() if (found := probed(rule)).status == "no counterpart"}
        return {
            key: f"values: {note.removeprefix(VALUES)}" if note.startswith(VALUES) else f"refused: {note}"
            for key, note in notes.items()
        }

    def probed(rule: Rule) -> Result:
        try:
            return rule(True, Settings())
        except (TypeError, ValueError, KeyError, AttributeError):
            return Result()

    skipped = ("optimizer.", "scheduler.", "zero_optimization.offload")
    config = {key: rule for key, rule in DEEPSPEED.table.items() if not key.startswith(skipped)}
    taken = dict.fromkeys((*HANDLED, *WITHOUT_EFFECT), TABLE["seed"])
    others = {key: rule for key, rule in TABLE.items() if find_rule(taken, key) is None}
    rows = [
        ("Accelerate", "the same", methods(accelerator.Accelerator, accelerate_state.Ranks)),
        ("Accelerate", "functions and classes: the same", names(set(accelerate.__all__) - {"Accelerator"})),
        *(("Accelerate", f"refused: {note}", f"`{name}`") for name, note in accelerator.NOT_SUPPORTED.items()),
        ("DeepSpeed", "the same", methods(DeepSpeedEngine)),
        *(("DeepSpeed", what, f"`{name}`") for name, what in refused(config).items()),
        ("DeepSpeed", "refused: needs a job", "`offload_optimizer.device` nvme, `offload_param` on a GPU"),
        ("Horovod", "the same", names(set(hvd.__all__) - {"start_timeline", "stop_timeline"})),
        ("Horovod", "refused: torch.profiler records collectives", "`start_timeline`, `stop_timeline`"),
        ("Lightning", "callbacks: the same", names(lightning_callbacks.KNOWN)),
        ("Lightning", "callbacks: ignored", names(lightning_callbacks.IGNORED)),
        ("Lightning", "methods of the module: refused", names(lightning_loop.OVERRIDES)),
        ("transformers", "the same", methods(WeftSeq2SeqTrainer, WeftTrainer)),
        ("transformers", "fields of TrainingArguments: the same", names(HANDLED)),
        ("transformers", "fields of TrainingArguments: without effect",
         names({*WITHOUT_EFFECT, *(k for k, rule in others.items() if probed(rule).status == "not needed")})),
        ("transformers", "fields of TrainingArguments: refused, see job=",
         names(k for k, rule in others.items() if probed(rule).job)),
        *(("transformers", what, f"`{name}`") for name, what in refused(others).items()),
    ]  # fmt: skip
    grouped: dict[tuple[str, str], list[str]] = {}
    for library, what, shown in rows:
        grouped.setdefault((library, what), []).append(shown)
    lines = [f"| {library} | {', '.join(shown)} | {what} |" for (library, what), shown in grouped.items()]
    return "\n".join(["| library | names | here |", "|---|---|---|", *lines])


BLOCKS: dict[str, Callable[[], str]] = {
    "own code": own_code,
    "what fits": what_fits,
    "faults": faults,
    "pretrained families": pretrained_families,
    "plan 70b": plan_70b,
    "plan seven": plan_seven,
    "layouts 8b": layouts_8b,
    "refusals": refusals,
    "own runs": own_runs,
    "own runs fp8": own_runs_fp8,
    "random runs": random_runs,
    "later random runs": lambda: random_runs(LATER_RUNS),
}
"""Each generated block by name; pages refer to it by that name."""


def pages() -> Iterator[Path]:
    """The pages with generated blocks."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def page(text: str) -> str:
    """The page with its blocks generated again."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for path in pages():
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")

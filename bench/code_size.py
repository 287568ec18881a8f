"""Lines of code by package for the same features: before the move to packages named by subject, and today.

    python bench/code_size.py          # writes bench/code_size.md in minutes; needs the history of the repository

Counted are lines of weft/ that are not blank, comments or docstrings. Files that only serve features added since are
left out (LATER). Of the others, `git blame` tells which commit wrote a line last: one before the move (kept), one of
the restructuring (RESTRUCTURED: moves, renames, splits, one registration a thing), or another one (a feature or a
repair). A line of the latter may replace an earlier one; the share of such lines is that of deletions in the commit. So
the code of the earlier features has at least kept + restructured lines, and at most the replaced ones more.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

MOVED = "49e7419a"
"""The commit that moved every module: its tree has the code of before under today's packages."""
RESTRUCTURED = re.compile(
    r"""plain|\bname[ds]?\b|names\ of|register|move\ every|one\ file|files?\ of\ (its|their)\ own|has\ a\ file|unique
    |follow|merge|private\ (words|torch)|exist\ once|one\ (meter|memory\ model|joint\ axis|autograd|timer|Gantt|figure)
    |one\ (base\ class|entry|reader|word|cache\ folder|comparison|traffic\ count)|split\ by\ subject|a\ folder\ for
    |folder\ of\ their\ own|types$|sections\ inside|remove\ functions|file\ names|told\ apart|beside\ its\ class
    |smaller\ parts|without\ its\ collectives|look\ up\ states|cache\ passes|fewer\ array|traced\ together
    |as\ a\ table""",
    re.VERBOSE | re.IGNORECASE,
)
LATER = {
    "scripts and configurations of other libraries": "adapters/* hvd/* accelerate.py deepspeed.py lightning.py "
    "transformers.py convert/* cli/convert.py",
    "published weights, fine-tuning, chat": "pretrained/* training/interchange/* training/chat.py "
    "training/initial_weights.py launch/import_run.py launch/*_generation.py models/key_value_cache.py "
    "models/decoding_cache.py models/lora.py models/attention_sinks.py models/latent_attention.py data/chat/* "
    "job/model_parts/lora_settings.py job/model_parts/attention_settings.py planner/rules/adapter_rules.py "
    "optim/layer_rates.py",
    "data formats, mixtures, streams": "data/formats/* data/growing.py data/mixture.py data/order.py "
    "data/prepared_files.py data/file_array.py job/text_file.py",
    "vision, recommenders, encoders, user modules": "data/vision/* data/recommend/* data/tasks/* "
    "data/sample_workers.py models/vision/* models/recommend/* models/user/* models/encoder_decoder.py "
    "models/patches.py parallel/tables/* parallel/towers/* parallel/pipeline/module_stages.py "
    "parallel/pipeline/boundary.py parallel/pipeline/stage_boundaries.py parallel/inferred_parts.py "
    "planner/module_costs.py planner/table_placement.py planner/tower_*.py planner/rules/embedding_rules.py "
    "planner/rules/tower_rules.py planner/rules/data_rules.py job/model_parts/table_settings.py "
    "job/model_parts/tower_settings.py job/model_parts/loss_settings.py",
    "launch targets, queue, object stores": "launch/targets/* launch/queue/* launch/policy.py launch/launch_job.py "
    "launch/run_list.py launch/cluster_doctor.py launch/node_probe.py job/launch/* cli/launching.py cli/queue.py "
    "cli/views/queue.py job/store_path.py training/run_history.py hardware/pod_environment.py",
    "trials (weft tune)": "tune/* cli/tune.py",
    "dashboard, trackers, alerts, traces, energy, diagnose": "watch/dash/* watch/alerts/* watch/trackers/* "
    "watch/devices/* watch/diagnose/* watch/traces/* watch/follower.py watch/prometheus.py watch/run_tail.py "
    "watch/secret_values.py watch/local_server.py cli/watching.py cli/analysis.py cli/views/dash.py "
    "training/run_energy.py hardware/nvml_device.py measure/power.py measure/scaling.py measure/trace_steps.py "
    "comm/trace_ranges.py training/noise_scale.py",
    "memory tiers, states and activations in fewer bytes": "memory/disk_states.py memory/gradient_offload.py "
    "memory/host_copies.py memory/released_gradients.py memory/split_*.py memory/weight_stream.py "
    "memory/fp8_activations.py memory/activation_internals.py optim/state_*.py optim/streamed_optimizer.py "
    "optim/weight_offload.py optim/pieces.py optim/backward_updates.py optim/codec_kernels.py "
    "optim/coded_adamw_kernels.py measure/tiers.py planner/memory/tiers.py planner/disk_space.py "
    "planner/time/streaming.py",
    "other: NCCL ranks that share a GPU, encryption, secure averaging, LARS and LAMB": "hardware/shared_devices.py "
    "wire/tls.py server/secure_*.py server/privacy.py comm/teardown.py supervisor/process_group_internals.py "
    "comm/point_to_point_internals.py optim/trust_ratio.py planner/lr_scaling.py",
}


def git(*args: str) -> str:
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that are code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate((line.strip() for line in text.splitlines()), 1)
    return {n for n, line in lines if line and not line.startswith("#") and n not in docs}


def modules(commit: str) -> list[str]:
    return [n for n in git("ls-tree", "-r", "--name-only", commit, "weft").split("\n") if n.endswith(".py")]


def package(path: str) -> str:
    return path.split("/")[1] if path.count("/") > 1 else "mesh, precision"


def feature(path: str) -> str | None:
    """The later feature that a file serves, if it serves no earlier one."""
    inner = path.removeprefix("weft/")
    return next((f for f, globs in LATER.items() if any(fnmatch(inner, g) for g in globs.split())), None)


def replaced_share() -> dict[str, float]:
    """Of each commit since the move, deleted over added lines of its files, at most 1."""
    changes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    commit = ""
    for line in git("log", "-M", "-C", "--numstat", "--format=@%H", f"{MOVED}^..HEAD", "--", "weft").splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line.strip() and not line.startswith("-"):
            added, deleted, _ = line.split("\t", 2)
            changes[commit].append((int(added), int(deleted)))
    return {c: sum(min(a, d) for a, d in rows) / max(1, sum(a for a, _ in rows)) for c, rows in changes.items()}


def main() -> None:
    subjects = dict(line.split("|", 1) for line in git("log", "--format=%H|%s", "HEAD").splitlines())
    earlier, shares = set(git("rev-list", f"{MOVED}^").split()), replaced_share()
    before: Counter[str] = Counter()
    for path in modules(MOVED):
        before[package(path)] += len(code_lines(git("show", f"{MOVED}:{path}")))

    def blamed(path: str) -> tuple[str, list[str]]:
        lines = git("blame", "-w", "-M", "-C", "-s", "-l", "--root", "HEAD", "--", path).splitlines()
        return path, [lines[n - 1].split()[0].lstrip("^")[:40] for n in code_lines(git("show", f"HEAD:{path}"))]

    new, now = Counter[str](), defaultdict[str, Counter[str]](Counter)
    with ThreadPoolExecutor(2) as pool:
        for path, commits in pool.map(blamed, modules("HEAD")):
            if found := feature(path):
                new[found] += len(commits)
                continue
            for commit in commits:
                kind = "kept" if commit in earlier else "restructured"
                if commit not in earlier and not RESTRUCTURED.search(subjects[commit]):
                    kind = "later"
                    now[package(path)]["replaced"] += shares.get(commit, 0.0)  # type: ignore[assignment]
                now[package(path)][kind] += 1
    rows = [(name, before[name], now[name]) for name in sorted(set(before) | set(now))]
    rows.append(("all", before.total(), sum((c for _, _, c in rows), Counter[str]())))
    total = rows[-1][2]
    least = total["kept"] + total["restructured"]
    ends = [f"{100 * (lines / before.total() - 1):+.1f} %" for lines in (least, least + total["replaced"])]
    out = ["# Lines of code for the same features", "", "    python bench/code_size.py", ""]
    out += [*(__doc__ or "").split("\n\n", 2)[2].strip().split("\n"), ""]
    out += [f"The code of the earlier features: {ends[0]} to {ends[1]} lines, compared with before.", ""]
    out += ["| package | before | kept | restructured | today, at least | at most | later changes of these files |"]
    out += ["|---|---|---|---|---|---|---|"]
    for name, lines, c in rows:
        least = c["kept"] + c["restructured"]
        most, added = round(least + c["replaced"]), round(c["later"] - c["replaced"])
        out.append(f"| {name} | {lines} | {c['kept']} | {c['restructured']} | {least} | {most} | {added} |")
    out += ["", "Files of later features alone:", "", "| feature | lines |", "|---|---|"]
    out += [f"| {name} | {lines} |" for name, lines in new.most_common()]
    Path(__file__).with_suffix(".md").write_text("\n".join(out) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

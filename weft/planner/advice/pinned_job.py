"""`weft plan --apply`: the job with the chosen layout and the tuned settings written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from weft.job.errors import check_output_file
from weft.job.load import parse_job
from weft.job.schema import Job
from weft.planner.advice.hyperparameters import TunedSetting
from weft.planner.plan import Plan

PINNED = ("dp_replicate", "dp_shard", "zero", "tp", "sequence", "cp", "cp_style", "pp", "ep")
"""Fields of `parallel` that are taken from the plan."""


def tuned_job(job: Job, settings: Sequence[TunedSetting]) -> Job:
    """The job with the tuned settings that are job fields."""
    raw = job.model_dump(mode="json", exclude_defaults=True)
    for setting in settings:
        section, _, field = setting.key.partition(".")
        if field in getattr(type(getattr(job, section, None)), "model_fields", {}):
            raw.setdefault(section, {})[field] = setting.value
    return parse_job(raw)


def pinned_job(job: Job, plan: Plan) -> Job:
    """The job with every choice of the plan as a setting, so that it is planned the same way again."""
    raw = job.model_dump(mode="json", exclude_defaults=True)
    given = raw["parallel"] if isinstance(raw.get("parallel"), dict) else {}
    layout: dict[str, Any] = {name: getattr(plan, name) for name in PINNED}
    if plan.pp > 1:
        layout |= {"schedule": plan.schedule, "virtual_stages": plan.virtual_stages}
    raw["parallel"] = given | layout
    raw.setdefault("cluster", {})["devices_per_node"] = plan.world // job.cluster.nodes
    raw.setdefault("train", {}).update(microbatch=plan.microbatch, accumulation=plan.accumulation)
    raw["precision"] = plan.precision
    if not plan.long:
        raw.setdefault("memory", {}).update(recompute=plan.recompute)
        raw["memory"].pop("budget_gib", None)  # it has chosen the recompute
    return parse_job(raw)


def write_job(job: Job, path: Path) -> Path:
    """Write a job file with the fields that differ from their defaults."""
    check_output_file(path, "the output", "planned.yaml")
    raw = {"name": job.name, **job.model_dump(mode="json", exclude_defaults=True)}
    text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path

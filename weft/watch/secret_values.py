"""Values of a job that are not shown: addresses and passwords of alerts, and fields that are not set."""

from __future__ import annotations

import re
from typing import Any

import yaml

from weft.hardware.catalog import safe_load

SECRET_KEY = re.compile(r"webhook|smtp|password|secret|api_?key|(^|_)token$", re.IGNORECASE)
_YAML_LINE = re.compile(r"^(\s*(?:- )?([\w-]+):[ \t]+)(?!null$)\S.*$", re.MULTILINE)
MASK = "…"


def without_secrets(value: Any) -> Any:
    """A job's data with the values of secret keys replaced."""
    if isinstance(value, dict):
        return {k: MASK if SECRET_KEY.search(str(k)) and v else without_secrets(v) for k, v in value.items()}
    return [without_secrets(v) for v in value] if isinstance(value, list) else value


def shown_job(text: str) -> str:
    """A job file as it is shown: the values of secret keys replaced, fields without a value left out."""
    hidden = _YAML_LINE.sub(lambda line: line[1] + MASK if SECRET_KEY.search(line[2]) else line[0], text)
    try:
        raw = safe_load(hidden)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return hidden
    return (
        yaml.safe_dump(_set(raw), sort_keys=False, allow_unicode=True, width=100) if isinstance(raw, dict) else hidden
    )


def _set(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: inner for k, v in value.items() if (inner := _set(v)) not in (None, {}, [], "")}
    return [_set(v) for v in value] if isinstance(value, list) else value

"""Values of a job that are not shown: addresses and passwords of alerts."""

from __future__ import annotations

import re
from typing import Any

SECRET_KEY = re.compile(r"webhook|smtp|password|secret|api_?key|(^|_)token$", re.IGNORECASE)
_YAML_LINE = re.compile(r"^(\s*(?:- )?([\w-]+):[ \t]+)\S.*$", re.MULTILINE)
MASK = "…"


def without_secrets(value: Any) -> Any:
    """A job's data with the values of secret keys replaced."""
    if isinstance(value, dict):
        return {k: MASK if SECRET_KEY.search(str(k)) and v else without_secrets(v) for k, v in value.items()}
    return [without_secrets(v) for v in value] if isinstance(value, list) else value


def yaml_without_secrets(text: str) -> str:
    """A job file with the values of secret keys replaced."""
    return _YAML_LINE.sub(lambda line: line[1] + MASK if SECRET_KEY.search(line[2]) else line[0], text)

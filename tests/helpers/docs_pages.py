"""The pages of docs/ and the scripts that generate parts of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def python_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


def maker(name: str) -> ModuleType:
    """The module docs/make_NAME.py."""
    spec = importlib.util.spec_from_file_location(f"make_{name}", DOCS / f"make_{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))  # as for a script of the folder
    spec.loader.exec_module(module)
    return module

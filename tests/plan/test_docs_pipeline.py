"""docs/pipeline.md: its pictures and tables are what the code draws now, and its Python runs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft.plan.schedule import check_schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "pipeline.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pipeline", DOCS / "make_pipeline.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_up_to_date(maker: ModuleType) -> None:
    for path, picture in maker.images().items():
        assert path.read_text(encoding="utf-8") == picture, f"{path.name} is old: run python docs/make_pipeline.py"
        assert f"images/{path.name}" in TEXT


def test_the_tables_are_up_to_date(maker: ModuleType) -> None:
    assert maker.page(TEXT) == TEXT, "pipeline.md is old: run python docs/make_pipeline.py"


def test_the_refusal_on_the_page_is_the_real_one() -> None:
    assert (check_schedule("zbv", 4, 8, 3) or "") + "\n" in TEXT


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(tmp_path: Path, number: int) -> None:
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env={"PYTHONPATH": str(DOCS.parent)})

"""The Python in docs/data.md runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(tmp_path, number):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number])
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})


def test_the_dataset_of_the_page_is_one(tmp_path, monkeypatch):
    from weft.data.dataset import open_dataset
    from weft.job import parse_job

    (tmp_path / "docs_waves.py").write_text(next(b for b in BLOCKS if "class Sines" in b))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = open_dataset(parse_job({"data": {"source": "docs_waves:Sines", "seq_len": 64}}))
    assert data.train(3)["inputs"].shape == (64,)

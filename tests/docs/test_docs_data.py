"""The dataset class of docs/data.md works."""

import sys

from helpers.docs_pages import python_of


def test_the_dataset_of_the_page_works(tmp_path, monkeypatch):
    from weft.data.open_dataset import open_dataset
    from weft.job import parse_job

    (tmp_path / "docs_waves.py").write_text(next(b for b in python_of("data") if "class Sines" in b))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = open_dataset(parse_job({"data": {"source": "docs_waves:Sines", "seq_len": 64}}))
    assert data.train(3)["inputs"].shape == (64,)

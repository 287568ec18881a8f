"""Secrets of a job are not shown by the dashboard or sent to trackers."""

from __future__ import annotations

from weft.watch.secret_values import shown_job, without_secrets


def test_only_secrets_are_replaced() -> None:
    job = {"data": {"tokenizer": "bytes"}, "watch": {"alerts": {"to": [{"webhook": "https://x/1", "shape": "slack"}]}}}
    shown = without_secrets(job)
    assert shown["data"] == {"tokenizer": "bytes"}
    assert shown["watch"]["alerts"]["to"] == [{"webhook": "…", "shape": "slack"}]
    text = "data:\n  tokenizer: bytes\nwatch:\n  alerts:\n    to:\n    - webhook: https://x/1\n      shape: slack\n"
    assert shown_job(text) == text.replace("https://x/1", "…")


def test_fields_without_a_value_are_not_shown() -> None:
    unset = "  lora: null\n  class_token: null\n  tables: []\n"
    text = f"name: 李白\nmodel:\n{unset}  tied: false\ncluster: {{network: null}}\nseed: 0\n"
    assert shown_job(text) == "name: 李白\nmodel:\n  tied: false\nseed: 0\n"
    assert shown_job("name: [") == "name: [", "a damaged file is shown as it is"

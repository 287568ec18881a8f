"""Secrets of a job are not shown by the dashboard or sent to trackers."""

from __future__ import annotations

from weft.watch.secret_values import without_secrets, yaml_without_secrets


def test_only_secrets_are_replaced() -> None:
    job = {"data": {"tokenizer": "bytes"}, "watch": {"alerts": {"to": [{"webhook": "https://x/1", "shape": "slack"}]}}}
    shown = without_secrets(job)
    assert shown["data"] == {"tokenizer": "bytes"}
    assert shown["watch"]["alerts"]["to"] == [{"webhook": "…", "shape": "slack"}]
    text = "data:\n  tokenizer: bytes\nwatch:\n  alerts:\n    to:\n    - webhook: https://x/1\n      shape: slack\n"
    assert yaml_without_secrets(text) == text.replace("https://x/1", "…")

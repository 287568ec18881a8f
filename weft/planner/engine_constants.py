"""Sizes that both the engine and its memory prediction go by."""

from __future__ import annotations

LOGITS_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Logits that the loss holds at once. A GPU wants products that are large enough to fill it."""
FP8_CHUNKS = 2
"""A head in fp8 holds the gradient of logits, a byte each, up to so many times as many bytes."""

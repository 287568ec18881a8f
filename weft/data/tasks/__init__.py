"""Samples of tasks: masked tokens, texts with labels, and pairs of texts."""

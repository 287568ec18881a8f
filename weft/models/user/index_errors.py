"""What an index beyond an embedding means: torch says neither the index nor the rows."""

from __future__ import annotations

import traceback
from typing import Any


def explain_index_error(error: IndexError) -> str:
    """The message of an error, with the index and the rows if it was raised by an embedding."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    sizes = next((s for values in reversed(frames) if (s := _embedding_sizes(values))), None)
    if sizes is None:
        return str(error)
    rows, index = sizes
    return (
        f"{error} (an embedding of {rows:,} rows was asked for row {index:,}: if it holds positions, "
        f"data.seq_len={rows} would fit; if it holds tokens, at least {index + 1:,} rows would)"
    )


def _embedding_sizes(values: dict[str, Any]) -> tuple[int, int] | None:
    """Rows of the embedding that is called in a frame, and the largest index, if it is beyond them."""
    rows, indices = getattr(values.get("self"), "num_embeddings", None), values.get("input")
    if not isinstance(rows, int) or indices is None or not indices.numel():
        return None
    largest, smallest = int(indices.max()), int(indices.min())
    return (rows, largest) if largest >= rows and smallest >= 0 else None

"""Names of runs: letters and digits of any language, dots, dashes and underscores."""

from __future__ import annotations

import unicodedata

NAME_PATTERN = r"^[^\W_][\w.-]*$"
MAX_NAME_BYTES = 200
"""A file name has at most 255 bytes, and some of a run's files have its name and an ending."""


def as_run_name(text: str) -> str:
    """A name of a run made from any text, with dashes for what a name cannot hold; empty if nothing is left."""
    name = "".join(c if c in "._-" or is_word(c) else "-" for c in text).lstrip("._-")
    while len(name.encode()) > MAX_NAME_BYTES:
        name = name[:-1]
    return name


def is_word(character: str) -> bool:
    """Whether it is a letter, a mark of a letter, or a digit."""
    return unicodedata.category(character)[0] in "LM" or unicodedata.category(character) == "Nd"

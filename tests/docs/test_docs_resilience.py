"""docs/resilience.md: its menu is the one that `weft chaos` has."""

from __future__ import annotations

import re

from helpers.docs_pages import text_of

from weft.chaos.faults import KINDS


def test_the_menu_is_complete() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text_of("resilience"), re.MULTILINE))
    assert rows.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        assert rows[name].replace("`", "").startswith(kind.what)

"""An offline HTML page: frame, style and script, and a card for each figure."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from weft.job.errors import check_output_file, file_named
from weft.watch.figures.figure import Figure
from weft.watch.journal import to_plain

DIGITS = 6
"""Significant digits of the numbers in a page."""


def _shell(title: str, body: str) -> str:
    """The whole page around its body."""
    # the policy forbids all network requests
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
<link rel="icon" href="data:,">
<title>{esc(title)} · Weft</title>
<style>{_beside("report.css")}</style>
</head>
<body>
<main>
{body}
</main>
<script>{_beside("figures.js")}</script>
<script>{_beside("report.js")}</script>
</body>
</html>
"""


def card(figure: Figure, above: str = "") -> str:
    """A figure in its frame, or its sentence if there is nothing to draw."""
    caption = f'<p class="caption">{esc(figure.caption)}</p>' if figure.caption else ""
    if not figure.data:
        inner = f'<p class="caption">{esc(figure.empty)}</p>'
    else:
        data = {"title": figure.title, "data": figure.data, "layout": figure.layout, "height": figure.height}
        width = f"max-width:{figure.max_width}px;" if figure.max_width else ""
        inner = f"""{caption}
<div class="frame" style="{width}"><div class="plot" id="{figure.id}" style="min-height:{figure.height}px" role="img" \
aria-label="{esc(figure.title)}"></div></div>
<script type="application/json" id="{figure.id}-data">{embed(data)}</script>
<button type="button" data-figure="{figure.id}">Download the data (JSON)</button>"""
    return section(figure.title, above + inner)


def section(title: str, inner: str) -> str:
    """A titled card with any content."""
    return f'<section class="card"><h2>{esc(title)}</h2>{inner}</section>'


def write_page(path: Path, title: str, body: str) -> Path:
    """Write a page with its figures; through a temporary file, so that a reader never sees half a page."""
    check_output_file(path, "the page", "page.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with file_named(path):
            temporary.write_text(_shell(title, body), encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def embed(value: Any) -> str:
    """JSON for a script element, escaped so that no text can close the element; numbers have DIGITS digits."""
    return json.dumps(_rounded(to_plain(value)), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def esc(text: object) -> str:
    """Text as HTML."""
    return html.escape(str(text))


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")

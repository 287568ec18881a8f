"""What commands know of the terminal: its width, whether it shows colours, and text that is fitted to it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any
from unicodedata import east_asian_width

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
LABEL_WIDTH = 11
"""Columns of the names at the left of a plan."""
GAP = 2
MIN_TEXT_WIDTH = 18
"""Columns below which text of a table is not wrapped; its rows become paragraphs."""
MIN_WIDTH = 30
"""Narrower terminals are treated as this wide."""
UNBROKEN = re.compile(
    r"(?<=\d) (?=(?:%|\(|[KMGT]iB|ms|s|h|min|days|kWh|USD|TFLOP/s)(?!\w))"  # a number and its unit
    r"|(?<=\b[cdetp]p) (?=\d)|(?<=zero) (?=\d)|(?<=_shard) (?=\d)|(?<=_replicate) (?=\d)|(?<=batch) (?=\d)"
    r"|(?<=recompute) (?=\w)|(?<=\d) (?=of \d)|(?<=of) (?=\d)"
)
"""Spaces at which lines are not broken, as in `tp 2` and `3 GiB`."""
WORD = re.compile(r" *(?:[\u2e80-\u9fff\uf900-\ufaff]|[^ \u2e80-\u9fff\uf900-\ufaff]+)")
"""A word, or a character of a language that is written without spaces."""
LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
HEADING = re.compile(r"#+ ")
LEAD = re.compile(r"\s*(?:(?:[✓!✗] )?\S+(?: \S+){0,2} {2,}|(?:[-*!✓✗]|\d+\.) +)?")
"""What a continued line is indented by: a name in a column of names, a mark, or spaces."""


def is_terminal(stream: Any) -> bool:
    """Whether a person reads the stream."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def has_colours(stream: Any) -> bool:
    """Whether to write colours: not with NO_COLOR (no-color.org), TERM=dumb, or into a pipe or file."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def text_width(stream: Any = None) -> int | None:
    """Columns to fit text into; None where no terminal reads it: other programs want a line for each row."""
    wanted = is_terminal(sys.stdout if stream is None else stream)
    return max(MIN_WIDTH, shutil.get_terminal_size().columns) if wanted else None


def paint(text: str, style: str, stream: Any = None) -> str:
    """Text in a style, such as `bold red`, where the stream shows colours."""
    if not has_colours(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{';'.join(STYLES[word] for word in style.split())}m{text}\x1b[0m"


def fit(text: str, width: int | None) -> str:
    """Text whose lines are wrapped between words, with the continuation below the line's own text."""
    return text if width is None else "\n".join(_fit_line(line, width) for line in text.split("\n"))


def _fit_line(line: str, width: int) -> str:
    if columns(line) <= width:
        return line
    match = LEAD.match(line)
    lead = match.group() if match and match.end() <= width // 2 else ""
    return lead + f"\n{' ' * len(lead)}".join(_words(line[len(lead) :], width - len(lead)))


def _words(text: str, width: int) -> list[str]:
    """Lines of text. Only a word that is wider than a line is cut, and a number stays with its unit."""
    lines = [""]
    for word in WORD.findall(UNBROKEN.sub("\xa0", text)):
        if lines[-1] and columns(lines[-1] + word) > width:
            lines.append("")
        lines[-1] += word if lines[-1] else word.lstrip(" ")
        while columns(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.replace("\xa0", " ") for line in lines]


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: Chinese characters take two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Aligned columns: the first is left-aligned, the others right-aligned, and the last is not padded.

    In a narrow terminal the first and the last column are wrapped; in a very narrow one each row is a paragraph.
    """
    if not rows:
        return ""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    if width is not None and sum(widths) + GAP * (len(widths) - 1) > width:
        texts = {0, len(head) - 1}
        free = width - sum(w + GAP for i, w in enumerate(widths) if i not in texts) - GAP
        if free < 2 * MIN_TEXT_WIDTH:
            return "\n".join(_paragraph(head, row, width) for row in rows)
        shorter = min(widths[0], widths[-1], free // 2)
        widths[0], widths[-1] = (shorter, free - shorter) if widths[0] < widths[-1] else (free - shorter, shorter)
    return "\n".join(_row(cells, widths) for cells in (head, *rows))


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row over as many lines as its longest cell takes."""
    last = len(cells) - 1
    wrapped = [_words(cell, widths[i]) if len(cell) > widths[i] else [cell] for i, cell in enumerate(cells)]
    lines = []
    for number in range(max(map(len, wrapped))):
        parts = [lines_of[number] if number < len(lines_of) else "" for lines_of in wrapped]
        padded = [p if i == last else p.ljust(widths[i]) if i == 0 else p.rjust(widths[i]) for i, p in enumerate(parts)]
        lines.append((" " * GAP).join(padded).rstrip())
    return "\n".join(lines)


def _paragraph(head: Sequence[str], row: Sequence[str], width: int) -> str:
    """The first cell, and below it the others: figures with their names, and a last text as it is."""
    figures = [
        f"{name}\xa0{cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell and len(cell.split()) < 3
    ]
    texts = [cell for cell in row[1:] if len(cell.split()) >= 3]
    below = "; ".join([", ".join(figures), *texts] if figures else texts)
    return "\n".join([*_words(row[0], width), *(f"  {line}" for line in _words(below, width - 2))])


def markdown(text: str, width: int | None) -> str:
    """Markdown for a terminal: paragraphs are filled, headings are bold; code and tables stay as they are."""
    if width is None:
        return text.rstrip("\n")
    lines: list[str] = []
    in_code = joins = False
    for line in text.rstrip("\n").split("\n"):
        in_code ^= line.startswith("```")
        fixed = in_code or not line or line.startswith(("```", "|", "#"))
        if joins and not fixed and not LIST_ITEM.match(line):
            space = "" if columns(lines[-1][-1:]) > 1 else " "
            lines[-1] += space + line.strip()
        else:
            lines.append(line)
        joins = not fixed
    return "\n".join(paint(line, "bold cyan") if HEADING.match(line) else fit(line, width) for line in lines)

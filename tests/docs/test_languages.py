"""Pages in Chinese keep step with the English ones: the same headings, commands, links and figures."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from helpers.docs_pages import DOCS

ROOT = DOCS.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^<!-- run: ([\w-]+) -->\n.*?^<!-- end of the run -->$", re.MULTILINE | re.DOTALL)
PAIRS = [
    (ROOT / "README.md", ROOT / "README.zh-CN.md"),
    *((p.with_name(p.name.replace(".zh.md", ".md")), p) for p in sorted(DOCS.rglob("*.zh.md"))),
]


def outline(path: Path) -> tuple[list[int], list[tuple[str, str]], Counter[str], Counter[str], Counter[str]]:
    """Levels of headings, fenced blocks, comments, targets of links, and figures of the prose."""
    text = path.read_text(encoding="utf-8")
    markers = Counter(re.findall(r"<!-- .*? -->", text))
    text = GENERATED.sub("", text)
    blocks = FENCE.findall(text)
    prose = FENCE.sub("", text)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)]
    links = Counter(target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not target.startswith("README"))
    words = re.sub(r"<!-- .*? -->|\]\([^)\s]+\)", "", prose)
    figures = Counter(re.findall(r"\d[\d,.]*\d|\d", words))
    return levels, blocks, markers, links, figures


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[c.relative_to(ROOT).as_posix() for _, c in PAIRS])
def test_both_languages_say_the_same(english: Path, chinese: Path) -> None:
    names = ("headings", "commands", "markers", "links", "figures")
    for name, ours, theirs in zip(names, outline(english), outline(chinese), strict=True):
        if isinstance(ours, Counter) and isinstance(theirs, Counter):
            missing, extra = dict(ours - theirs), dict(theirs - ours)
            assert not missing and not extra, f"{chinese.name}: {name} missing {missing}, not in {english.name} {extra}"
        else:
            assert ours == theirs, f"{chinese.name}: other {name} than {english.name}"


def test_the_home_and_every_tutorial_are_in_chinese() -> None:
    for page in (DOCS / "index.md", DOCS / "gallery.md", *(DOCS / "tutorials").glob("*[a-z].md")):
        if not page.name.endswith(".zh.md"):
            assert page.with_suffix(".zh.md").exists(), page

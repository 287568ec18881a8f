"""What mkdocs does to the pages of docs/ that GitHub does not need: links out of docs/, and the commands of `weft`."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
LINK = re.compile(r"(\]\()((?:\.\./)+)([^)\s]*)(\))")
CHINESE_BREAK = re.compile(r"(?<=[\u3001-\u9fff\uff00-\uffef])\n *(?=[\u3400-\u9fff])")
"""A line break between Chinese characters, which a browser would show as a space."""
COMMANDS = "<!-- the commands of weft -->"
LESSONS = ROOT / "lessons"


def on_config(config: Any) -> None:
    """Pages are read from a copy of docs/ that has the lessons, which lie beside it, as pages too."""
    if Path(config.docs_dir) != ROOT / "docs":
        return
    copied = Path(tempfile.mkdtemp(prefix="weft-docs-"))
    atexit.register(shutil.rmtree, copied, ignore_errors=True)
    shutil.copytree(ROOT / "docs", copied, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (copied / "lessons").mkdir()
    for name in (LESSONS / "order.txt").read_text(encoding="utf-8").split():
        code = f"\n[{name}.py]({REPOSITORY}/blob/main/lessons/{name}.py)\n"
        for folder, end in ((LESSONS, ".md"), (LESSONS / "zh", ".zh.md")):
            text = re.sub(r"(?:\.\./)+docs/", "../", (folder / f"{name}.md").read_text(encoding="utf-8"))
            (copied / "lessons" / f"{name}{end}").write_text(text + code, encoding="utf-8")
    config.docs_dir = str(copied)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside of docs/ go to the repository, and the page of the command line gets the commands."""
    depth = page.file.src_uri.count("/")

    def outside(link: re.Match[str]) -> str:
        levels = link[2].count("../")
        if levels <= depth:
            return link[0]
        path = link[3].partition("#")[0]
        if re.fullmatch(r"lessons/\w+\.md", path) and path != "lessons/README.md":
            return f"{link[1]}{'../' * depth}{link[3]}{link[4]}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{link[1]}{REPOSITORY}/{kind}/main/{link[3]}{link[4]}"

    text = CHINESE_BREAK.sub("", LINK.sub(outside, markdown))
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def on_post_build(config: Any, **_: Any) -> None:
    """The switch of languages asks for a map of the site beside each page."""
    folder = Path(config.site_dir)
    for beside in {page.parent for page in folder.rglob("*.html")} - {folder}:
        shutil.copyfile(folder / "sitemap.xml", beside / "sitemap.xml")


def commands() -> str:
    """A section for each command with its arguments and options, from the help texts."""
    import typer

    from weft.cli.main import make_app

    parts: list[str] = []

    def add(command: Any, name: str) -> None:
        if command.hidden:
            return
        children = getattr(command, "commands", {})
        if getattr(command, "callback", None) is not None and not (children and not command.invoke_without_command):
            parts.append(section(command, name))
        for child, each in sorted(children.items()):
            add(each, f"{name} {child}")

    root = typer.main.get_command(make_app(""))
    for name, command in sorted(getattr(root, "commands", {}).items()):
        add(command, f"weft {name}")
    return "\n\n".join(parts)


def section(command: Any, name: str) -> str:
    """Name, help text, and a table of arguments and options."""
    rows = [row for p in command.params if not getattr(p, "hidden", False) for row in [parameter(p)] if row]
    table = ["| argument | meaning |", "|---|---|", *rows] if rows else []
    words = re.sub(r"\n(?!\n)[ ]*", "\n", (command.help or "").replace("\b", "").strip())
    return "\n".join([f"## {name}", "", words, "", *table])


def parameter(param: Any) -> str:
    """A row of the table; none for --help."""
    names = ", ".join(f"`{word}`" for word in [*param.opts, *param.secondary_opts] if word.startswith("-"))
    if not names:
        names = f"`{(param.metavar or param.name or '').upper()}`"
    text = " ".join((getattr(param, "help", None) or "").split()).replace("|", "\\|").replace("<", "&lt;")
    default = param.default
    if default not in (None, False, (), [], "") and not callable(default):
        text += f" Default: `{default}`."
    return "" if "--help" in param.opts else f"| {names} | {text.strip() or '–'} |"

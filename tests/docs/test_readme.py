"""Every command and script of the README and of docs/ runs, in order, each page in its own folder.

A comment before a block controls it and is not visible on the page:

    <!-- not run -->          this block is not run
    <!-- exit 2 -->           the block ends with this code
    <!-- ctrl-c -->           send Ctrl-C once it trains; it ends with 130
    <!-- file mymodel.py -->  the block is this file, for the blocks after it
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.docs_pages import maker, text_of
from helpers.forked_python import TEMPLATE_ENV, Popen
from helpers.interpreter import ForkedInterpreter
from helpers.self_faults import write_orders

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(?:^<!-- ?([^\n]*?) ?-->\n+)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHIMS = {"weft": ["-m", "weft"], "python": [], "torchrun": ["-m", "torch.distributed.run"]}
SHELL_SYNTAX = re.compile(r"[|<>&;$`*?~]")
LIMIT_S = 300


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    where: str
    marker: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(f"{page}:{text.count(chr(10), 0, m.start()) + 1}", m[1] or "", m[2], m[3]) for m in FENCE.finditer(text)
    ]


@pytest.fixture
def shell(tmp_path):
    """A folder, and an environment with weft, python and torchrun of this checkout, which are forks."""
    folder = tmp_path / "work"
    folder.mkdir()
    with ForkedInterpreter() as python:
        yield folder, environment(tmp_path / "forked", python.path)


def environment(tools, python):
    """An environment with weft, python and torchrun, which run an interpreter."""
    tools.mkdir()
    for name, arguments in SHIMS.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{python}" {" ".join(arguments)} "$@"\n')
        (tools / name).chmod(0o755)
    env = {**TEMPLATE_ENV, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name in ("MASTER_ADDR", "MASTER_PORT", "WEFT_STORE"):
        env.pop(name, None)
    return env


def commands_of(block):
    """The commands of a block. Lines without shell syntax are started here, others by bash."""
    if block.language == "python":
        return [[sys.executable, "-c", block.text]]
    lines = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", "").splitlines()]
    lines = [words for words in lines if words]
    if SHELL_SYNTAX.search(block.text) or not all(words[0] in SHIMS for words in lines):
        return [["bash", "-euo", "pipefail", "-c", block.text]]
    return [[sys.executable, *SHIMS[words[0]], *words[1:]] for words in lines]


def run_page(page, shell):
    """Run a page's blocks; returns the output of each."""
    outputs = []
    for block in blocks(page):
        verb, _, word = block.marker.partition(" ")
        if verb == "file":
            (shell[0] / word).write_text(block.text, encoding="utf-8")
        elif block.language in ("bash", "python") and block.marker != "not run":
            assert verb in ("", "end", "exit", "ctrl-c"), f"{block.where}: unknown marker {block.marker!r}"
            expected = {"": 0, "end": 0, "ctrl-c": 130}.get(verb, int(word) if word else 0)
            code, output = run_block(block, shell, interrupt=verb == "ctrl-c")
            assert code == expected, f"{block.where} ended with {code}, not {expected}:\n{output}"
            outputs.append(output)
    return outputs


def run_block(block, shell, interrupt=False):
    """Exit code and output of a block; it ends at the first command that fails."""
    code, outputs = 0, []
    for command in commands_of(block):
        code, output = run_command(command, shell, interrupt)
        outputs.append(output)
        if code:
            break
    return code, "".join(outputs)


def run_command(command, shell, interrupt):
    """Exit code and output of a command. Ctrl-C is sent to it in step 12."""
    folder, env = shell
    if interrupt:
        env = {**env, **write_orders(folder.parent / "orders", {"kind": "launcher SIGINT", "rank": 0, "step": 12})}
    process = Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    watchdog = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
        return process.wait(), "".join(lines)
    finally:
        watchdog.cancel()


def test_the_readme(shell):
    outputs = run_page("README.md", shell)
    result = "\n".join(outputs)
    assert "resumed from step" in result
    assert "layouts are the same run as one process" in result
    folder = shell[0]
    run = folder / "runs" / "tiny"
    assert (run / "report.html").stat().st_size > 20_000
    assert (run / "model.safetensors").is_file()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, steps[-1] + 1))


PAGES = [
    "flow", "layouts", "precision", "dryrun", "context", "communication", "several-hosts", "how-weft-chooses",
    "fewer-exchanges", "one-gpu", "index", "command-line", "python", "file-formats", "tutorials/first-run",
    "tutorials/your-text", "tutorials/fine-tune", "tutorials/many-gpus",
]  # fmt: skip


@pytest.mark.parametrize("page", [f"docs/{name}.md" for name in PAGES])
def test_the_commands_of_a_page(shell, page):
    assert run_page(page, shell)


def test_the_commands_about_data(shell):
    folder = shell[0]
    (folder / "notes.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    (folder / "articles.jsonl").write_text('{"text": "A line is a document."}\n' * 40)
    (folder / "src").mkdir()
    (folder / "src" / "hello.py").write_text('print("hello")\n' * 40)
    bash = [b for b in blocks("docs/data.md") if b.language == "bash"]
    assert bash
    for block in bash:
        code, output = run_block(block, shell)
        assert code == 0, f"{block.where}:\n{output}"


PAGES = [
    "README.md", "README.zh-CN.md", "CHANGELOG.md",
    *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md"))),
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if not re.match(r"[a-z]+:|#", link):
            assert ((ROOT / page).parent / link.partition("#")[0]).exists(), f"{page} points at {link}"


@pytest.mark.parametrize("page", PAGES)
def test_rows_of_tables_are_whole(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        first, *rest = table.splitlines()
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rest} == {len(re.findall(r"(?<!\\)\|", first))}, first
        assert all(row.endswith("|") for row in (first, *rest)), f"a row of {first} goes on in the next line"


def test_the_number_of_published_families_is_that_of_the_table():
    rows = re.findall(r"^\| .* \| (`\w+`) \| `\w+` \|$", text_of("pretrained"), re.MULTILINE)
    assert f"published weights of {len(set(rows))} families" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_page_of_docs_is_in_the_index():
    """Chinese pages are the second language of a page with the same name."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert all(f"({page})" in index for page in pages if page != "README.md" and not page.endswith(".zh.md"))


def test_the_page_of_jobs_is_current():
    assert text_of("jobs") == maker("jobs").page(), "run python docs/make_jobs.py"
    for part in ("data.mixture", "model.tables", "model.lora", "watch.alerts", "watch.alerts.to"):
        assert f"\n## {part}\n" in text_of("jobs"), "every section inside of a section is described"

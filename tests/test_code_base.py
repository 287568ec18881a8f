"""The code base keeps its order: format, lint, types, one-way imports without cycles, and folders of one subject."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "weft"
SAME_NAME = ("__init__", "command", "view")
"""What each extension with a command has."""
MAX_FILES, MAX_LINES = 25, 3500
"""Of the modules that lie directly in one folder."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


@cache
def outline(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[str]]:
    """Every import of a module, those for type checking too; the public classes of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports: list[ast.Import | ast.ImportFrom] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # expressions have no imports
            children = getattr(node, block, ())
            for child in children if isinstance(children, list) else ():
                visit(child)

    visit(tree)
    return imports, [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def imports_of(path: Path, package: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports anywhere, for type checking too."""
    names: set[str] = set()
    for node in outline(path)[0]:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names.update(name if name in package else node.module for name in inner)
    return names & package.keys()


@pytest.mark.parametrize(
    "command",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["lint-imports"]],
    ids=["format", "lint", "types", "layers"],
)
def test_tool_passes(command: list[str]) -> None:
    tool = Path(sys.executable).parent / command[0]
    found = str(tool) if tool.exists() else shutil.which(command[0])
    assert found, f"{command[0]} is not installed; run make test"
    if command == ["mypy"] and not (ROOT / ".mypy_cache").exists():
        command = [*command, "--cache-dir", os.devnull]  # writing a cache takes a fifth of the time
    done = subprocess.run([found, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    twice = [name for name, count in names.items() if count > 1]
    assert not twice, f"pytest cannot import two test files of one name: {twice}"


def test_the_longest_files_exist() -> None:
    """Those that tests/conftest.py starts first."""
    text = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    names = re.findall(r'"(test_\w+)"', text[text.index("LONG = (") : text.index("# fmt: skip")])
    missing = set(names) - {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(names) > 20 and not missing


def test_no_import_cycles() -> None:
    package = modules()
    graph = {name: imports_of(path, package) - {name} for name, path in package.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_folders_hold_one_subject() -> None:
    files: dict[Path, list[Path]] = defaultdict(list)
    for path in modules().values():
        files[path.parent].append(path)
    for folder, paths in files.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        name = folder.relative_to(ROOT)
        assert len(paths) <= MAX_FILES, f"{name} holds {len(paths)} modules: split it by subject"
        assert lines <= MAX_LINES, f"{name} holds {lines} lines: split it by subject"


def test_names_are_told_apart() -> None:
    """No two modules of a folder differ by a plural, and no file name stands more than twice outside weft/job, which
    has one file per section."""
    known = list(modules().values())
    for folder in {path.parent for path in known}:
        stems = sorted(path.stem for path in known if path.parent == folder)
        close = [(a, b) for a in stems for b in stems if a + "s" == b]
        assert not close, f"{folder.relative_to(ROOT)}: {close}"
    repeated = {
        stem: n
        for stem, n in Counter(p.stem for p in known if p.parent.name != "job" and p.stem not in SAME_NAME).items()
        if n > 2
    }
    assert not repeated


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for public in outline(path)[1]:
            places[public].append(name)
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(repeated.items()))


PRIVATE_ATTRIBUTE = re.compile(
    r"""\btorch(\.[a-z]\w*)*\._[a-z]\w*   # torch._foreach_add_
    |\._(modules|parameters|buffers|non_persistent_buffers_set|step_count|backward_hooks|forward_hooks)\b""",
    re.VERBOSE,
)


def test_private_torch_names_live_in_internals_modules() -> None:
    """`torch._x` and `torch.a._b` are imported and used in modules named *_internals.py only."""
    for name, path in modules().items():
        if path.stem.endswith("internals"):
            continue
        used = PRIVATE_ATTRIBUTE.search(path.read_text(encoding="utf-8"))
        assert not used, f"{name} uses {used[0]}; put it into a module named *_internals.py"
        for node in outline(path)[0]:
            imported: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            private = [x for x in imported if x.startswith("torch.") and any(p.startswith("_") for p in x.split("."))]
            assert not private, f"{name} imports {private[0]}; put it into a module named *_internals.py"


def test_internals_modules_have_tests() -> None:
    """Each is named in a test, which fails with a sentence when torch moves a name."""
    named = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    without = [name for name, path in modules().items() if path.stem.endswith("internals") and path.stem not in named]
    assert not without, f"no test of {', '.join(without)}"

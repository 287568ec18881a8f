"""No pickle, eval, exec, shell, unsafe YAML, torch.load of objects or object collective enters the code base."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("weft", "bench", "lessons", "docs", "recipes")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"}
UNSAFE_LOADS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load"}


WORDS = re.compile("|".join(MODULES | BUILTINS | OBJECT_COLLECTIVES | SHELLS | UNSAFE_LOADS | {"shell", "torch.load"}))
"""A file without any of these has nothing to find and is not parsed."""
ALLOWED = {
    "bench/hvd_suite.py imports pickle": "in place of cloudpickle, which Horovod's own tests import",
    "weft/checkpoint/dcp_internals.py imports pickle": "the index of DCP is a pickle; only listed names are read",
    "weft/watch/runs/run_catalog.py calls yaml.load, which can build objects": "with the safe loader, in C",
}
"""Exceptions, each with its reason."""


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute, else nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and reason of every unsafe call or import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, f"imports {n}") for n in names if n.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        given = {k.arg: k.value for k in node.keywords}
        true = {k for k, v in given.items() if isinstance(v, ast.Constant) and v.value is True}
        if name in BUILTINS:
            yield node.lineno, f"calls {name}"
        if "shell" in true or name in SHELLS:
            yield node.lineno, f"runs a shell ({name})"
        if name in UNSAFE_LOADS and (name.startswith("yaml") or "allow_pickle" in true):
            yield node.lineno, f"calls {name}, which can build objects"
        if name == "torch.load" and "weights_only" not in true:
            yield node.lineno, "calls torch.load without weights_only=True"
        if name.split(".")[0] in ("dist", "torch", "distributed") and name.split(".")[-1] in OBJECT_COLLECTIVES:
            yield node.lineno, f"calls {name}, which unpickles what other processes send"


def test_no_unsafe_call_in_the_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if WORDS.search(text := path.read_text(encoding="utf-8"))
        for line, what in unsafe(ast.parse(text))
        if f"{path.relative_to(ROOT)} {what}" not in ALLOWED
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from cloudpickle import dumps", "eval('1')", "exec(text)", "subprocess.run('ls', shell=True)",
        "os.system('ls')", "yaml.load(text, Loader=x)", "torch.load(path)", "torch.load(path, weights_only=False)",
        "dist.all_gather_object(out, value)", "torch.distributed.broadcast_object_list(x)",
        "np.load(path, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_check_finds(code: str) -> None:
    assert WORDS.search(code)
    assert list(unsafe(ast.parse(code)))


def test_the_check_allows_safe_calls() -> None:
    code = (
        "yaml.safe_load(x); torch.load(p, weights_only=True); subprocess.run(['ls']); mesh.gather_json(x); np.load(p)"
    )
    assert not list(unsafe(ast.parse(code)))

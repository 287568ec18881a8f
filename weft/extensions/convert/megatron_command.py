"""Reads the arguments of a Megatron command out of a shell script or a plain list. Nothing is executed."""

from __future__ import annotations

import re
import shlex
from itertools import chain

from weft.extensions.convert.settings import Settings
from weft.job.errors import JobError

ARRAY = re.compile(r"^\s*(?:export\s+|declare\s+-a\s+)?(\w+)(\+?)=\((.*?)\)[ \t]*;?[ \t]*$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"""^\s*(?:export\s+)?(\w+)(\+?)=(["'])(.*?)\3[ \t]*;?[ \t]*$""", re.DOTALL | re.MULTILINE)
PLAIN = re.compile(r"^\s*(?:export\s+)?(\w+)()=([^\s\"'(]*)[ \t]*;?[ \t]*$", re.MULTILINE)
VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
LAUNCHERS = ("nproc_per_node", "nproc-per-node", "nnodes", "node_rank", "node-rank", "master_addr", "master_port",
             "rdzv_id", "rdzv_backend", "rdzv_endpoint", "master-addr", "master-port", "rdzv-id", "rdzv-backend",
             "rdzv-endpoint", "max_restarts", "log_dir", "standalone", "tee", "redirects")  # fmt: skip
"""Arguments of torchrun, which come before the script."""
MAX_EXPANSION = 2**20


def _without_comments(text: str) -> str:
    lines = [re.sub(r"(^|\s)#.*$", "", line) for line in text.splitlines()]
    return re.sub(r"\\\s*\n", " ", "\n".join(lines) + "\n")


def _expand(text: str, values: dict[str, str]) -> str:
    """The text with variables replaced by their values, also inside values; unknown ones stay as they are."""
    for _ in range(8):

        def value_of(match: re.Match[str]) -> str:
            name, default, bare = match.groups()
            return values.get(name or bare, default if default is not None else match.group(0))

        new = VARIABLE.sub(value_of, text)
        if new == text or len(new) > MAX_EXPANSION:
            break
        text = new
    return text


def arguments_of(text: str, file: str) -> Settings:
    """The arguments by name, as `num-layers`; those with several values have a list."""
    text = _without_comments(text)
    values: dict[str, str] = {}
    found: list[tuple[int, str, str, str]] = []
    for pattern, group in ((ARRAY, 3), (QUOTED, 4), (PLAIN, 3)):
        for match in pattern.finditer(text):
            found.append((match.start(), match.group(1), match.group(2), match.group(group)))
        text = pattern.sub(lambda match: "\n" * match.group(0).count("\n") + " " * 3, text)
    for _, name, more, value in sorted(found):
        flat = " ".join(value.split())
        values[name] = f"{values.get(name, '')} {flat}" if more else flat
    commands = _expand(text, values)
    if "--" not in commands:  # assignments only
        commands = _expand("\n".join(values.values()), values)
    try:
        words = shlex.split(commands, posix=True)
    except ValueError as error:
        raise JobError(f"{file} is not a command line: {error}") from None
    return _settings(words)


def _settings(words: list[str]) -> Settings:
    settings, name = Settings(), None
    parts = ([part.strip("'\"") for part in word.split()] if word.startswith("--") else [word] for word in words)
    for word in chain.from_iterable(parts):
        if word.startswith("--") and len(word) > 2:
            name, sign, value = word[2:].partition("=")
            name = name if name in LAUNCHERS else name.replace("_", "-")
            settings[name] = value if sign else True
        elif name is not None and not word.endswith(".py") and not _ends(word):
            given = settings[name]
            settings[name] = word if given is True else [*(given if isinstance(given, list) else [given]), word]
        else:
            name = None
    return settings


def _ends(word: str) -> bool:
    """Whether a word cannot be the value of an argument: a redirection, a pipe or another command."""
    return word in ("|", "||", "&&", "&", ";", "fi", "done", "exit") or word.startswith((">", "2>", "&>"))

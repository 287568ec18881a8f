"""Reads the arguments of a Megatron command out of a shell script or a plain list. Nothing is executed."""

from __future__ import annotations

import re
import shlex
from itertools import chain

from weft.extensions.convert.settings import Settings
from weft.job.errors import JobError

ARRAY = re.compile(r"^[ \t]*(?:export\s+|declare\s+-a\s+)?(\w+)(\+?)=(\()", re.MULTILINE)
QUOTED = re.compile(r"""^[ \t]*(?:export\s+)?(\w+)(\+?)=(["'])""", re.MULTILINE)
PLAIN = re.compile(r"^[ \t]*(?:export\s+)?(\w+)()=([^\s\"'(]*)[ \t]*;?[ \t]*$", re.MULTILINE)
ENDS = {
    start: re.compile(rf"{end}[ \t]*;?[ \t]*$", re.MULTILINE)
    for start, end in zip("(\"'", (r"\)", '"', "'"), strict=True)
}
"""What ends a value of several lines, by what begins it."""
VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
LAUNCHERS = ("nproc_per_node", "nproc-per-node", "nnodes", "node_rank", "node-rank", "master_addr", "master_port",
             "rdzv_id", "rdzv_backend", "rdzv_endpoint", "master-addr", "master-port", "rdzv-id", "rdzv-backend",
             "rdzv-endpoint", "max_restarts", "log_dir", "standalone", "tee", "redirects")  # fmt: skip
"""Arguments of torchrun, which come before the script."""
MAX_EXPANSION = 2**22


def _without_comments(text: str) -> str:
    lines = [re.sub(r"(^|\s)#.*$", "", line) for line in text.splitlines()]
    return re.sub(r"\\\s*\n", " ", "\n".join(lines) + "\n")


def _expand(text: str, values: dict[str, str]) -> str:
    """The text with variables replaced by their values, also inside values; unknown ones stay as they are."""
    size = 0

    def value_of(match: re.Match[str]) -> str:
        nonlocal size
        name, default, bare = match.groups()
        value = values.get(name or bare, default if default is not None else match.group(0))
        size += len(value)
        if size > MAX_EXPANSION:
            raise JobError(f"the variables of the script have more than {MAX_EXPANSION:,} characters")
        return value

    for _ in range(8):
        new = VARIABLE.sub(value_of, text)
        if new == text:
            break
        text = new
    return text


def arguments_of(text: str, file: str) -> Settings:
    """The arguments by name, as `num-layers`; those with several values have a list."""
    text = _without_comments(text)
    assigned: list[tuple[int, str, str, str]] = []
    for pattern in (ARRAY, QUOTED, PLAIN):
        text = _take_assignments(pattern, text, assigned)
    parts: dict[str, list[str]] = {}
    for _, name, more, value in sorted(assigned):
        rest = _after_itself(name, flat := " ".join(value.split()))
        if more or rest is not None:
            parts.setdefault(name, []).append(flat if more or rest is None else rest)
        else:
            parts[name] = [flat]
    values = {name: " ".join(filter(None, texts)) for name, texts in parts.items()}
    commands = _expand(text, values)
    if "--" not in commands:  # assignments only
        commands = _expand("\n".join(values.values()), values)
    try:
        words = shlex.split(commands, posix=True)
    except ValueError as error:
        raise JobError(f"{file} is not a command line: {error}") from None
    return _settings(words)


def _after_itself(name: str, value: str) -> str | None:
    """What `A="$A more"` adds to A; None for values that do not begin with their variable."""
    match = VARIABLE.match(value)
    if match is None or name not in (match[1], match[3]) or value[match.end() : match.end() + 1] not in ("", " "):
        return None
    return value[match.end() + 1 :]


def _take_assignments(pattern: re.Pattern[str], text: str, assigned: list[tuple[int, str, str, str]]) -> str:
    """Add position, name, `+` and value of each assignment; the text with blanks instead of them."""
    kept, at, endless = list[str](), 0, set[str]()
    for match in pattern.finditer(text):
        name, more, value = match.groups()
        if match.start() < at or value in endless:  # inside a value; no value that begins so ends
            continue
        stop = match.end()
        if value in ENDS:
            end = ENDS[value].search(text, stop)
            if end is None:
                endless.add(value)
                continue
            value, stop = text[stop : end.start()], end.end()
        assigned.append((match.start(), name, more, value))
        taken = text[match.start() : stop]
        kept += [text[at : match.start()], " " * 3 + "\n" * taken.count("\n")]
        at = stop
    return "".join([*kept, text[at:]])


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
            if isinstance(given, list):
                given.append(word)
            else:
                settings[name] = word if given is True else [given, word]
        else:
            name = None
    return settings


def _ends(word: str) -> bool:
    """Whether a word cannot be the value of an argument: a redirection, a pipe or another command."""
    return word in ("|", "||", "&&", "&", ";", "fi", "done", "exit") or word.startswith((">", "2>", "&>"))

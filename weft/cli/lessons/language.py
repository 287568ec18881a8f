"""The language of the course, and the translation of a sentence into it."""

from __future__ import annotations

import functools
import os

from weft.hardware.catalog import safe_load
from weft.job.errors import JobError
from weft.job.load import lessons_folder

LANGUAGES = ("en", "zh")
VARIABLE = "WEFT_LANG"
"""Environment variable that `--lang` sets for the processes of a lesson."""


def language() -> str:
    """The value of WEFT_LANG, or zh where the locale is Chinese, or en."""
    if chosen := os.environ.get(VARIABLE):
        return check_language(chosen)
    locale = next((os.environ[key] for key in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(key)), "")
    return "zh" if locale.lower().startswith("zh") else "en"


def check_language(name: str) -> str:
    """The name; a JobError if the course has no such language."""
    if name not in LANGUAGES:
        raise JobError(f"the lessons are in {' and '.join(LANGUAGES)}, not in {name!r}")
    return name


@functools.cache
def messages(name: str) -> dict[str, str]:
    """The translation of every English sentence that lessons and checks print."""
    if name == "en":
        return {}
    translations: dict[str, str] = safe_load((lessons_folder() / name / "messages.yaml").read_text(encoding="utf-8"))
    return translations


def t(text: str, **values: object) -> str:
    """The sentence in the chosen language, with its values filled in. Line breaks around it stay."""
    sentence = text.strip("\n")
    text = text.replace(sentence, messages(language()).get(sentence, sentence))
    return text.format(**values) if values else text

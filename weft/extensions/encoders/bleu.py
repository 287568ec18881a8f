"""BLEU of translated texts (Papineni et al. 2002), with sacrebleu's tokenizer 13a and smoothing (Post 2018)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

MAX_ORDER = 4
"""Longest n-grams that are compared."""

_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
_SPLITS = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


def split_words(text: str) -> list[str]:
    """Words and punctuation, as mteval-v13a splits them."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, letter in _ENTITIES:
        text = text.replace(entity, letter)
    text = f" {text} "
    for pattern, parts in _SPLITS:
        text = pattern.sub(parts, text)
    return text.split()


def corpus_bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU from 0 to 100 of translations with one reference each."""
    matches, totals = [0] * MAX_ORDER, [0] * MAX_ORDER
    length = wanted = 0
    for translation, reference in zip(translations, references, strict=True):
        ours, theirs = split_words(translation.rstrip()), split_words(reference.rstrip())
        length, wanted = length + len(ours), wanted + len(theirs)
        for n in range(MAX_ORDER):
            found, known = _grams(ours, n + 1), _grams(theirs, n + 1)
            matches[n] += (found & known).total()
            totals[n] += found.total()
    if not any(matches) or not all(totals):
        return 0.0
    halvings, logs = 0, 0.0
    for match, total in zip(matches, totals, strict=True):
        halvings += match == 0
        logs += math.log(100 * match / total if match else 100 / (2**halvings * total))
    brevity = 1.0 if length >= wanted else math.exp(1 - wanted / length)
    return brevity * math.exp(logs / MAX_ORDER)


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

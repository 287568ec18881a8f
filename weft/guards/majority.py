"""Which of several ranks that must hold the same numbers holds others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Digest = tuple[float, ...]


@dataclass(frozen=True)
class Odd:
    """Ranks that differ from the others of their group; `source` holds what they should. None: nobody can tell."""

    group: tuple[int, ...]
    ranks: tuple[int, ...]
    source: int | None


def odd_ones(groups: Sequence[tuple[int, ...]], digests: Mapping[int, Digest], confessed: set[int]) -> list[Odd]:
    """The groups that do not agree, and who is wrong in each.

    `confessed` are ranks that saw their own weights change between two updates. Of the others the majority is right;
    where there is none, nobody can tell.
    """
    found = []
    for group in groups:
        if len({digests[r] for r in group}) < 2 and not confessed & set(group):
            continue
        honest = [r for r in group if r not in confessed]
        votes = Counter(digests[r] for r in honest).most_common(2)
        if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
            found.append(Odd(group, (), None))
            continue
        right = votes[0][0]
        wrong = tuple(r for r in group if r in confessed or digests[r] != right)
        found.append(Odd(group, wrong, next(r for r in honest if digests[r] == right)))
    return found

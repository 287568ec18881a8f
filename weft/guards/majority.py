"""Which ranks of a group hold other values than the majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Digest = tuple[float, ...]


@dataclass(frozen=True)
class Outliers:
    """Ranks that differ from their group; `source` is a rank with the right values, or None without a majority."""

    group: tuple[int, ...]
    ranks: tuple[int, ...]
    source: int | None


def find_outliers(
    groups: Sequence[tuple[int, ...]], digests: Mapping[int, Digest], self_reported: set[int]
) -> list[Outliers]:
    """The groups that disagree, and the wrong ranks of each.

    `self_reported` are ranks whose own weights changed between two updates. Among the others the majority is right.
    """
    found = []
    for group in groups:
        if len({digests[r] for r in group}) < 2 and not self_reported & set(group):
            continue
        honest = [r for r in group if r not in self_reported]
        votes = Counter(digests[r] for r in honest).most_common(2)
        if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
            found.append(Outliers(group, (), None))
            continue
        right = votes[0][0]
        wrong = tuple(r for r in group if r in self_reported or digests[r] != right)
        found.append(Outliers(group, wrong, next(r for r in honest if digests[r] == right)))
    return found

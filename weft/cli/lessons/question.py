"""A question of an exercise: a function that the learner fills in, calls with known results, and a hint."""

from __future__ import annotations

import math

from weft.cli.lessons.language import t

Case = tuple[tuple[object, ...], object]


class Question:
    """`name` is the learner's function. Each case is its arguments and the right result."""

    def __init__(self, name: str, hint: str, *cases: Case) -> None:
        self.name, self.hint, self.cases = name, hint, cases

    def wrong(self, function: object) -> str | None:
        """What is wrong with the learner's function, in a sentence or two; None if it is right."""
        if not callable(function):
            return t("the file has no function {name}; write it again as in the exercise.", name=self.name)
        for arguments, right in self.cases:
            call = f"{self.name}({', '.join(map(_short, arguments))})"
            try:
                result = function(*arguments)
            except Exception as error:
                text = t("{call} fails: {error}.", call=call, error=f"{type(error).__name__}: {error}")
                return f"{text} {t(self.hint)}"
            if result is ...:
                return f"{t('replace the ... by your answer.')} {t(self.hint)}"
            if not same(result, right):
                text = t(
                    "{call} gives {result}; {right} is right.", call=call, result=_short(result), right=_short(right)
                )
                return f"{text} {t(self.hint)}"
        return None


def same(a: object, b: object) -> bool:
    """Equal up to rounding: numbers, tensors, and tuples or lists of them."""
    if isinstance(b, tuple | list):
        return isinstance(a, tuple | list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, int | float):
        return isinstance(a, int | float) and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    difference = getattr(a, "allclose", None)
    shape = getattr(a, "shape", None)
    return difference is not None and shape == getattr(b, "shape", None) and bool(difference(b, rtol=1e-4, atol=1e-5))


def _short(value: object) -> str:
    if (shape := getattr(value, "shape", None)) is not None and len(str(value)) > 60:
        return f"tensor{list(shape)}"
    return f"({', '.join(map(_short, value))})" if isinstance(value, tuple) else str(value)

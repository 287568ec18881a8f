"""A text that is shown while it is generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.data.tokenizer import Tokenizer

DECODED_TOKENS, OVERLAP_TOKENS = 256, 32
"""Of a text, at most so many new tokens are decoded at once, after some that were decoded before: what a token adds to
the text may depend on those before it."""


@dataclass
class ShownText:
    """The continuation of one prompt."""

    ids: list[int]
    tokenizer: Tokenizer
    random: torch.Generator
    start: int = 0
    """The first of the tokens that are decoded."""
    before: str = ""
    """What the decoded tokens begin with and was taken before."""
    held: str = ""
    """Text of earlier tokens that could not be shown yet."""
    shown: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.before = self.tokenizer.decode(self.ids)

    def show(self, stop: tuple[str, ...], last: bool) -> str:
        """The part of the text that can be shown now: not what may become a stop word or half a character."""
        text = self.held + self.tokenizer.decode(self.ids[self.start :]).removeprefix(self.before)
        piece = self._shown(text, stop, last)
        if len(self.ids) - self.start > DECODED_TOKENS and not text.endswith("\ufffd"):
            self.held, self.shown = text[self.shown :], 0
            self.start = len(self.ids) - OVERLAP_TOKENS
            self.before = self.tokenizer.decode(self.ids[self.start :])
        return piece

    def _shown(self, text: str, stop: tuple[str, ...], last: bool) -> str:
        cut = min((at for word in stop if (at := text.find(word)) >= 0), default=None)
        if cut is not None:
            self.done, text = True, text[:cut]
        elif not last:
            if text.endswith("\ufffd"):  # wait for the rest of a multi-byte character
                return ""
            text = text[: len(text) - max((len(word) - 1 for word in stop), default=0)]
        piece = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return piece

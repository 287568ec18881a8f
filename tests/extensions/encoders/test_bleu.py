"""BLEU equals that of sacrebleu 2.6."""

from __future__ import annotations

import pytest

from weft.extensions.encoders.bleu import corpus_bleu

FOUND = ["Datei &quot;a-1&quot; nicht gefunden: 3,5 von 10.", "Der Befehl %s ist unbekannt", "zu lang"]
WANTED = [
    "Die Datei &quot;a-1&quot; wurde nicht gefunden: 3,5 von 10.",
    "Unbekannter Befehl %s",
    "zu lang für dieses Feld",
]


def test_bleu() -> None:
    assert corpus_bleu(FOUND, WANTED) == pytest.approx(55.36242268718456)
    assert corpus_bleu(FOUND[1:2], WANTED[1:2]) == pytest.approx(30.213753973567677)  # no 4-gram matches
    assert corpus_bleu(WANTED, WANTED) == pytest.approx(100)
    assert corpus_bleu([""], ["a"]) == corpus_bleu(["a b c d"], ["e f g h"]) == 0

"""An encoder-decoder generates what transformers generates, one token after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.published import VOCAB, save_random

import weft
from weft.extensions.encoders.decoding_cache import DecodingCache
from weft.extensions.encoders.encoder_decoder import EncoderDecoder
from weft.extensions.encoders.translate import beam_search

LENGTH = 12
END = 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "t5 v1.1"])
def test_greedy_and_beams(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path)
    ours = weft.from_hf(str(tmp_path))
    assert isinstance(ours, EncoderDecoder)
    for seed in range(3):
        source = torch.randint(0, VOCAB, (1, 7), generator=torch.Generator().manual_seed(seed))
        for beams in (1, 2, 4):
            expected = theirs.generate(
                source, max_new_tokens=LENGTH, num_beams=beams, do_sample=False, use_cache=False
            )[0].tolist()[1:]
            with DecodingCache(ours, source, None) as cache:
                if beams > 1:
                    found = beam_search(cache, beams, LENGTH, frozenset([END]), VOCAB)
                else:
                    found = [0]
                    while len(found) <= LENGTH and found[-1] != END:
                        found.append(int(cache.logits(torch.tensor(found[-1:])).argmax()))
                    found = found[1:]
            assert found == expected
    again = ours(source, decoder_inputs=torch.tensor([[0, *found[:-1]]]))  # the model is as before
    assert again.shape == (1, len(found), VOCAB)

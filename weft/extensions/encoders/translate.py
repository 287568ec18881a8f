"""Texts from sources with an encoder-decoder, token by token or by beam search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.checkpoint.format import SavedCheckpoint
from weft.data.sources import open_tokenizer
from weft.data.task_records import text_tokens
from weft.data.tokenizer import Tokenizer
from weft.extensions.encoders.decoding_cache import DecodingCache
from weft.extensions.encoders.encoder_decoder import EncoderDecoder
from weft.job.schema import Job
from weft.training.export import load_model
from weft.training.generate import Sampling, end_tokens, pick_token

START = 0
"""The decoder's first token."""
Pick = Callable[[Tensor], int]
"""Chooses a token from its logits [vocab]."""


def translate_prompts(
    found: SavedCheckpoint, job: Job, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool, beams: int
) -> Iterator[tuple[int, str]]:
    """The outputs of a model of pairs for these sources."""
    model, tokenizer = load_model(found, job, ema), open_tokenizer(job.data)
    assert isinstance(model, EncoderDecoder)
    randoms = [torch.Generator().manual_seed((sampling.seed + i) % 2**63) for i in range(len(prompts))]
    return translate_texts(
        model, tokenizer, prompts, tokens, beams=beams, longest=job.data.seq_len,
        ends=end_tokens(job.model.pretrained) or frozenset([tokenizer.eos]),
        picks=[partial(pick_token, sampling=sampling, random=random) for random in randoms],
    )  # fmt: skip


@torch.no_grad()
def translate_texts(
    model: EncoderDecoder, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, *, beams: int, longest: int,
    ends: frozenset[int], picks: Sequence[Pick],
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Yield each generated text with the index of its prompt. `picks` choose the next token of each text, unless there
    are beams; a source is cut to its `longest` tokens."""
    for i, prompt in enumerate(prompts):
        source = torch.from_numpy(text_tokens(tokenizer, prompt, longest, "--prompt")).unsqueeze(0)
        with DecodingCache(model, source, None) as cache:
            if beams > 1:
                found = beam_search(cache, beams, tokens, ends, tokenizer.vocab)
            else:
                found = [START]
                while len(found) <= tokens and (len(found) == 1 or found[-1] not in ends):
                    logits = cache.logits(torch.tensor(found[-1:]))[0, : tokenizer.vocab]
                    found.append(picks[i](logits))
                found = found[1:]
        yield i, tokenizer.decode([t for t in found if t not in ends])


def beam_search(cache: DecodingCache, beams: int, tokens: int, ends: frozenset[int], vocab: int) -> list[int]:
    """The tokens with the largest mean log-likelihood that were found, at most `tokens` of them, with the end token.

    In each step the `beams` most likely texts go on. It ends when none of them can exceed the `beams` best that ended.
    """
    texts, scores = [[START]], torch.zeros(1)
    done: list[tuple[float, list[int]]] = []
    for length in range(1, tokens + 1):
        last = torch.tensor([text[-1] for text in texts])
        logits = cache.logits(last)[:, :vocab].log_softmax(-1) + scores.unsqueeze(1)
        best = logits.flatten().topk(min(2 * beams, logits.numel()))  # at least `beams` of them go on
        going: list[tuple[float, int, int]] = []
        for rank, (score, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            row, token = divmod(place, logits.shape[1])
            if token not in ends:
                going.append((score, row, token))
            elif rank < beams:
                done.append((score / length, [*texts[row], token]))
        going = going[:beams]
        done = sorted(done, key=lambda each: -each[0])[:beams]
        if not going or (len(done) == beams and going[0][0] / length < done[-1][0]):
            going = []
            break
        texts = [[*texts[row], token] for _, row, token in going]
        scores = torch.tensor([score for score, _, _ in going])
        cache.keep(torch.tensor([row for _, row, _ in going]))
    done += [(score / tokens, text) for text, (score, _, _) in zip(texts, going, strict=False)]
    return max(done, key=lambda each: each[0])[1][1:]

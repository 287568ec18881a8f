"""Generates text from a checkpoint, token by token, for several prompts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.checkpoint.format import SavedCheckpoint
from weft.data.sources import open_tokenizer
from weft.data.tokenizer import Tokenizer
from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.job.interchange import read_published
from weft.job.schema import Job
from weft.training.export import load_model
from weft.training.generation.next_logits import NextLogits
from weft.training.generation.shown_text import ShownText


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and where a text ends."""

    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int = 0
    """Sample from so many tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this probability together."""
    stop: tuple[str, ...] = ()
    """Texts before which generation ends."""
    seed: int = 0


def generate(
    found: SavedCheckpoint, job: Job, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool = False,
    beams: int = 1,
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Yield the generated texts in parts, each with the index of its prompt, without the prompts. `job` is the
    checkpoint's saved_job(); beam search is for an encoder-decoder."""
    structure = job.model.structure
    function = structure.generate if structure is not None and not job.model.module else ""
    if not function:
        raise JobError(f"only a language model can generate; this run trains {job.model.module or job.model.family}")
    parts: Iterator[tuple[int, str]] = find_object(function, "model.family")(
        found, job, prompts, tokens, sampling, ema, beams
    )
    return parts


def continue_prompts(
    found: SavedCheckpoint, job: Job, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool, beams: int
) -> Iterator[tuple[int, str]]:
    """Continue texts with a decoder."""
    if beams > 1:
        raise JobError(
            f"--beams searches translations, and model.family={job.model.family} continues texts; leave it out"
        )
    return continue_texts(
        load_model(found, job, ema), open_tokenizer(job.data), prompts, tokens, sampling,
        window=job.model.max_len or job.data.seq_len, end_tokens=end_tokens(job.model.pretrained),
    )  # fmt: skip


def end_tokens(pretrained: str | None) -> frozenset[int]:
    """The tokens that end a text of a published model."""
    return read_published(pretrained, "end_tokens") if pretrained else frozenset()


def continue_texts(
    model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, sampling: Sampling, *,
    window: int, end_tokens: frozenset[int] = frozenset(),
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Continue several prompts together; each draws its own random numbers, so others do not change its text."""
    encoded = [[int(t) for t in tokenizer.encode_prompt(prompt)] for prompt in prompts]
    return continue_tokens(model, tokenizer, encoded, tokens, sampling, window=window, end_tokens=end_tokens)


@torch.no_grad()
def continue_tokens(
    model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[list[int]], tokens: int, sampling: Sampling, *,
    window: int, end_tokens: frozenset[int] = frozenset(), numbers: Sequence[int] | None = None,
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """The same of prompts that are tokens. `numbers` choose each prompt's random numbers, by default its position."""
    texts = []
    numbers = range(len(prompts)) if numbers is None else numbers
    for number, prompt in zip(numbers, prompts, strict=True):
        ids = list(prompt) or [tokenizer.eos]
        if max(ids) >= (rows := _embedded(model)):
            raise JobError(
                f"token {max(ids)} of the prompt is not among the {rows} of the model; its tokenizer has "
                f"{tokenizer.vocab}: import the model with its tokenizer.json"
            )
        texts.append(ShownText(ids, tokenizer, torch.Generator().manual_seed((sampling.seed + number) % 2**63)))
    with NextLogits(model, window) as next_logits:
        for count in range(1, tokens + 1):
            going = [(i, text) for i, text in enumerate(texts) if not text.done]
            if not going:
                return
            logits = next_logits({i: text.ids for i, text in going})[:, : tokenizer.vocab]
            for (i, text), scores in zip(going, logits, strict=True):
                token = pick_token(scores, sampling, text.random)
                text.done = token in end_tokens
                if not text.done:
                    text.ids.append(token)
                last = text.done or count == tokens
                if piece := text.show(sampling.stop, last):
                    yield i, piece


def _embedded(model: nn.Module) -> int:
    """Tokens that a model can read."""
    found: int = getattr(getattr(model, "embed", None), "num_embeddings", 2**63)
    return found


def pick_token(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """Choose a token from its logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k:
        floor = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    shares = (logits / sampling.temperature).softmax(0)
    if sampling.top_p < 1:
        ordered, order = shares.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        shares[order[1:][before[1:] >= sampling.top_p]] = 0  # the most likely token always stays
    return int(torch.multinomial(shares, 1, generator=random))

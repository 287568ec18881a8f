"""Generates text from a checkpoint, token by token, for several prompts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from weft.checkpoint.format import SavedCheckpoint
from weft.data.dataset import open_tokenizer
from weft.data.tokenizer import Tokenizer
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.models.encoder_decoder import EncoderDecoder
from weft.models.key_value_cache import KeyValueCache
from weft.pretrained.folder import CONFIG, GENERATION_CONFIG, existing_folder, read_json
from weft.training.export import load_model
from weft.training.translate import translate_texts


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
    if job.model.is_encoder_decoder:
        return _translate(found, job, prompts, tokens, sampling, ema, beams)
    if beams > 1:
        raise JobError(
            f"--beams searches translations, and model.family={job.model.family} continues texts; leave it out"
        )
    if not job.model.is_decoder:
        raise JobError(f"only a language model can generate; this run trains {job.model.module or job.model.family}")
    return continue_texts(
        load_model(found, job, ema), open_tokenizer(job.data), prompts, tokens, sampling,
        window=job.model.max_len or job.data.seq_len, end_tokens=end_tokens(job.model.pretrained),
    )  # fmt: skip


def _translate(
    found: SavedCheckpoint, job: Job, prompts: Sequence[str], tokens: int, sampling: Sampling, ema: bool, beams: int
) -> Iterator[tuple[int, str]]:
    model, tokenizer = load_model(found, job, ema), open_tokenizer(job.data)
    assert isinstance(model, EncoderDecoder)
    randoms = [torch.Generator().manual_seed((sampling.seed + i) % 2**63) for i in range(len(prompts))]
    return translate_texts(
        model, tokenizer, prompts, tokens, beams=beams, longest=job.data.seq_len,
        ends=end_tokens(job.model.pretrained) or frozenset([tokenizer.eos]),
        picks=[partial(pick_token, sampling=sampling, random=random) for random in randoms],
    )  # fmt: skip


def end_tokens(pretrained: str | None) -> frozenset[int]:
    """The end tokens of a published model, from its configs."""
    folder = existing_folder(pretrained)
    for name in (GENERATION_CONFIG, CONFIG) if folder else ():
        path = (folder or Path()) / name
        if path.is_file():
            ids = read_json(path).get("eos_token_id")
            known = [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]
            if known:
                return frozenset(known)
    return frozenset()


@dataclass
class _Text:
    """The continuation of one prompt."""

    ids: list[int]
    prompt: str
    """The prompt as its tokens are decoded."""
    random: torch.Generator
    shown: int = 0
    done: bool = False

    def show(self, text: str, stop: tuple[str, ...], last: bool) -> str:
        """The part of the text that can be shown now: not what may become a stop word or half a character."""
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


@torch.no_grad()
def continue_texts(
    model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, sampling: Sampling, *,
    window: int, end_tokens: frozenset[int] = frozenset(),
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """Continue several prompts together; each draws its own random numbers, so others do not change its text."""
    texts = []
    for i, prompt in enumerate(prompts):
        ids = [int(t) for t in tokenizer.encode_prompt(prompt)] or [tokenizer.eos]
        texts.append(_Text(ids, tokenizer.decode(ids), torch.Generator().manual_seed((sampling.seed + i) % 2**63)))
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
                if piece := text.show(tokenizer.decode(text.ids).removeprefix(text.prompt), sampling.stop, last):
                    yield i, piece


class NextLogits:
    """Logits of the token after each text. Earlier tokens are computed once, until the texts exceed the window."""

    def __init__(self, model: nn.Module, window: int):
        self.model, self.window = model, window
        self.cache: KeyValueCache | None = None
        self.cached: list[int] = []
        """The texts in the cache."""
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __call__(self, texts: dict[int, list[int]]) -> Tensor:
        """Logits [texts, vocab] of the token after each text, by its number; a text is as before with one token more,
        or new in the first call."""
        rows = [ids[-self.window :] for ids in texts.values()]
        longest = max(map(len, rows))
        if not KeyValueCache.applies_to(self.model) or max(map(len, texts.values())) > self.window:
            self.stack.close()
            return whole_logits(self.model, rows, longest)
        if self.cache is None:
            pads = torch.tensor([longest - len(row) for row in rows])
            self.cache, self.cached = self.stack.enter_context(KeyValueCache(self.model, pads)), list(texts)
            return self.cache.logits(_padded(rows, longest))
        if self.cached != list(texts):
            self.cache.keep([self.cached.index(i) for i in texts])
            self.cached = list(texts)
        return self.cache.logits(torch.tensor([row[-1:] for row in rows]))


def _padded(rows: list[list[int]], longest: int) -> Tensor:
    return torch.tensor([[0] * (longest - len(row)) + row for row in rows])


def whole_logits(model: nn.Module, rows: list[list[int]], longest: int) -> Tensor:
    """Logits of the token after each row [rows, vocab]; shorter rows are padded at their beginning."""
    pads = torch.tensor([longest - len(row) for row in rows])
    inputs = _padded(rows, longest)
    if not pads.any():
        return model(inputs)[:, -1].float()
    place = torch.arange(longest) - pads.unsqueeze(1)
    return model(inputs, docs=(place >= 0).long(), positions=place.clamp(min=0))[:, -1].float()


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

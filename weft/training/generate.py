"""Generates text from a checkpoint, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.checkpoint.format import SavedCheckpoint
from weft.data.dataset import open_tokenizer
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.training.export import load_model


@torch.no_grad()
def generate(
    found: SavedCheckpoint, job: Job, prompt: str, tokens: int, *, temperature: float = 0.8, top_k: int = 0,
    seed: int = 0, ema: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Yield the generated text in parts, without the prompt. `job` is the checkpoint's saved_job(). Temperature 0
    always takes the likeliest token."""
    if not job.model.is_decoder:
        raise JobError(f"only a language model can generate; this run trains {job.model.module or job.model.family}")
    model = load_model(found, job, ema)
    tokenizer = open_tokenizer(job.data)
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eos]
    window = job.model.max_len or job.data.seq_len
    random = torch.Generator().manual_seed(seed)
    shown = ""
    start = len(ids)
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-window:]]))[0, -1].float()
        ids.append(_pick(logits[: tokenizer.vocab], temperature, top_k, random))
        text = tokenizer.decode(ids[start:])
        if not text.endswith("\ufffd"):  # wait for the rest of a multi-byte character
            yield text[len(shown) :]
            shown = text


def _pick(logits: torch.Tensor, temperature: float, top_k: int, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        floor = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=random))

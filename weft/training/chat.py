"""A conversation with a language model, by the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from torch import nn

from weft.checkpoint.format import SavedCheckpoint
from weft.data.chat.conversations import ConversationEncoder
from weft.data.chat.template import ChatTemplate, Message, load_template
from weft.data.sources import open_tokenizer
from weft.data.tokenizer import Tokenizer
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.training.export import load_model, tokenizer_file
from weft.training.generate import Sampling, continue_tokens, end_tokens

ANSWER = "\u0394"
"""Content of an answer by which its end in a template is found."""


class Chat:
    """A model, its chat template, and the messages so far."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, template: ChatTemplate, *, window: int, tokens: int,
        sampling: Sampling, ends: frozenset[int] = frozenset(), system: str | None = None,
    ):  # fmt: skip
        self.model, self.window, self.tokens = model, window, tokens
        self.encoder = ConversationEncoder(tokenizer, template)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        turn_ends, stop = end_of_turn(self.encoder)
        self.ends = ends | turn_ends | {tokenizer.eos}
        self.sampling = replace(sampling, stop=(*sampling.stop, *stop))

    @classmethod
    def open(
        cls, found: SavedCheckpoint, job: Job, tokens: int, sampling: Sampling, *,
        ema: bool = False, template: str | None = None, system: str | None = None,
    ) -> Self:  # fmt: skip
        """A conversation with the model of a checkpoint. `template` is chatml, plain or a .jinja file, instead of that
        of the job or its tokenizer."""
        if job.model.module or not job.model.continues_text:
            what = job.model.module or f"model.family={job.model.family}"
            raise JobError(f"--chat needs a decoder of tokens, and this run trains {what}")
        encoder = open_template(job, template)
        return cls(
            load_model(found, job, ema), encoder.tokenizer, encoder.template,
            window=job.model.max_len or job.data.seq_len, tokens=tokens,
            sampling=sampling, ends=end_tokens(job.model.pretrained), system=system,
        )  # fmt: skip

    def answer(self, question: str) -> Iterator[str]:
        """Yield the parts of the answer to a question; both are then part of the conversation."""
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = self.encoder.encode_prompt(asked)
        parts = list[str]()
        for _, part in continue_tokens(
            self.model, self.encoder.tokenizer, [prompt], self.tokens, self.sampling, window=self.window,
            end_tokens=self.ends,
        ):  # fmt: skip
            part = part if parts else part.lstrip()
            if part:
                parts.append(part)
                yield part
        self.messages = [*asked, {"role": "assistant", "content": "".join(parts).rstrip()}]


def open_template(job: Job, template: str | None) -> ConversationEncoder:
    """The tokenizer of a job with the chat template that was given, else with that of the job or the tokenizer."""
    tokenizer, file = open_tokenizer(job.data), tokenizer_file(job)
    eos = tokenizer.decode_special(tokenizer.eos)
    try:
        chosen = load_template(str(file or "bytes"), template or job.data.template, eos)
    except JobError as error:
        raise JobError(
            str(error)
            .replace("data.template=", "--template ")
            .replace("data.template ", "--template ")
            .replace("write ", "give ")
        ) from None
    return ConversationEncoder(tokenizer, chosen)


def end_of_turn(encoder: ConversationEncoder) -> tuple[frozenset[int], tuple[str, ...]]:
    """What a template writes after an answer: the special token that ends it, or the text where it is not one token."""
    asked: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    text = encoder.template.render(asked)
    ending = text[text.rfind(ANSWER) + 1 :].strip() if ANSWER in text else ""
    if not ending:
        return frozenset(), ()
    tokens, line = encoder.tokens_of(ending), ending.splitlines()[0]
    if encoder.tokenizer.decode(tokens).strip().startswith(line):  # special tokens are not decoded
        return frozenset(), (line,)
    return frozenset(tokens[:1]), ()

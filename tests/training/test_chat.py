"""Conversations with a model: turns, the tokenizer's template, and where an answer ends."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.command import Output

from weft.data.chat.template import load_template
from weft.data.tokenizer import load_tokenizer
from weft.extensions.pretrained.reader import from_hf
from weft.training.chat import Chat
from weft.training.generate import Sampling

STORIES = Path(__file__).parents[2] / "recipes" / "stories260K"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_turns_from_prompts_and_lines(
    tmp_path: Path, in_process: Callable[..., Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each --prompt is a turn, and so is each line without one; the template is the tokenizer's or --template."""
    shutil.copytree(STORIES, tmp_path / "published")
    (tmp_path / "published" / "chat_template.jinja").write_text(CHATML)
    assert in_process(tmp_path, "import", "published").code == 0
    greedy = ("--temperature", "0", "--tokens", "20")
    asked = ("--prompt", "Once upon a time", "--prompt", "And then?", "--system", "Tell stories.")
    done = in_process(tmp_path, "generate", "published", "--chat", *greedy, *asked, "--json")
    messages = json.loads(done.out)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n\nAnd then?\n"))
    lines = in_process(tmp_path, "generate", "published", "--chat", *greedy, "--system", "Tell stories.")
    assert lines.out.strip() == f"{messages[2]['content']}\n{messages[4]['content']}".strip()
    plain = in_process(tmp_path, "generate", "published", "--chat", "--template", "plain", *greedy, "--prompt", "Once")
    assert plain.code == 0 and plain.out.strip()
    for options, text in {
        ("--chat", "--template", "no.jinja", "--prompt", "a"): "--template 'no.jinja': no such file",
        ("--chat", "--beams", "2"): "--chat samples answers, and --beams searches translations",
        ("--system", "x"): "--system is for --chat",
    }.items():
        wrong = in_process(tmp_path, "generate", "published", *options)
        assert wrong.code == 2 and text in wrong.err


@pytest.mark.parametrize("special", [True, False])
def test_an_answer_ends_where_the_template_ends_it(special: bool, tmp_path: Path) -> None:
    """The special token after an answer ends it; where that is several tokens, their text does."""
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    if special:
        inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    template = load_template(str(tmp_path / "tokenizer.json"), None, "</s>")
    model = from_hf(str(STORIES))
    chat = Chat(model, tokenizer, template, window=512, tokens=5, sampling=Sampling(0.0))
    if special:
        assert inner.token_to_id("<|im_end|>") in chat.ends and not chat.sampling.stop
        asked = chat.encoder.encode_prompt([{"role": "user", "content": "Hi"}])
        assert asked.count(inner.token_to_id("<|im_start|>") or 0) == 2, "the template's tokens are special ones"
    else:
        assert chat.sampling.stop == ("<|im_end|>",)
        assert "".join(chat.answer("Once upon a time")).strip() == chat.messages[-1]["content"]

"""Conversations: templates, the mask of answers, packing, and what hostile templates can do."""

from __future__ import annotations

import copy
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.build_store import build
from weft.data.chat import render_process
from weft.data.chat.conversations import ConversationEncoder, messages_of
from weft.data.chat.packed_documents import pack
from weft.data.chat.template import BUILT_IN, ChatTemplate, load_template
from weft.data.open_dataset import open_dataset
from weft.data.store import open_store
from weft.data.tokenizer import ByteTokenizer
from weft.job import JobError, parse_job
from weft.job.shapes import resolve

TALK = [
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello ä"},
    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you"},
]  # fmt: skip


def answers(template: ChatTemplate, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The whole text, and the text of its masked tokens."""
    tokens, mask = ConversationEncoder(ByteTokenizer(), template).encode(messages)
    return bytes(tokens).decode(), bytes(tokens[mask > 0]).decode()


def test_answers_are_masked() -> None:
    text, found = answers(ChatTemplate(BUILT_IN["chatml"], "", {}), TALK)
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK) + "\0"
    assert found == "Hello ä<|im_end|>\nSee you<|im_end|>\n\0"
    # a template that drops earlier answers' first letter, as some drop thoughts: only contents are found
    strange = "{% for m in messages %}{{ m.content if loop.last else m.content[1:] }}|{% endfor %}"
    assert answers(ChatTemplate(strange, "", {}), TALK) == ("i|ello ä|ye|See you|\0", "See you\0")
    assert answers(ChatTemplate(BUILT_IN["plain"], "", {"eos_token": "\0"}), TALK)[1] == "Hello ä\0See you\0"


@pytest.mark.parametrize(
    ("format", "record", "expected"),
    [
        ("chat", {"messages": TALK}, TALK),
        ("chat", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, None),
        ("instruction", {"instruction": "a", "input": "", "output": "b"}, None),
        ("instruction", {"prompt": "a", "completion": "b"}, None),
        ("chat", {"text": "a"}, "has no messages or conversations (it has text)"),
        ("chat", {"messages": [{"role": "user", "content": "a"}]}, "no message of the role assistant"),
        (
            "chat",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": "b"},
                ]
            },
            None,
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]},
            "without role and content as text",
        ),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, "without role and content as text"),
        ("chat", {"messages": "a"}, "not a list of messages"),
        ("instruction", {"instruction": "a"}, "has no instruction or prompt or question with output"),
    ],
)
def test_records_become_messages(format: str, record: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected.replace("(", r"\(").replace(")", r"\)")):
            messages_of(record, format)
    else:
        short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        found = [{k: m[k] for k in ("role", "content")} for m in messages_of(record, format)]
        assert found == (expected or short)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__class__.__base__ }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__['sys'].exit() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for", "is not valid"),
        ("{% for a in messages %}" * 25 + "{% endfor %}" * 25, "is not valid: too many statically nested blocks"),
        ("{% if messages %}" * 120 + "{% endif %}" * 120, "is not valid: too many levels of indentation"),
        ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "is not valid"),
        ("{{ raise_exception('not today') }}", "failed: not today"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed: maximum recursion depth"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{{ 9 ** (9 ** 9) }}", "CPU time"),
        ("{{ (7 ** 9999999) % 10 }}", "CPU time"),
        ("{{ ('word ' * 9999999)|wordwrap(1) }}", "CPU time|memory"),
        ("{{ messages|batch(2 ** 40, 'x')|list }}", "memory"),
        ("{{ 'a' * 10 ** 12 }}", "memory"),
        ("{{ 'a'.center(10 ** 12) }}", "memory"),
        ("{{ 'a'.ljust(10 ** 12) }}", "memory"),
        ("{{ 'a'.zfill(10 ** 12) }}", "memory"),
        ("{{ 'a'|center(10 ** 12) }}", "memory"),
        ("{{ '%9999999999d' % 1 }}", "memory"),
        ("{{ '{:9999999999}'.format(1) }}", "memory"),
        ("{{ (1).to_bytes(10 ** 12) }}", "memory"),
        ("{{ messages|tojson(indent=10 ** 12) }}", "memory"),
        ("{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}", "memory"),
        ("{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}", "memory"),
        ("{{ 'a' * 200 }}{% for a in range(2000) %}{{ 'b' * 99 }}{% endfor %}", "writes more than 100,000 characters"),
    ],
)  # fmt: skip
def test_hostile_templates_end_in_a_sentence(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Filling the memory takes a slow machine a second, so only the templates that compute are stopped early.
    monkeypatch.setattr(render_process, "MAX_CPU_S", 0.3 if message.startswith("CPU time") else 10)
    monkeypatch.setattr(render_process, "MAX_OUTPUT", 100_000)
    monkeypatch.setattr(render_process, "MAX_MEMORY_BYTES", 1 << 28)
    template = ChatTemplate(source, "it", {})
    for _ in range(2):  # the second conversation finds a process as well
        with pytest.raises(JobError, match=rf"^the chat template of it .*({message})") as caught:
            template.render(TALK)
        assert "\n" not in str(caught.value)


def test_a_template_survives_forks_copies_and_the_end_of_its_process() -> None:
    template = ChatTemplate(BUILT_IN["chatml"], "it", {})
    text = template.render(TALK)
    assert copy.deepcopy(template).render(TALK) == text
    child = os.fork()
    if child == 0:
        os._exit(int(template.render(TALK) != text))
    assert os.waitpid(child, 0)[1] == 0
    odd = [
        {"role": "user", "content": "\ud800 \u2028 \0"},
        {"role": "assistant", "content": "b", "at": date(2024, 2, 3)},
    ]
    assert template.render(odd).count("\ud800 \u2028 \0") == 1
    process = template._process._process
    assert process is not None
    process.kill()
    with pytest.raises(JobError, match=r"ended the process that renders it \(exit code -9\)"):
        template.render(TALK)
    assert template.render(TALK) == text
    second = template._process._process
    del template
    assert process.poll() is not None and second is not None and second.poll() is not None


def test_the_tokenizers_own_template_is_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(JobError, match=r"has no chat template; write data.template=chatml"):
        load_template(str(tmp_path / "tokenizer.json"), None, "<e>")
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(str(tmp_path), None, "<e>").render(TALK) == "<b>Hi"
    (tmp_path / "chat_template.jinja").write_text("{{ messages|length }}{{ eos_token }}")
    assert load_template(str(tmp_path), None, "<e>").render(TALK) == "4<e>"
    os.mkfifo(tmp_path / "pipe.jinja")
    for name in ("none.jinja", str(tmp_path / "pipe.jinja")):
        with pytest.raises(JobError, match="no such file"):
            load_template(str(tmp_path), name, "<e>")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_packing_keeps_every_document_once(lengths: list[int], size: int) -> None:
    groups = pack(np.array(lengths), size)
    assert sorted(doc for group in groups for doc in group) == list(range(len(lengths)))
    assert all(sum(lengths[doc] for doc in group) <= size for group in groups)
    assert len(groups) <= -(-2 * sum(lengths) // size) + 1


def test_packed_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job reads a file of conversations; every answer is a target once, and documents do not mix."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    talks = [[{"role": "user", "content": "q" * i}, {"role": "assistant", "content": "a" * i}] for i in range(1, 12)]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    data = {"source": str(file), "format": "chat", "template": "plain", "seq_len": 32, "val_fraction": 0.2}
    job = resolve(parse_job({"data": data}))
    dataset = open_dataset(job)
    assert dataset.val_len >= 1
    samples = [dataset.train(i) for i in range(dataset.train_len)] + [dataset.val(i) for i in range(dataset.val_len)]
    targets = sum(int(s["valid"].sum()) for s in samples)
    assert targets == sum(i + 1 for i in range(1, 12))  # with the end token of each
    for s in samples:
        assert set(bytes(s["targets"][s["valid"]].astype(np.uint8)).decode()) <= {"a", "\0"}
        starts = np.flatnonzero(np.diff(s["docs"], prepend=-1))
        assert (s["positions"][starts] == 0).all()
        assert (np.diff(s["positions"])[np.diff(s["docs"]) == 0] == 1).all()
    assert len(samples) < 11
    one = open_dataset(parse_job({"data": data | {"packing": False, "answers_only": False}}))
    assert one.train_len + one.val_len == 11
    assert len(list((tmp_path / "cache" / "weft" / "tokens").glob("*/meta.json"))) == 1
    with pytest.raises(JobError, match="no answer in the first 1 tokens"):
        open_dataset(parse_job({"data": data | {"seq_len": 1}}))


def test_a_store_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"instruction": "2 + 2?", "output": "4"}) + "\n")
    build(file, tmp_path / "store", format="instruction", template="plain")
    store = open_store(tmp_path / "store")
    assert store.mask is not None
    assert bytes(store.tokens[:]) == b"2 + 2?\n4\0" and list(store.mask[:]) == [0] * 7 + [1, 1]
    file.write_text(json.dumps({"instruction": "2 + 2?"}) + "\n")
    with pytest.raises(JobError, match=r"talks.jsonl line 1 has no instruction"):
        build(file, tmp_path / "other", format="instruction", template="plain")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(JobError, match="has no records, which the format chat needs"):
        build(tmp_path / "a.txt", tmp_path / "other", format="chat", template="plain")

"""stories260K, a real pretrained Llama, writes its known text after import, after a round trip and under tp 2.

Its weights are MIT-licensed (Andrej Karpathy's tinyllamas, the llama2.c project).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_ranks
from helpers.command import Output
from helpers.command import weft as forked_command
from helpers.published import CONFIGS, save_config

import weft
from weft.job.load import load_job
from weft.launch.rank_pool import RankPool
from weft.training.generate import Sampling, continue_texts, pick_token

STORIES = Path(__file__).parents[3] / "recipes" / "stories260K"
KNOWN = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
GREEDY = ("--prompt", "", "--temperature", "0", "--tokens", "36")

Weft = Callable[..., str]


@pytest.fixture
def command(tmp_path: Path, in_process: Callable[..., Output]) -> Weft:
    """Runs a command in this process and returns what it printed."""

    def run(*args: str) -> str:
        done = in_process(tmp_path, *args)
        assert done.code == 0, done.err
        return done.out

    return run


def as_llama2c(path: Path) -> None:
    """Replace a tokenizer.json by a tok512.bin, as llama2.c has it."""
    vocab = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = [token.replace("▁", " ").encode() for token in sorted(vocab, key=vocab.__getitem__)]
    tokens[1:3] = [b"\n<s>\n", b"\n</s>\n"]
    content = b"".join(struct.pack("<fi", -n, len(token)) + token for n, token in enumerate(tokens))
    path.with_name("tok512.bin").write_bytes(struct.pack("<i", 7) + content)
    path.unlink()


def test_known_text_after_import_and_round_trip(command: Weft, tmp_path: Path) -> None:
    command("import", str(STORIES), "--name", "stories")
    assert command("generate", "stories", *GREEDY).startswith(KNOWN)
    command("export", "stories", "--to", "hf", "--out", "again", "--shard-size", "300KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) == 4
    assert "| parameters | 260,032 |" in (tmp_path / "again" / "README.md").read_text()
    as_llama2c(tmp_path / "again" / "tokenizer.json")
    command("import", "again")
    assert command("generate", "again", *GREEDY).startswith(KNOWN)
    assert (tmp_path / "runs/again/pretrained/tokenizer.json").is_file()
    command("export", "again", "--to", "torch")
    model = weft.from_hf(str(STORIES))  # type: ignore[attr-defined]
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # both names of the tied weight
    assert set(torch.load("runs/again/model.pt", weights_only=True)) == named


def test_exports_replace_only_exports(command: Weft, in_process: Callable[..., Output], tmp_path: Path) -> None:
    command("import", str(STORIES), "--name", "stories")
    again = in_process(tmp_path, "import", str(STORIES), "--name", "stories")
    assert again.code == 2 and "runs/stories exists; give the imported run another --name" in again.err
    mine = tmp_path / "mine"
    mine.mkdir()
    kept = {"README.md": "my own", "model-00001-of-00002.safetensors": "a", "model.safetensors.index.json": "{}"}
    for name, text in kept.items():
        (mine / name).write_text(text)
    for to, out, message in (
        ("hf", "mine", "mine holds other files; name a new folder such as my-model"),
        ("safetensors", "mine/model.safetensors", "was not written by weft export; name another --out"),
    ):
        refused = in_process(tmp_path, "export", "stories", "--to", to, "--out", out)
        assert refused.code == 2 and message in refused.err
    assert {path.name: path.read_text() for path in mine.iterdir()} == kept
    for size, files in (("300KB", 4), ("2GB", 1), ("600KB", 2)):
        command("export", "stories", "--to", "hf", "--out", "out", "--shard-size", size)
        assert len(list((tmp_path / "out").glob("*.safetensors"))) == files
        assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (files > 1)


def test_batch_of_prompts_with_stop_words(command: Weft) -> None:
    """Several prompts give the texts that each gives alone; a text ends before a stop word."""
    command("import", str(STORIES), "--name", "stories")
    greedy = ("--temperature", "0", "--tokens", "30", "--stop", "play", "--json")
    prompts = ["Once upon a time", "The dog"]
    both = json.loads(command("generate", "stories", "--prompt", prompts[0], "--prompt", prompts[1], *greedy))
    assert both["texts"][0]["text"] == ", there was a little girl named Lily. She loved to "
    for made, prompt in zip(both["texts"], prompts, strict=True):
        alone = json.loads(command("generate", "stories", "--prompt", prompt, *greedy))
        assert made == {"prompt": prompt, "text": alone["text"]}
    shown = command("generate", "stories", "--prompt", prompts[0], "--prompt", prompts[1], *greedy[:-1])
    assert shown == "".join(
        (made["prompt"] + made["text"]).join(("\n" * i, "\n")) for i, made in enumerate(both["texts"])
    )


def test_known_text_under_tensor_parallelism(world: Any, tmp_path: Path) -> None:
    ids = world(2)(published_ranks.greedy, str(STORIES), 24)
    model = weft.from_hf(str(STORIES))  # type: ignore[attr-defined]
    expected = [1]
    with torch.no_grad():
        for _ in range(24):
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
    assert ids == [expected, expected]


def test_generation_by_several_processes(
    command: Weft, pool: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: Callable[..., Output]
) -> None:
    """The texts of one process, also of a model with one key and value head, and of sampled tokens."""
    monkeypatch.setattr("weft.launch.start_generation.RankPool", lambda timeout_s: nullcontext(pool))
    command("import", str(STORIES), "--name", "stories")
    assert command("generate", "stories", *GREEDY, "--tp", "2").startswith(KNOWN)
    config = CONFIGS["gemma3_text"]()
    save_config(config, tmp_path / "small")
    command("import", "small", "--name", "small")
    refused = in_process(tmp_path, "generate", "small", "--prompt", "a")
    assert refused.code == 2 and "token 97 of the prompt is not among the 53 of the model" in refused.err
    config.vocab_size = 260
    save_config(config, tmp_path / "gemma")
    command("import", "gemma", "--name", "gemma")
    sampled = ("--prompt", "a", "--prompt", "bc", "--tokens", "8", "--top-p", "0.9", "--json")
    assert command("generate", "gemma", *sampled, "--tp", "2") == command("generate", "gemma", *sampled)
    refused = in_process(tmp_path, "generate", "stories", "--tp", "3")
    assert refused.code == 2 and "parallel.tp=3 does not divide model.heads=8" in refused.err


def test_training_continues_from_an_imported_run(command: Weft, tmp_path: Path) -> None:
    """The first loss of an imported run is that of a trained model, and it resumes from its own checkpoints."""
    command("import", str(STORIES), "--name", "stories")
    assert load_job("runs/stories/job.yaml").model.pretrained == "runs/stories/pretrained"
    changes = (
        "data.seq_len=32", "train.global_batch=2", "checkpoint.every=2", "data.source=synthetic", "cluster.device=cpu",
    )  # fmt: skip
    for steps in (2, 3):
        words = ("runs/stories/job.yaml", f"train.steps={steps}", *changes, "--no-resilient", "-n", "1")
        assert forked_command(tmp_path, "train", *words).code == 0
    records = [json.loads(line) for line in Path("runs/stories/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3]
    events = [json.loads(line) for line in Path("runs/stories/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resume"] == [2]


def test_top_p_keeps_the_likeliest_tokens() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    random = torch.Generator().manual_seed(0)
    for top_p, possible in ((0.0, {0}), (0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampling = Sampling(temperature=1.0, top_p=top_p)
        assert {pick_token(logits, sampling, random) for _ in range(200)} == possible


class Letters:
    """A tokenizer of letters."""

    vocab, eos = 4, 3

    def encode(self, text: str) -> list[int]:
        return ["abc".index(c) for c in text]

    encode_prompt = encode

    def decode(self, ids: list[int]) -> str:
        return "".join("abc"[i] for i in ids)


def test_end_tokens_and_held_back_stop_words() -> None:
    """A text ends at an end token, and what may become a stop word is held back until it is clear."""
    script = iter([0, 1, 0, 2, 3])

    def model(inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = torch.zeros(1, inputs.shape[1], 4)
        logits[0, -1, next(script)] = 1
        return logits

    made = continue_texts(
        model,
        Letters(),
        ["c"],
        9,
        Sampling(0, stop=("aba!",)),
        window=8,
        end_tokens=frozenset({3}),  # type: ignore[arg-type]
    )
    assert [piece for _, piece in made] == ["a", "bac"]

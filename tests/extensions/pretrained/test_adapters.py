"""Adapters are written in the format of PEFT, which loads and merges them to the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import command
from helpers.command import Output
from helpers.lazy_module import LazyModule
from helpers.published import VOCAB, save_random, transformers
from torch import nn

import weft
from weft.extensions.pretrained.adapters import merged, write_adapters
from weft.job import parse_job
from weft.job.shapes import resolve
from weft.models.lora import add_adapters

peft: Any = LazyModule("peft")
STORIES = Path(__file__).parents[3] / "recipes" / "stories260K"
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def adapted_model(folder: Path, **lora: Any) -> tuple[nn.Module, Any]:
    """A published model with random adapters, and its section of a job."""
    data = {"source": "synthetic", "seq_len": 16}
    section = resolve(
        parse_job({"model": {"pretrained": str(folder), "lora": {"rank": 2, **lora}}, "data": data})
    ).model
    module = weft.from_hf(str(folder))
    add_adapters(module, section.lora, section.experts is not None)
    torch.manual_seed(3)
    for name, param in module.named_parameters():
        if ".lora." in name:
            nn.init.normal_(param, std=0.3)
    return module.eval(), section


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama with every option", "all"), ("gpt2", "q,v,up"), ("phi3", "all"), ("gpt_neox", "k,v,o"),
        ("deepseek_v3", "all"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_peft_loads_the_adapters(name: str, targets: str, tmp_path: Path) -> None:
    save_random(name, tmp_path / "base")
    module, section = adapted_model(tmp_path / "base", targets=targets)
    expected = module(TOKENS)
    params = dict(module.named_parameters())
    original = json.loads((tmp_path / "base" / "config.json").read_text())
    write_adapters(tmp_path / "out", section, params.__getitem__, set(params), original=original, base="base", card="")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (base(TOKENS).logits - expected).abs().max() > 1e-2
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert (loaded(TOKENS).logits - expected).abs().max() < 1e-4
    assert (loaded.merge_and_unload()(TOKENS).logits - expected).abs().max() < 1e-4
    plain = weft.from_hf(str(tmp_path / "base"))
    values = {n: merged(n, section.lora, params.__getitem__, set(params)) for n, _ in plain.named_parameters()}
    plain.load_state_dict(values, strict=False)
    assert (plain(TOKENS) - expected).abs().max() < 1e-4


def test_a_lora_run_is_exported(in_process: Callable[..., Output], tmp_path: Path) -> None:
    """The run trains only adapters, resumes, and is exported as adapters and as a merged model that agree."""
    job = tmp_path / "job.yaml"
    job.write_text(
        f"name: lora\nmodel: {{pretrained: {STORIES}, lora: {{rank: 4, targets: [q, v]}}}}\n"
        "data: {source: docstrings, template: plain, seq_len: 64}\ntrain: {steps: 2, global_batch: 4}\n"
        "optim: {lr: 0.01, warmup: 0}\ncluster: {devices_per_node: 1}\n"
    )
    for steps in ("2", "3"):
        done = command.weft(tmp_path, "train", "job.yaml", f"train.steps={steps}")
        assert done.code == 0, done.err
    assert "4.48k in adapters" in in_process(tmp_path, "plan", "job.yaml").out
    for to in ("peft", "hf"):
        assert in_process(tmp_path, "export", "lora", "--to", to).code == 0
    run = tmp_path / "runs" / "lora"
    config = json.loads((run / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["target_modules"] == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(STORIES)
    tokens = torch.arange(1, 30).unsqueeze(0)
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(STORIES)
        before = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, run / "peft")(tokens).logits
        whole = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")(tokens).logits
    assert (adapted - before).abs().max() > 1e-2
    assert (adapted - whole).abs().max() < 1e-4
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf")
    assert (
        tokenizer.apply_chat_template(turns, tokenize=False) == "Hi\nYes</s>"
    )  # that of data.template, not of the base


def test_what_has_no_adapters_is_refused(in_process: Callable[..., Output], tmp_path: Path) -> None:
    refused = {
        ("model.shape=mlp", "model.lora.rank=4"): "model.family=mlp is neither; leave it out",
        ("model.shape=tiny", "model.lora.targets=[q,gat]"): "did you mean gate?",
        ("model.shape=tiny", "model.family=gpt2", "model.lora.targets=[gate]"): "its layers are q, k, v, o, up, down",
    }
    for overrides, text in refused.items():
        done = in_process(tmp_path, "plan", "tiny", *overrides)
        assert done.code == 2 and text in done.err, (overrides, done.err)

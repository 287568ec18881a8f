"""Models of transformers that Weft has no family for: every layout is the same run, and weights leave as they came."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import weft as forked_command
from helpers.published import SIZES, transformers
from safetensors.torch import load_file
from torch import Tensor

from weft.extensions.hub.tiny import tiny_args, tiny_job
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.extensions.pretrained.published_weights import open_published
from weft.job.errors import JobError
from weft.job.load import parse_job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model, loss_sum
from weft.training.export import ExportOptions, export_run, newest
from weft.verify.prove import prove

STORIES = Path(__file__).parents[3] / "recipes" / "stories260K"
SAMPLE = {
    "granite": "ddp2, tp2", "gemma2": "zero3, cp2 ulysses", "gpt_oss": "zero3, pp2", "qwen3_next": "zero3",
    "deepseek_v3": "cp2 ring", "deepseek_v2": "tp2", "mixtral": "pp2, cp2 ring", "llama4_text": "cp2 ulysses",
    "bloom": "zero3", "gpt2": "cp2 ring", "mamba2": "ddp2", "cohere2": "tp2, pp2", "glm4": "pp2",
}  # fmt: skip
"""Types with a layout or two each; bench/any_model.py proves all of them."""


@pytest.mark.parametrize("kind", SAMPLE)
def test_every_layout_is_the_same_run(kind: str, pool: RankPool) -> None:
    verdicts = prove(tiny_job(tiny_args(kind)), [SAMPLE[kind]], 2, pool=pool)
    assert {v.layout: (v.verdict, v.why) for v in verdicts} == {v.layout: ("same", None) for v in verdicts}


SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "adapters": ("granite", {"model": {"lora": {"rank": 2, "targets": ["q", "v"]}}}, "tp2, zero3"),
    "bf16 and recompute": ("qwen3", {"precision": "bf16", "memory": {"recompute": "full"}}, "zero3, pp2"),
    "selective recompute": ("gemma2", {"memory": {"recompute": "selective"}}, "ddp2"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_a_run(case: str, pool: RankPool) -> None:
    kind, sections, layouts = SETTINGS[case]
    raw = tiny_job(tiny_args(kind)).model_dump(mode="json", exclude_unset=True)
    job = parse_job({**raw, **sections, "model": {**raw["model"], **sections.get("model", {})}})
    assert [(v.verdict, v.why) for v in prove(job, [layouts], 2, pool=pool)] == [("same", None)] * (
        layouts.count(",") + 1
    )


def test_attention_over_documents_is_that_of_each_alone() -> None:
    """Windows, sinks and chunks see the tokens of their own document."""
    for kind in ("gpt_oss", "gemma2", "llama4_text"):
        job = resolve(tiny_job(tiny_args(kind)))
        model, tokens = filled(job.model), torch.randint(3, 50, (1, 16), generator=torch.Generator().manual_seed(0))
        docs = torch.tensor([[0] * 9 + [1] * 7])
        positions = torch.tensor([[*range(9), *range(7)]])
        with torch.no_grad():
            packed = model(tokens, docs=docs, positions=positions)
            alone = torch.cat([model(tokens[:, :9]), model(tokens[:, 9:])], 1)
        assert torch.allclose(packed, alone, atol=1e-5), kind


def test_stories_train_the_same_losses_as_through_the_own_family() -> None:
    losses = []
    for implementation in ("weft", "transformers"):
        model = resolve(job_of(STORIES, implementation)).model
        module = filled(model, str(STORIES)).train()
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        losses.append([])
        for _ in range(3):
            loss = loss_sum(module, tokens_batch(500), model) / 32
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_generated_text_is_that_of_the_own_family(tmp_path: Path) -> None:
    shutil.copytree(STORIES, tmp_path / "stories")
    (tmp_path / "job.yaml").write_text(
        "name: run\nmodel: {pretrained: stories, implementation: transformers}\n"
        "data: {source: synthetic, seq_len: 8}\ntrain: {steps: 1, global_batch: 1}\n"
        "optim: {lr: 1.0e-30, weight_decay: 0}\ncluster: {device: cpu}\n"
    )
    done = forked_command(tmp_path, "train", "job.yaml", "--no-resilient", "-n", "1")
    assert done.code == 0, done.err
    done = forked_command(tmp_path, "generate", "run", "--prompt", "", "--temperature", "0", "--tokens", "12")
    assert done.out.startswith("Once upon a time, there was a"), done.err
    done = forked_command(tmp_path, "export", "run", "--to", "hf", "--out", "out")
    assert done.code == 0, done.err
    equal(load_file(tmp_path / "out" / "model.safetensors"), load_file(STORIES / "model.safetensors"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("kind", ["mixtral", "cohere2", "gpt_neox"])
def test_an_import_is_exported_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Shards, tied heads, and experts that files hold one by one."""
    saved = save(kind, tmp_path / "published")
    run, _, _ = import_run(
        str(tmp_path / "published"),
        "imported",
        str(tmp_path / "runs"),
    )
    assert export_run(run, newest(run), "hf", tmp_path / "out", ExportOptions()) > 0
    equal(tensors_in(tmp_path / "out"), saved)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    for kind in ("mixtral", "cohere2"):
        save(kind, tmp_path / kind)
        module = filled(resolve(job_of(tmp_path / kind, "transformers")).model, str(tmp_path / kind))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype="float32").eval()
        tokens = torch.arange(3, 19).view(1, 16)
        with torch.no_grad():
            assert torch.allclose(module(tokens), theirs(tokens).logits, atol=1e-5), kind


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "qwen99"}, "does not know.*pip install -U transformers"),
    "code of its own": ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "Weft runs no code of a checkpoint"),
    "no type": ({"hidden_size": 8}, "model_type=None"),
    "wrong field": ({"model_type": "llama", "hidden_size": "wide"}, "not a config of model_type=llama"),
    "not a text model": ({"model_type": "vit"}, "has no vocab_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_are_refused(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobError, match=message) as error:
        resolve(job_of(tmp_path, "transformers"))
    assert "\n" not in str(error.value)


def test_layouts_that_the_tables_do_not_allow_are_refused(pool: RankPool) -> None:
    verdicts = prove(tiny_job(tiny_args("bloom")), ["tp2, pp2, cp2"], 1, pool=pool)
    assert [(v.verdict, (v.why or "").partition(":")[0]) for v in verdicts] == [
        ("refused", "parallel.tp=2"), ("refused", "parallel.pp=2"), ("refused", "parallel.cp=2"),
    ]  # fmt: skip


def job_of(folder: Path, implementation: str) -> Any:
    return parse_job({
        "model": {"pretrained": str(folder), "implementation": implementation},
        "data": {"source": "synthetic", "seq_len": 16},
    })  # fmt: skip


def tokens_batch(vocab: int) -> dict[str, Tensor]:
    made = torch.randint(3, vocab, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    return {"inputs": made[0], "targets": made[1], "valid": torch.ones(2, 16, dtype=torch.bool), "ids": torch.arange(2)}


def filled(model: Any, published: str | None = None) -> Any:
    """The model with its weights, of a checkpoint or random."""
    module, values = build_model(model), {}
    for name, param in list(module.named_parameters(remove_duplicate=False)):
        if id(param) not in values:
            values[id(param)] = torch.nn.Parameter(torch.empty(param.shape))
            if published is None:
                module.initialise(name, values[id(param)].data, 0)
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner).register_parameter(key, values[id(param)])
    if published is not None:
        targets = {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
        open_published(published, model).fill(targets)
    return module.eval()


def save(kind: str, folder: Path) -> dict[str, Tensor]:
    """A random checkpoint in bf16 and several shards."""
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads" or kind != "gpt_neox"}
    config = transformers.CONFIG_MAPPING[kind](**sizes, **({"num_local_experts": 4} if kind == "mixtral" else {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    return tensors_in(folder)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name

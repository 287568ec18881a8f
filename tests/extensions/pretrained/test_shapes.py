"""Families with unusual shapes and options: odd widths, one key head, tied and untied, scaled positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lazy_module import LazyModule
from helpers.published import save_config, transformers
from safetensors.torch import load_file, save_file

import weft
from weft.extensions.pretrained.config import read_fields
from weft.extensions.pretrained.quantized import expand_mxfp4
from weft.job.errors import JobError

mxfp4: Any = LazyModule("transformers.integrations.mxfp4")
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_theta": 5000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3}
LONG = {
    **ROPE, "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0], "original_max_position_embeddings": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
WINDOWS = ["full_attention", "sliding_attention", "sliding_attention"]
TOKENS = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def _without(key: str) -> dict[str, Any]:
    return {k: v for k, v in SIZES.items() if k != key}


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, head_dim=10, attention_bias=True, tie_word_embeddings=True, rope_parameters=LONG
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, head_dim=14, sliding_window=3, rope_parameters=YARN),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, head_dim=10, attention_bias=True, use_sliding_window=True, sliding_window=4, max_window_layers=2,
        rope_parameters=YARN,
    ),
    "olmo2": lambda: transformers.Olmo2Config(
        **{**SIZES, "max_position_embeddings": 8}, attention_bias=True, tie_word_embeddings=True,
        rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.5},
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=10, attention_bias=True, tie_word_embeddings=False, sliding_window=3, layer_types=WINDOWS,
        rope_parameters={"full_attention": YARN, "sliding_attention": {**ROPE, "rope_type": "default"}},
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=28, qkv_bias=False, norm_topk_prob=False
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=14, norm_topk_prob=False),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **_without("num_key_value_heads"), attention_bias=False, use_parallel_residual=False, tie_word_embeddings=True,
        rope_parameters={**ROPE, "rope_type": "default", "partial_rotary_factor": 1 / 3},
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=10, num_local_experts=5, num_experts_per_tok=3, layer_types=WINDOWS, sliding_window=3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, tmp_path: Path) -> None:
    model = save_config(CONFIGS[name](), tmp_path)
    with torch.no_grad():
        assert (weft.from_hf(str(tmp_path))(TOKENS) - model(TOKENS).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "has hidden_act='gelu'; Weft needs 'silu'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "has rope_scaling type='proportional'; Weft"),
        ({"quantization_config": {"quant_method": "gptq"}}, "has quantization_config=.*; Weft needs none or mxfp4"),
        ({"rope_parameters": {"rope_type": {"a": 1}}}, "has rope_scaling type=.*; Weft needs"),
        ({"num_hidden_layers": 2**31}, "has num_hidden_layers=2147483648; Weft needs a whole number above 0 and"),
        ({"architectures": 5}, "has architectures=5; Weft needs a list of names"),
        ({"rope_theta": float("nan")}, "has rope_theta=nan; Weft needs a finite number"),
        ({"layer_types": ["chunked_attention"] * 3}, "has layer_types='chunked_attention'; Weft needs full_attention"),
    ],
)  # fmt: skip
def test_options_that_gpt_oss_lacks(keys: dict[str, Any], message: str) -> None:
    sizes = {**SIZES, "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3}
    with pytest.raises(JobError, match=message):
        read_fields({"model_type": "gpt_oss", **sizes, **keys}, "config.json")


def test_mxfp4(tmp_path: Path) -> None:
    """Experts in MXFP4 are read as transformers converts them, whole and as the shard of a rank."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 32}
    config = transformers.GptOssConfig(**sizes, head_dim=10, num_local_experts=3, num_experts_per_tok=2)
    save_config(config, tmp_path / "plain")
    tensors, random = load_file(tmp_path / "plain" / "model.safetensors"), torch.Generator().manual_seed(0)
    packed = dict(tensors)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=random)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = mxfp4.convert_moe_packed_tensors(blocks, scales).float()
        assert torch.equal(expand_mxfp4(blocks, scales), tensors[name])
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file(packed, folder / "model.safetensors")
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    with torch.no_grad():
        assert torch.equal(*(weft.from_hf(str(f))(TOKENS) for f in (folder, tmp_path / "plain")))
    save_file(
        {n: t for n, t in packed.items() if not n.endswith("1.mlp.experts.down_proj_scales")},
        folder / "model.safetensors",
    )
    with pytest.raises(JobError, match="in MXFP4 without the exponents of its blocks"):
        weft.from_hf(str(folder))


def test_null_and_missing_keys_are_those_of_transformers() -> None:
    sizes = {k: v for k, v in SIZES.items() if v is not None}
    mistral = {"model_type": "mistral", **sizes}
    assert read_fields({**mistral, "sliding_window": None}, "config.json")[1].get("window") is None
    assert read_fields(mistral, "config.json")[1]["window"] == 4096
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0}
    scaled = read_fields({**mistral, "rope_parameters": {**yarn, "mscale_all_dim": 0.5}}, "config.json")[1]
    assert scaled["rope_scaling"]["attention_factor"] == pytest.approx(1.13863 / 1.06931, rel=1e-4)
    bert = {"model_type": "bert", **{k: v for k, v in sizes.items() if k != "num_key_value_heads"}}
    assert read_fields(bert, "config.json")[1]["tied"] is True
    assert read_fields({**bert, "tie_word_embeddings": False}, "config.json")[1]["tied"] is False

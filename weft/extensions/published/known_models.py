"""Facts of a model that follow from its name: gated feed-forward, head size, latent attention, shared experts."""

from __future__ import annotations

import re
from typing import Any

# Where ffn is 4 × hidden the feed-forward part has one matrix in, elsewhere two, unless the family is known.
_ONE_GATE = (
    r"gpt-?[23h]|gpt-\d|^gpt|bloom|mpt|^bs-|opt-|phi|falcon|stablelm|pythia|neox|nemotron-?4|nemotron-\d|megatron|bert"
)
_TWO_GATES = (
    r"llama|mistral|mixtral|qwen|deepseek|grok|gemma|kimi|gpt-?oss|olmo|yi-|vicuna|internlm|baichuan|glm|smollm"
)
_HEAD_DIM = ((r"qwen-?3", 128), (r"gpt-?oss", 64), (r"gemma", 256), (r"deepseek|kimi", 128), (r"mixtral|mistral", 128))
_TIED = r"mpt|gpt-?2|bs-|bloom|gemma|llama3\.2-[13]b|gpt-h|^gpt-\d|gpt3|falcon|narayanan"


def known_model(name: str, dim: int, heads: int, ffn: int, experts: int, layers: int) -> dict[str, Any]:
    """Fields of ModelFacts that follow from the name; `shared` is the number of shared experts."""
    low = name.lower()
    if re.search(_TWO_GATES, low):
        gates = 2
    elif re.search(_ONE_GATE, low):
        gates = 1
    else:
        gates = 2 if experts or (ffn and ffn != 4 * dim) else 1
    head_dim = next((size for pattern, size in _HEAD_DIM if re.search(pattern, low)), max(1, dim // max(heads, 1)))
    out: dict[str, Any] = {
        "gates": gates, "head_dim": head_dim, "tied": int(bool(re.search(_TIED, low))),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), int(gates == 1)),
        "norm_rows": 2 if gates == 1 else 1,
    }  # fmt: skip
    if re.search(r"deepseek.?(v|-v)?[23]|kimi", low) and experts:
        dense = 1 if "kimi" in low or layers < 10 else 3
        out |= {"q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "shared": 1, "first_dense": dense}
    if "maverick" in low:
        out |= {"shared": 1, "moe_every": 2}
    if "scout" in low:
        out |= {"shared": 1}
    return out

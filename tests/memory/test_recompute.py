"""Recompute gives the same gradients; selective recompute repeats no matrix product and no attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.parity import differences, make_job, run
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weft.job.schema import Model
from weft.launch.rank_pool import RankPool
from weft.memory import recompute, recomputed_units
from weft.models.attention import TokenInfo
from weft.models.fp8.fp8_linear import Fp8Linear, Fp8Recipe
from weft.models.transformer import Block

SHAPE = Model(
    family="llama", dim=32, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=64, norm="rmsnorm", activation="swiglu",
    causal=True, bias=False, dropout=0.1,
)  # fmt: skip
WHERE = TokenInfo(None, None, torch.arange(2), torch.arange(16), 16)
LAYOUTS = ("dp_shard 2 zero=3", "tp 2", "dp_replicate 2 × tp 2 no-sequence", "pp 2 × dp_shard 2 zero=2")


def block(option: str, fp8: bool = False) -> Block:
    torch.manual_seed(0)
    made = Block(SHAPE, 0).to(torch.bfloat16 if fp8 else torch.float32)
    for module in made.modules():
        if fp8 and isinstance(module, nn.Linear):
            module.__class__ = Fp8Linear
            module.recipe, module.maxima = Fp8Recipe(), None  # type: ignore[assignment]
    if option != "none":
        recompute(made, option, functions=fp8)
    return made


def an_input(made: nn.Module) -> Tensor:
    dtype = next(made.parameters()).dtype
    return torch.linspace(-1, 1, 2 * 16 * 32, dtype=dtype).view(2, 16, 32).sin().requires_grad_()


def gradients(made: nn.Module) -> list[Tensor]:
    x = an_input(made)
    made(x, WHERE).float().square().sum().backward()
    return [g for t in (x, *made.parameters()) if (g := t.grad) is not None]


def costs(made: nn.Module) -> tuple[int, int]:
    """FLOPs of products and attention, and bytes that autograd holds between the passes."""
    x = an_input(made)
    weights = {p.untyped_storage().data_ptr() for p in made.parameters()}
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with FlopCounterMode(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = made(x, WHERE)
        y.float().square().sum().backward()
    return flops.get_total_flops(), sum(held.values())


@pytest.mark.parametrize("fp8", [False, True])
def test_same_gradients_with_less_memory(fp8: bool) -> None:
    kept, (flops, most) = gradients(block("none", fp8)), costs(block("none", fp8))
    for option, more in (("selective", False), ("full", True)):
        found, (again, held) = gradients(block(option, fp8)), costs(block(option, fp8))
        assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
        assert (again > flops) == more
        assert held < most / 2


@pytest.mark.parametrize(("option", "fp8"), [("selective", True), ("full", True), ("full", False)])
def test_compiles_without_graph_breaks(option: str, fp8: bool) -> None:
    plain, compiled = block(option, fp8), block(option, fp8)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(plain), gradients(compiled), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0.05 if fp8 else 1e-4)


def test_recomputed_blocks_are_the_first_of_each_stage() -> None:
    units = [f"blocks.{i}" for i in range(8)]
    assert list(recomputed_units(units, 2)) == ["blocks.0", "blocks.1"]
    assert list(recomputed_units(units, 2, 2)) == ["blocks.0", "blocks.4"]
    assert list(recomputed_units(units, 4, 2, ((0, 2), (2, 8)))) == ["blocks.0", *(f"blocks.{i}" for i in (2, 3, 4))]
    assert recomputed_units(units, 8) == recomputed_units(units, "full") == dict.fromkeys(units, "full")
    assert recomputed_units(units, "none") == recomputed_units(units, 0) == {}
    for n in range(9):
        found = [units.index(u) for u in recomputed_units(units, n, 2)]
        assert len(found) == n
        halves = [sum(i < 4 for i in found), sum(i >= 4 for i in found)]
        assert abs(halves[0] - halves[1]) <= 1


CASES: dict[str, dict[str, Any]] = {
    "saved in fp8": {"memory": {"activations": "fp8", "recompute": 1}, "model": {"layers": 3, "kv_heads": 2}},
    "selective, with dropout and biases": {
        "memory": {"recompute": "selective"}, "model": {"family": "gpt2", "dropout": 0.2},
    },
    "one block of three": {"memory": {"recompute": 1}, "model": {"layers": 3, "kv_heads": 2}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_the_same_run(pool: RankPool, name: str) -> None:
    """Held against one process that keeps everything."""
    reference = run(pool, make_job(**{k: v for k, v in CASES[name].items() if k != "memory"}), "1")
    job = make_job(**CASES[name])
    limits = "fp8 activations" if job.memory.activations == "fp8" else "fp32"
    wrong = {
        layout: found for layout in ("1", *LAYOUTS) if (found := differences(reference, run(pool, job, layout), limits))
    }
    assert not wrong

"""Random shapes under random layouts are the same run as one process. The examples are the same every time."""

from __future__ import annotations

from typing import Any

from helpers.parity import differences, make_job, run
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from weft.launch.rank_pool import RankPool

LAYOUTS: dict[str, tuple[int, int]] = {
    **{f"dp_shard {n} zero={z}": (n, 1) for n in (2, 3, 4) for z in (1, 2, 3)},
    **{f"dp_shard 2 zero={z} × tp 2": (2, 2) for z in (1, 2, 3)},
    **{f"dp_replicate 2 × dp_shard 2 zero={z}": (4, 1) for z in (1, 2, 3)},
    "dp_replicate 3": (3, 1),
    "dp_replicate 2 × tp 2": (2, 2),
    "tp 2": (1, 2),
    "tp 3": (1, 3),
    "tp 4 no-sequence": (1, 4),
    **{f"cp {n} ring": (1, 1) for n in (2, 3, 4)},
    "cp 2 ring × tp 2": (1, 2),
    "cp 2 ring × dp_shard 2 zero=3": (2, 1),
}
"""Each layout's data-parallel and tensor-parallel ranks."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A layout, and the sections of a job that allows it."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    dp, tp = LAYOUTS[layout]
    kv_heads = tp * draw(st.integers(1, 2))
    model = {
        "family": draw(st.sampled_from(["llama", "gpt2"])), "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads, "head_dim": 2 * draw(st.integers(1, 4)), "dim": draw(st.integers(3, 24)),
        "layers": draw(st.integers(1, 3)), "ffn": tp * draw(st.integers(1, 15)), "vocab": draw(st.integers(3, 67)),
        "tied": draw(st.booleans()), "activation": draw(st.sampled_from(["swiglu", "gelu"])),
        "qk_norm": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.3])),
    }  # fmt: skip
    accumulation = draw(st.integers(1, 3))
    train = {
        "global_batch": dp * accumulation * draw(st.integers(1, 2)), "accumulation": "auto",
        "microbatch": draw(st.sampled_from([1, "auto"])), "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "seed": draw(st.integers(0, 9)),
    }  # fmt: skip
    return layout, {"model": model, "train": train, "data": {"seq_len": draw(st.integers(1, 11))}}


def test_random_shapes(pool: RankPool) -> None:
    tried = []

    # no shrinking: a failing example is small already, and each costs a second
    @settings(max_examples=12, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(cases())
    def same_run(case: tuple[str, dict[str, Any]]) -> None:
        layout, sections = case
        job = make_job("optim.name=sgd", "optim.lr=0.1", **sections)
        tried.append(layout)
        assert not differences(run(pool, job, "1", 1), run(pool, job, layout, 1)), (layout, sections)

    same_run()
    assert len(set(tried)) >= 8

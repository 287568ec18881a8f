"""The kinds of faults: valid and refused requests, and schedules with enough steps between faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.extensions.chaos.faults import FIRST_FAULT_STEP, KINDS, RANDOM_KINDS, FaultRequest, parse, possible, schedule
from weft.job.errors import JobError


def test_parse_fault_requests() -> None:
    assert parse("kill:3,stop@1, nan", 0, 4, 1) == [FaultRequest("kill")] * 3 + [
        FaultRequest("stop", 1),
        FaultRequest("nan"),
    ]
    drawn = parse("random:40", 7, 4, 1)
    assert len(drawn) == 40 and {w.kind for w in drawn} == set(RANDOM_KINDS)
    assert drawn == parse("random:40", 7, 4, 1) != parse("random:40", 8, 4, 1)
    assert [w.kind for w in parse("all", 0, 4, 1)] == [k for k in KINDS if k not in ("partition", "node")]
    assert [w.kind for w in parse("all", 0, 4, 2)] == list(KINDS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil", "'kil' is not known; did you mean kill?"),
        ("zzz", "'zzz' is not known; there are kill, stop"),
        ("kill@4", "kill@4 names rank 4, but the run has ranks 0 to 3"),
        ("kill:0", "'kill:0' is not a fault; write kill, kill:3 for three, or kill@1 for rank 1"),
        ("kill:-1", "'kill:-1' is not a fault"),
        ("", "'' is not a fault"),
        ("kill,,stop", "'' is not a fault"),
        ("node", "node needs a run of at least 2 nodes, and this one has 1; give --nodes 2"),
        ("partition:2", "partition needs a run of at least 2 nodes"),
        ("spike@1", "spike does not affect a single rank; write spike"),
    ],
)
def test_invalid_fault_requests(text: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        parse(text, 0, 4, 1)
    assert words in str(caught.value)


@given(
    st.lists(st.sampled_from(possible(2)), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(1, 8),
    st.integers(0, 10**9),
)
def test_schedule_leaves_recovery_steps(kinds: list[str], steps: int, world: int, seed: int) -> None:
    requests = [FaultRequest(k) for k in kinds]
    try:
        faults = schedule(requests, seed=seed, world=world, steps=steps)
    except JobError as error:
        needed = int(str(error).split("at least ")[1].split()[0])
        assert steps < needed
        assert len(schedule(requests, seed=seed, world=world, steps=needed)) == len(kinds)
        return
    assert sorted(f.kind for f in faults) == sorted(kinds)
    assert faults == schedule(requests, seed=seed, world=world, steps=steps)
    free = FIRST_FAULT_STEP
    for number, fault in enumerate(faults):
        kind = KINDS[fault.kind]
        assert fault.number == number and fault.phase in kind.phases
        assert fault.step >= max(free, kind.history)
        assert (fault.rank is None) != kind.in_one_rank
        assert fault.rank is None or 0 <= fault.rank < world
        free = fault.step + kind.room
        assert fault.step <= fault.latest <= steps - kind.room
    assert free <= steps

"""Accounting of a chaos experiment: worked examples, and random runs with known results."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.extensions.chaos.accounting import InjectedFault, ObservedStep, effective_ratio, outcomes, samples, sentence
from weft.job.train import BatchRamp


def line(time: float, step: int, seconds: float = 1.0, **more: Any) -> ObservedStep:
    return ObservedStep(time, step, seconds, 2.0, **more)


def test_outcomes_of_kill_and_term() -> None:
    lines = [line(1, 1), line(2, 2), line(3.05, 3), line(6.5, 3), line(7.5, 4), line(20, 5), line(21, 6)]
    injected = [InjectedFault("kill", 1, "backward", 2, 3.0), InjectedFault("term", 0, "data", 4, 8.0)]
    events: list[dict[str, Any]] = [
        {"time": 3.05, "event": "fault", "fault": "slow_rank", "rank": 1, "why": "a busy machine"},
        {"time": 3.06, "event": "recovered", "fault": "slow_rank", "how": "rebalance"},
        {"time": 3.1, "event": "fault", "fault": "hang", "rank": 0, "why": "waits"},
        {"time": 3.2, "event": "fault", "fault": "exit", "rank": 1, "why": "killed by SIGKILL"},
        {"time": 4.5, "event": "recovered", "fault": "exit", "how": "spare", "step": 3, "steps_lost": 1},
        {"time": 8.4, "event": "stop", "step": 4, "code": 75},
        {"time": 18.0, "event": "start", "step": 4},
    ]
    kill, term = outcomes(injected, lines, events)
    assert (kill.detect_s, kill.resume_s, kill.steps_lost) == (0.2, 3.5, 1)
    assert (kill.seen_as, kill.how, kill.why) == ("exit", "spare", "killed by SIGKILL")
    assert (term.detect_s, term.resume_s, term.steps_lost, term.seen_as) == (0.4, 12.0, 0, "stop")
    # steps 1, 2, 4 and 6 took a second each, 3 and 5 were disturbed and count as one median step
    assert effective_ratio(lines, injected, events) == pytest.approx(6 / 21)


def test_undetected_fault() -> None:
    lines = [line(t, t) for t in range(1, 9)]
    (flip_bit,) = outcomes([InjectedFault("bitflip", 0, "update", 3, 3.5)], lines, [])
    assert (flip_bit.detect_s, flip_bit.resume_s, flip_bit.steps_lost, flip_bit.seen_as) == (None, 1.5, 0, None)
    (last,) = outcomes(
        [InjectedFault("kill", 0, "data", 8, 8.5)], lines, [{"time": 8.6, "event": "fault", "fault": "exit"}]
    )
    assert (last.detect_s, last.resume_s, last.steps_lost) == (0.1, None, None)
    output = [{"time": 9.0, "event": x, "fault": "supervisor", "how": "regroup"} for x in ("fault", "recovered")]
    (unfelt,) = outcomes([InjectedFault("supervisor", None, "data", 5, 5.5)], lines, output)
    assert (unfelt.detect_s, unfelt.resume_s, unfelt.steps_lost) == (3.5, 1.5, 0)
    assert outcomes([], lines, output) == []  # the run had ended before the first
    read = samples([[{"step": 1, "ids": [0, 1]}]], 1, BatchRamp(2))
    assert sentence(True, [flip_bit], read, 1.0, False) == (
        "finished after 1 fault; 0 samples lost and 0 read twice; not noticed: bitflip; recovered after at most 1.5 s; "
        "100.0 % effective time; the weights differ from those of the undisturbed run, since batches or shares differed"
    )
    assert sentence(False, [], read, None, None).startswith("did not finish after 0 faults")
    assert effective_ratio([], [], []) is None


@given(st.integers(0, 10**9), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_samples_of_runs_with_known_losses(seed: int, steps: int, world: int, share: int) -> None:
    chance = random.Random(seed)
    batch = world * share * 2
    output: list[list[dict[str, Any]]] = [[] for _ in range(world * 2)]

    def report(step: int, attempt: int, ranks: int) -> None:
        part = batch // ranks
        for rank in range(ranks):
            first = (step - 1) * batch + rank * part
            output[rank].append({"step": step, "attempt": attempt, "ids": list(range(first, first + part))})

    attempt, step = 0, 1
    while step <= steps:
        if chance.random() < 0.3:  # a fault: back by up to two steps, on another number of ranks
            attempt, step = attempt + 1, max(1, step - chance.randrange(3))
        report(step, attempt, chance.choice([world, world * 2]) if attempt == 0 else world)
        step += 1
    report(steps + 1, attempt, world)  # begun and never committed
    clean = samples(output, steps, BatchRamp(batch))
    assert (clean.lost, clean.repeated, clean.read) == (0, 0, steps * batch)
    # one committed step loses a sample and reads another twice
    victim = chance.randrange(1, steps + 1)
    top = max(x["attempt"] for rank in output for x in rank if x["step"] == victim)
    found = next(x for rank in output for x in reversed(rank) if x["step"] == victim and x["attempt"] == top)
    found["ids"] = [*found["ids"][1:], found["ids"][-1]]
    spoiled = samples(output, steps, BatchRamp(batch))
    if share * 2 * world // len(found["ids"]) and len(found["ids"]) > 1:
        assert (spoiled.lost, spoiled.repeated) == (1, 1)


@given(st.lists(st.floats(0.01, 5.0), min_size=2, max_size=40), st.integers(0, 10**6))
def test_effective_ratio(gaps: list[float], seed: int) -> None:
    time, lines = 0.0, []
    for step, gap in enumerate(gaps, 1):
        time += gap
        lines.append(line(time, step, gap))
    assert effective_ratio(lines, [], []) == pytest.approx(1.0)
    cut = random.Random(seed).randrange(1, len(lines))
    pause = 10.0
    late = lines[:cut] + [line(x.time + pause, x.step, x.seconds) for x in lines[cut:]]
    injected = [InjectedFault("stop", 0, "data", cut, lines[cut - 1].time + 1e-6)]
    ratio = effective_ratio(late, injected, [])
    assert ratio is not None and ratio < 1.0
    usual = sorted(gaps)[len(gaps) // 2]
    assert ratio <= (time + max(0.0, usual)) / (time + pause) + 1e-9

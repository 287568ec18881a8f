"""The privacy accountant against known values, and secure aggregation with clients that drop out in every phase."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.extensions.server import privacy
from weft.extensions.server.federated_update import RoundResult, pack, packed_length, unpack
from weft.extensions.server.privacy import PrivacyAccountant, check_packages, gaussian_epsilon, noise_generator
from weft.extensions.server.secure_aggregation import SecureClient, decode, encode, join_secret, split_secret
from weft.extensions.server.secure_round import SecureRound
from weft.job.errors import JobError, MachineError
from weft.job.load import parse_job


def exact_delta(noise: float, rounds: int, epsilon: float) -> float:
    """The delta of a Gaussian mechanism (Balle and Wang 2018, theorem 8); `rounds` of them are one with less noise."""
    sigma = noise / math.sqrt(rounds)

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return phi(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * phi(-1 / (2 * sigma) - epsilon * sigma)


def exact_epsilon(noise: float, rounds: int, delta: float) -> float:
    low, high = 0.0, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_delta(noise, rounds, middle) > delta else (low, middle)
    return high


def renyi_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Rényi differential privacy of Gaussian mechanisms (Mironov 2017), converted by Canonne et al. 2020."""
    alpha = np.linspace(1.01, 400, 100_000)
    bounds = rounds * alpha / (2 * noise**2) + np.log1p(-1 / alpha) - (np.log(delta) + np.log(alpha)) / (alpha - 1)
    return float(bounds.min())


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (1.0, 10), (4.0, 100), (10.0, 100), (2.0, 1000), (5.0, 3)])
def test_epsilon_against_the_formulas(noise: float, rounds: int) -> None:
    epsilon = gaussian_epsilon(noise, 1e-5, rounds)
    assert epsilon == pytest.approx(renyi_epsilon(noise, rounds, 1e-5), rel=0.01)
    exact = exact_epsilon(noise, rounds, 1e-5)
    assert exact <= epsilon <= 1.15 * exact, "never below what the mechanism loses, and not far above"


def test_epsilon_of_one_step_of_gaussian_noise() -> None:
    """A published value: noise 1 at delta 1e-5 loses epsilon 4.38 exactly (Balle and Wang 2018), 4.73 by Rényi DP."""
    assert exact_epsilon(1.0, 1, 1e-5) == pytest.approx(4.38, abs=0.01)
    assert gaussian_epsilon(1.0, 1e-5, 1) == pytest.approx(4.73, abs=0.01)


def test_the_client_with_the_most_rounds_counts() -> None:
    accountant = PrivacyAccountant(2.0, 1e-5)
    assert accountant.epsilon == 0
    for clients in ([0, 1], [0, 2], [0, 1]):
        accountant.add_round(clients)
    assert accountant.epsilon == gaussian_epsilon(2.0, 1e-5, 3)
    assert PrivacyAccountant(2.0, 1e-5, accountant.state()).epsilon == accountant.epsilon


def test_noise_needs_the_secret() -> None:
    draw = [noise_generator(key, 3).normal(size=4) for key in (b"a" * 32, b"a" * 32, b"b" * 32)]
    assert np.array_equal(draw[0], draw[1]) and not np.array_equal(draw[0], draw[2])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = parse_job({"train": {"sync": {"mode": "federated", "secure": True}}})
    check_packages(job)
    monkeypatch.setattr(privacy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MachineError, match=r"train.sync.secure needs the package cryptography: pip install 'weft\[priv"
    ):
        check_packages(job)


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({"clients": 2, "secure": True}, "at least 3 clients"),
        ({"clients": 8, "secure": True, "min_clients": 4}, "min_clients from 5 to 8"),
        ({"clients": 8, "min_clients": 6}, "without secure"),
        ({"clients": 8, "secure": True, "tolerance": 3}, "the server sees only sums"),
        ({"clients": 8, "delta": 1.0}, "delta"),
    ],
)
def test_settings_that_cannot_work(sync: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        parse_job({"train": {"sync": {"mode": "federated", **sync}}})


@given(st.binary(min_size=32, max_size=32), st.integers(2, 6), st.data())
@settings(max_examples=40, deadline=None)
def test_any_threshold_of_shares_restores_a_secret(secret: bytes, threshold: int, data: st.DataObject) -> None:
    shares = split_secret(secret, range(9), threshold)
    chosen = data.draw(st.permutations(range(9)))
    assert join_secret({c: shares[c] for c in chosen[:threshold]}) == secret
    fewer = {c: shares[c] for c in chosen[: threshold - 1]}
    other = split_secret(bytes(32), range(9), threshold)  # the same shares are possible for every secret
    assert fewer.keys() == {c: other[c] for c in fewer}.keys()


def play(count: int, threshold: int, drops: dict[str, list[int]], length: int = 50) -> tuple[SecureRound, list[Tensor]]:
    """A round in which some clients drop out in some phases; returns it with the clients' values."""
    server, torch_random = SecureRound(range(count), threshold, length), torch.Generator().manual_seed(count)
    values = [torch.randn(length, generator=torch_random) for _ in range(count)]
    clients = {c: SecureClient(c, threshold) for c in range(count)}
    for phase in ("keys", "shares", "train", "unmask"):
        for c in server.pending if server.phase == phase else ():
            if c in drops.get(phase, ()):
                server.drop(c)
                continue
            task = server.task(c)
            match phase:
                case "keys":
                    server.answer(c, {"keys": [k.hex() for k in clients[c].public_keys()]}, {})
                case "shares":
                    keys = {int(o): (bytes.fromhex(a), bytes.fromhex(b)) for o, (a, b) in task["keys"].items()}
                    sealed = clients[c].make_shares(keys)
                    server.answer(c, {"sealed": {str(o): d.hex() for o, d in sealed.items()}}, {})
                case "train":
                    clients[c].receive_shares({int(o): bytes.fromhex(d) for o, d in task["sealed"].items()})
                    server.answer(c, {}, {"vector": clients[c].mask(encode(values[c]))})
                case "unmask":
                    output = clients[c].reveal(task["survivors"])
                    server.answer(c, {"shares": {str(o): [k, hex(s)] for o, (k, s) in output.items()}}, {})
    return server, values


@given(st.integers(3, 7), st.data())
@settings(max_examples=25, deadline=None)
def test_the_sum_is_exact_whoever_drops_out(count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(count // 2 + 1, count))
    leaving = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
    drops: dict[str, list[int]] = {}
    for client in leaving:
        drops.setdefault(data.draw(st.sampled_from(["keys", "shares", "train", "unmask"])), []).append(client)
    server, values = play(count, threshold, drops)
    if count - len(leaving) < threshold:
        assert server.phase == "failed"
        return
    assert server.phase == "done"
    survivors = [c for c in range(count) if c not in {d for p in ("keys", "shares", "train") for d in drops.get(p, [])}]
    assert sorted(server.masked) == survivors
    expected = torch.stack([values[c] for c in survivors]).double().sum(0)
    assert torch.allclose(decode(server.total()), expected, atol=1e-10)


def test_the_server_sees_no_single_update() -> None:
    """What a client sends is unrelated to its values, and the server cannot remove the masks of one client alone."""
    server, values = play(4, 3, {})
    for c, masked in server.masked.items():
        assert not torch.allclose(decode(masked), values[c].double(), atol=1e3)
    high = torch.stack(list(server.masked.values())) < 0
    assert 0.3 < high.double().mean() < 0.7, "masked values are spread over the whole range"


def test_a_client_reveals_once_and_never_to_too_few() -> None:
    clients = {c: SecureClient(c, 3) for c in range(4)}
    keys = {c: client.public_keys() for c, client in clients.items()}
    sealed = {c: client.make_shares(keys) for c, client in clients.items()}
    for c, client in clients.items():
        client.receive_shares({o: sealed[o][c] for o in clients if o != c})
    with pytest.raises(ValueError, match="3 are needed"):
        clients[0].reveal([0, 1])
    with pytest.raises(ValueError, match="once"):
        clients[0].reveal([1, 2, 3])
    output = clients[0].reveal([0, 1, 2])
    assert {c: kind for c, (kind, _) in output.items()} == {0: "own", 1: "own", 2: "own", 3: "mask"}
    with pytest.raises(ValueError, match="once"):  # the other half of the same client's masks
        clients[0].reveal([0, 2, 3])
    with pytest.raises(ValueError, match="distinct keys"):
        SecureClient(0, 3).make_shares({c: keys[0] for c in range(4)})


def test_invalid_answers_are_refused() -> None:
    server = SecureRound(range(3), 2, 5)
    with pytest.raises((ValueError, KeyError)):
        server.answer(0, {"keys": ["zz", "00"]}, {})
    for c in range(3):
        server.answer(c, {"keys": [bytes([c] * 32).hex(), bytes([9 + c] * 32).hex()]}, {})
    with pytest.raises(ValueError, match="every other client"):
        server.answer(0, {"sealed": {"1": "00"}}, {})
    for c in range(3):
        server.answer(c, {"sealed": {str(o): "00" for o in range(3) if o != c}}, {})
    with pytest.raises(ValueError, match="not 5 int64"):
        server.answer(0, {}, {"vector": torch.zeros(5)})


def test_updates_and_figures_survive_packing() -> None:
    expected = {"b": torch.zeros(2, 3), "a": torch.zeros(4)}
    updates = [{n: torch.randn(t.shape) * 1e-3 for n, t in expected.items()} for _ in range(3)]
    figures = {"losses": [1e6 + 0.5, 2.0], "counts": [3e6, 7.0], "norms": [0.25, 4.0]}
    total = sum(pack(u, figures) for u in updates)
    assert isinstance(total, Tensor) and len(total) == packed_length(expected, 2)
    result: RoundResult = unpack(total, expected, [0, 1, 2], weight=3.0, steps=2)
    for name in expected:
        assert torch.allclose(result.mean[name], sum(u[name] for u in updates) / 3, atol=1e-9)
    assert result.counts == [9e6, 21.0] and result.losses[0] == pytest.approx(3e6 + 1.5) and result.norms == [0.25, 4.0]

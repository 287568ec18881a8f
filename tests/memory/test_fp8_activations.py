"""What blocks save for the backward pass is stored in fp8, and nothing else is."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from weft.job.errors import JobError
from weft.job.load import parse_job
from weft.memory import Fp8Codec, Fp8HostOffload, recompute, save_as_fp8
from weft.memory.activation_internals import value_version
from weft.memory.fp8_activations import CodedTensor
from weft.parallel.pipeline.split_backward import backward_input, backward_weights
from weft.planner.make_plan import make_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_returns_with_a_small_relative_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50, 77).to(dtype).transpose(1, 2)
    codec = Fp8Codec()
    codec.step = 7  # in parts
    y = codec.decode(codec.encode(x))
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert ((x - y).float().norm() / x.float().norm()) < 0.03
    some = codec.decode(codec.encode(x[:, ::2]))  # with gaps in memory
    assert torch.allclose(some.float(), x[:, ::2].float(), atol=0.2)
    assert not codec.decode(codec.encode(torch.zeros(300))).any()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(torch.relu(self.up(n) * self.up(n))) * scale


def run(option: str, coded: bool) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """The output, the gradients, and what the passes encode."""
    torch.manual_seed(0)
    block, codec, seen = Tiny(), Fp8Codec(), list[Tensor]()
    encode = codec.encode
    codec.encode = lambda x: seen.append(x) or encode(x)  # type: ignore[method-assign,func-returns-value]
    x = torch.randn(8, 8, 64, requires_grad=True)
    if option == "full":
        recompute(block)
    if coded:
        save_as_fp8(block, codec)
    out = block(x, torch.full((8, 8, 64), 0.5))
    out.square().sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}, seen


@pytest.mark.parametrize("option", ["none", "full"])
def test_forward_is_exact_and_gradients_are_close(option: str) -> None:
    (out, exact, _), (same, rounded, seen) = run(option, False), run(option, True)
    assert torch.equal(out, same)
    assert exact.keys() == rounded.keys()
    for name, grad in exact.items():
        assert (rounded[name] - grad).norm() / grad.norm() < 0.06, name
    # n is saved by two products and encoded once; weights, the norm's statistics and the constant factor are not
    assert len(seen) == (1 if option == "full" else 5)
    assert all(x.numel() == 8 * 8 * 64 for x in seen)


class Rms(nn.Module):
    """A norm of several operators, of which one saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True)))


def test_a_split_backward_pass_frees_what_was_saved() -> None:
    """Nodes that only the first half runs keep what they saved until nothing holds the graph."""
    block, codec, saved = Rms(), Fp8Codec(), list[weakref.ref[Tensor]]()
    encode = codec.encode

    def encoding(x: Tensor) -> CodedTensor:
        coded = encode(x)
        saved.append(weakref.ref(coded.codes))
        return coded

    codec.encode = encoding  # type: ignore[method-assign]
    save_as_fp8(block, codec)
    x = torch.randn(8, 8, 64, requires_grad=True)
    _, later = backward_input([block(x * 1.0).sum()], [None], [x], block.parameters())
    assert any(codes() is not None for codes in saved)
    backward_weights(later)
    assert len(saved) > 1 and all(codes() is None for codes in saved)


def test_offloaded_tensors_are_stored_in_fp8() -> None:
    offload = Fp8HostOffload(torch.device("cpu"), 1.0, Fp8Codec())
    x, statistics = torch.randn(2, 64, 32), torch.randn(2, 4, 8)
    entry = offload.put([x, x.bfloat16(), statistics])
    assert sum(t.numel() for t in entry.there) < 2.2 * x.numel() + 4 * statistics.numel()
    first, second, small = offload.get(entry)
    assert torch.allclose(first, x, atol=0.3) and second.dtype == torch.bfloat16
    assert torch.equal(small, statistics)


def test_selective_recompute_and_fp8_are_refused() -> None:
    job = {"model": "tiny", "data": {"source": "synthetic", "seq_len": 32}, "cluster": {"device": "cpu"}}
    with pytest.raises(JobError, match=r"activations=fp8 .*recompute=selective.*recompute=none or full would work"):
        make_plan(parse_job({**job, "memory": {"activations": "fp8", "recompute": "selective"}}))
    assert make_plan(parse_job({**job, "memory": {"activations": "fp8"}}))[1].activations == "fp8"


def test_version_of_a_tensor_grows() -> None:
    x = torch.zeros(2)
    before = value_version(x)
    x.add_(1)
    assert value_version(x) > before, "torch moved Tensor._version: change weft/memory/activation_internals.py"

"""Batch norm over replicas computes what torch's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.job.errors import JobError
from weft.models.batch_norm import GlobalBatchNorm, use_global_batch_norms, use_rank_batch_norms


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (6, 3)),
        (lambda: nn.BatchNorm1d(3, affine=False), (6, 3, 5)),
        (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 2)),
        (lambda: nn.BatchNorm3d(3, track_running_stats=False), (4, 3, 2, 2, 2)),
    ],
)
def test_agrees_with_torch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs, ours = make(), use_global_batch_norms(make())
    assert isinstance(ours, GlobalBatchNorm)
    for _ in range(2):
        x = torch.randn(shape) * 3 + 5
        grad = torch.randn(shape)
        inputs = [x.clone().requires_grad_() for _ in "ab"]
        outputs = [norm(value) for norm, value in zip((theirs, ours), inputs, strict=True)]
        for out in outputs:
            out.backward(grad)
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    theirs.eval()
    ours.eval()
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", [use_global_batch_norms, use_rank_batch_norms])
def test_one_value_per_channel_is_refused(kind: Callable[[nn.Module], nn.Module]) -> None:
    """As by torch: its variance is 0, and the output would be the bias whatever the input is."""
    norm = kind(nn.BatchNorm1d(3))
    with pytest.raises(JobError, match=r"one value per channel.* a larger train.microbatch"):
        norm(torch.randn(1, 3))
    assert norm(torch.randn(1, 3, 2)).shape == (1, 3, 2) and norm.eval()(torch.randn(1, 3)).shape == (1, 3)

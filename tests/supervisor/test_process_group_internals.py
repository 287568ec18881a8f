"""The private torch names of weft/supervisor/process_group_internals.py exist."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAMES = [
    (distributed_c10d, "_abort_process_group"),
    (dist.ProcessGroup, "_get_backend"),
    (dist.ProcessGroup, "_get_sequence_number_for_group"),
]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_private_names_exist(owner: object, name: str) -> None:
    assert hasattr(owner, name), f"torch moved {name}: change weft/supervisor/process_group_internals.py"

"""Variables of launchers that hold something else than numbers."""

from __future__ import annotations

import pytest

from weft.hardware.rank_environment import RankInfo, export_torchrun_variables, node_info, rank_info
from weft.job.errors import MachineError

TASKS = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2', which must be a whole number from 0 to 1;"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 30}, "WORLD_SIZE='999"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "²"}, "OMPI_COMM_WORLD_SIZE='²'"),
        ({**TASKS, "SLURM_STEP_NUM_NODES": "0"}, "SLURM_STEP_NUM_NODES='0'"),
        ({**TASKS, "SLURM_JOB_ID": "1_2"}, "SLURM_JOB_ID='1_2'"),
    ],
)
def test_wrong_variables_are_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(MachineError) as caught:
        export_torchrun_variables(dict(environ))
    assert name in str(caught.value)


def test_unequal_nodes() -> None:
    """Three tasks on two nodes: the second task of a node has a local rank beyond the mean."""
    assert rank_info(TASKS) == RankInfo(2, 3, 1, 1, "Slurm")
    assert node_info(TASKS) is None
    assert rank_info({"RANK": "1"}) == RankInfo(0, 1, 0, 1, "alone")

"""Several ranks on one GPU: what each is told, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from weft.hardware.probe import Gpu, Machine, probe
from weft.hardware.shared_devices import act_as_own_host, memory_fraction, multi_process_service, ranks_per_device
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner import ranks


def test_ranks_of_a_device() -> None:
    assert [ranks_per_device(n, 4) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert 0.4 < memory_fraction(2) < 0.5


def test_every_process_is_a_host_of_its_own() -> None:
    environ: dict[str, str] = {}
    act_as_own_host(one_node=True, environ=environ)
    assert str(os.getpid()) in environ["NCCL_HOSTID"]
    assert environ["NCCL_IB_DISABLE"] == "1" and "NCCL_SOCKET_IFNAME" in environ
    act_as_own_host(one_node=False, environ=(named := {"NCCL_HOSTID": "mine"}))
    assert named == {"NCCL_HOSTID": "mine"}


def test_without_mps_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with multi_process_service() as environment:
        assert environment == {}


def one_gpu() -> Machine:
    return replace(probe(), gpus=(Gpu(0, "NVIDIA H200", 141.0),))


def job(**sections: object) -> Job:
    return parse_job({"model": {"shape": "gpt2-tiny"}, **sections})


def test_more_ranks_than_gpus() -> None:
    machine = one_gpu()
    plain, shared = job(), job(cluster={"share_devices": True})
    assert ranks.backend_of(plain, machine, "cuda", 1) == "nccl"
    assert ranks.backend_of(plain, machine, "cuda", 4) == "gloo"
    assert ranks.backend_of(shared, machine, "cuda", 4) == "nccl"
    device = ranks.device_for(shared, machine)
    assert ranks.device_memory(shared, device, machine, 4) == pytest.approx(device.memory_gib * 0.23)
    assert ranks.device_memory(shared, device, machine, 1) == device.memory_gib
    with pytest.raises(JobError, match=r"4 ranks on 1 GPU need cluster.share_devices=true"):
        ranks.backend_of(job(comm={"backend": "nccl"}), machine, "cuda", 4)

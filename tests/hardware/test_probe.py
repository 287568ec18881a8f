"""The probe, on the machine that runs the tests."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from weft.hardware.probe import _cpu_name, probe, visible


def test_the_machine_is_described(tmp_path: Path) -> None:
    machine = probe(tmp_path / "not" / "yet")
    assert 1 <= machine.cores_physical <= machine.cores_logical <= (os.cpu_count() or 1)
    assert 0 < machine.memory_available_gib <= machine.memory_gib
    assert machine.memory_gib * 2**30 <= psutil.virtual_memory().total
    assert machine.cpu
    assert machine.hostname
    assert machine.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert machine.disk_free_gib > 0
    assert machine.shm_gib is None or machine.shm_gib > 0
    assert machine.driver is not None or not machine.gpus


def test_processors_without_a_name_are_probed_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/cpuinfo of Arm has no names. Python's platform.processor would start `uname -p` for each command."""
    monkeypatch.setattr("weft.hardware.probe._read", lambda path: "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.processor", lambda: pytest.fail("a process would be started"))
    assert _cpu_name() == platform.machine()


def test_the_affinity_mask_is_respected() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from weft.hardware.probe import probe; m = probe(); print(m.cores_physical, m.cores_logical)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["1", "1"]
    assert out.stderr == ""


def test_job_and_hardware_import_no_torch() -> None:
    code = (
        "import sys, weft.job, weft.job.files.run_folder, weft.hardware, weft.hardware.doctor;"
        "from weft.hardware.probe import probe; probe();"
        "print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bb, 0", [1, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("1,1", [1]),
        ("GPU-", []),
        ("MIG-1/2", [0, 1, 2]),
    ],
)
def test_cuda_visible_devices_is_respected(setting: str | None, kept: list[int]) -> None:
    assert visible(["GPU-aa11", "GPU-bb22", "GPU-cc33"], setting) == kept

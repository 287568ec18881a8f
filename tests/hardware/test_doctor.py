"""The checks of weft doctor and their remedies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.hardware import doctor
from weft.hardware.doctor import Check, diagnose, to_json, worst
from weft.hardware.probe import Gpu, Machine

ROOT = Path(__file__).resolve().parents[2]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {c.name: c for c in checks}


def diagnose_elsewhere(code: str, *python_flags: str, **env: str) -> dict[str, dict[str, str]]:
    """Diagnose in another process, so that its limits and its environment can be made bad."""
    script = f"{code}\nfrom weft.hardware.doctor import diagnose, to_json\nprint(to_json(diagnose('.')))"
    out = subprocess.run(
        [sys.executable, *python_flags, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert out.returncode == 0, out.stderr
    return {c["name"]: c for c in json.loads(out.stdout)["checks"]}


def test_this_machine_does_not_fail(tmp_path: Path) -> None:
    checks = diagnose(tmp_path)
    assert [c for c in checks if c.status == "fail"] == []
    assert {"python", "torch", "pydantic", "cores", "memory", "gpu", "disk", "runs/", "loopback"} <= set(
        by_name(checks)
    )
    assert list(tmp_path.iterdir()) == []


def test_every_problem_has_a_remedy(tmp_path: Path) -> None:
    assert all(c.remedy for c in diagnose(tmp_path) if c.status != "ok")


def test_json_has_the_overall_status() -> None:
    ok, warn, fail = Check("a", "ok", "x"), Check("b", "warn", "y", "do"), Check("c", "fail", "z", "do")
    assert (worst([ok]), worst([ok, warn]), worst([warn, fail, ok])) == ("ok", "warn", "fail")
    result = json.loads(to_json([ok, fail]))
    assert result["status"] == "fail"
    assert result["checks"][1] == {"name": "c", "status": "fail", "detail": "z", "remedy": "do"}


def test_an_old_python_fails() -> None:
    check = doctor.check_python((3, 10, 2))
    assert check.status == "fail"
    assert "install Python 3.11 or newer" in check.remedy


def test_windows_fails_and_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    check = doctor.check_python((3, 12, 1))
    assert check.status == "fail" and check.remedy == "train inside WSL; weft plan works here"


def test_an_old_or_missing_library_fails_with_the_command_to_run() -> None:
    old = doctor.check_version("pydantic", (99, 1))
    assert old.status == "fail"
    assert "is older than 99.1" in old.detail
    assert old.remedy == "pip install --upgrade 'pydantic>=99.1'"
    missing = doctor.check_version("no-such-library", ())
    assert (missing.status, missing.detail, missing.remedy) == (
        "fail",
        "not installed",
        "pip install 'no-such-library'",
    )


def test_an_environment_without_torch_and_psutil(tmp_path: Path) -> None:
    import pydantic

    site = Path(pydantic.__file__).parents[1]
    for entry in site.iterdir():
        if entry.name.startswith(("pydantic", "annotated_types", "typing_", "yaml", "_yaml", "PyYAML", "pyyaml")):
            (tmp_path / entry.name).symlink_to(entry)
    checks = diagnose_elsewhere("", "-S", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert checks["torch"]["remedy"] == "pip install 'torch>=2.11'"
    assert checks["psutil"]["status"] == "fail"
    assert checks["pydantic"]["status"] == "ok"
    assert checks["loopback"]["status"] == "ok"


def test_a_low_limit_and_no_compiler_are_warnings() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))"
    checks = diagnose_elsewhere(code, PATH="/nonexistent", CXX="")
    assert checks["open files"]["status"] == "warn"
    assert checks["open files"]["remedy"] == "ulimit -n 512"
    assert checks["compiler"]["status"] == "warn"
    assert "torch.compile" in checks["compiler"]["remedy"]


def test_runs_that_cannot_be_written_fail(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, not a folder")
    check = by_name(diagnose(tmp_path))["runs/"]
    assert check.status == "fail"
    assert "Not a directory" in check.detail
    assert "set runs_dir" in check.remedy


def test_low_disk_and_shared_memory() -> None:
    assert doctor.check_disk(0.05).status == "fail"
    assert doctor.check_disk(1.0).status == "warn"
    assert "--shm-size" in doctor.check_shm(0.0625).remedy
    assert doctor.check_shm(None).status == "ok"


def machine_with(*gpus: str) -> Machine:
    found = tuple(Gpu(i, name, 139.8) for i, name in enumerate(gpus))
    return Machine("h", "3.12.1", "cpu", 8, 16, 64.0, 60.0, found, "550.54", 100.0, 8.0)


def test_a_gpu_under_a_cpu_build_of_torch_is_a_warning() -> None:
    gpu, cuda = doctor.check_gpus(
        machine_with("NVIDIA H200", "NVIDIA H200"), {"__version__": "2.13.0+cpu", "cuda": None}
    )
    assert gpu.detail.startswith("2 × NVIDIA H200 (h200-sxm); 140 GiB each; driver 550.54")
    assert cuda.status == "warn"
    assert "built without CUDA" in cuda.detail
    assert "pip install --force-reinstall torch" in cuda.remedy


def test_gpus_that_are_hidden_are_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (gpu,) = doctor.check_gpus(machine_with(), {})
    assert gpu.status == "warn"
    assert "CUDA_VISIBLE_DEVICES=''" in gpu.detail
    assert "unset CUDA_VISIBLE_DEVICES" in gpu.remedy


def test_a_cuda_build_that_reaches_no_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, cuda = doctor.check_gpus(machine_with("Tesla T4"), {"__version__": "2.13.0", "cuda": "13.0"})
    assert cuda.status == "fail"
    assert "driver 550.54 may be too old for CUDA 13.0" in cuda.remedy


def test_torchs_build_is_read_without_importing_it() -> None:
    code = (
        "import sys; from weft.hardware.doctor import torch_build;"
        "print(torch_build()['__version__'], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, imported = out.stdout.split()
    assert version[0].isdigit()
    assert imported == "False"

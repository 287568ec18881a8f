"""Energy counters, the account of a run, health of GPUs, and power caps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.extensions.energy.energy_account import EnergyAccount, StepEnergy
from weft.extensions.energy.energy_sources import GpuEnergy, HostEnergy
from weft.extensions.energy.health import GpuHealth
from weft.extensions.energy.monitor import DeviceMonitor
from weft.extensions.energy.power_cap import PowerCap, restore_limits
from weft.hardware.nvml_device import NvmlDevice
from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.watch.device_meters import NO_FIGURES


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


class FakeNvml:
    """The part of pynvml that Weft calls, with one GPU whose figures tests set."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1, 0, 1
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_COUNT = 2, 2
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.power, self.energy, self.celsius, self.clock, self.reasons = 300_000, 1_000_000, 50, 1980, 0
        self.limit, self.ecc, self.links, self.xids = 700_000, {0: 0, 1: 0}, 0, list[int]()
        self.root = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise FakeError("Not Found")
        return "gpu"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return "gpu"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self.clock

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, kind: int) -> int:
        return 87

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return self.celsius

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=80)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self.power

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.energy < 0:
            raise FakeError("Not Supported")
        return self.energy

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
        return self.limit

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: str) -> tuple[int, int]:
        return 200_000, 700_000

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, milliwatts: int) -> None:
        if not self.root:
            raise FakeError("Insufficient Permissions")
        self.limit = milliwatts

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return self.ecc[kind]

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: str, link: int, counter: int) -> int:
        if link:
            raise FakeError("Not Supported")
        return self.links

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None: ...

    def nvmlEventSetWait_v2(self, events: str, timeout: int) -> Any:
        if not self.xids:
            raise FakeError("Timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def gpu(nvml: FakeNvml) -> NvmlDevice:
    return NvmlDevice(nvml=nvml)


def test_a_gpu_is_counted_by_its_counter_or_its_power(nvml: FakeNvml, gpu: NvmlDevice) -> None:
    meter = GpuEnergy(gpu)
    nvml.energy += 5_000
    assert meter.read() == 5
    nvml.energy = 1_000  # the driver was loaded again
    assert meter.read() == 5
    nvml.energy += 2_000
    assert meter.read() == 7
    nvml.energy, now = -1, [0.0]
    meter = GpuEnergy(gpu, clock=lambda: now[0])
    nvml.power, now[0] = 500_000, 2.0
    assert meter.read() == pytest.approx(800)


def domain(root: Path, folder: str, name: str, joules: float, highest: float = 100.0) -> Path:
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (path / "max_energy_range_uj").write_text(f"{highest * 1e6:.0f}\n")
    return path


def test_processors_are_counted_once(tmp_path: Path) -> None:
    for folder, name in (
        ("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"),
        ("intel-rapl:1", "package-1"), ("intel-rapl:2", "psys"), ("dtpm", "other"),
    ):  # fmt: skip
        domain(tmp_path, folder, name, 90)
    meter = HostEnergy(tmp_path)
    assert len(meter.domains) == 3 and meter.memory
    for folder, joules in (("intel-rapl:0", 95), ("intel-rapl:0:1", 91), ("intel-rapl:1", 4)):  # 1 has started again
        (tmp_path / folder / "energy_uj").write_text(f"{joules * 1e6:.0f}")
    assert meter.read() == pytest.approx(5 + 1 + 14)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("not a number")
    assert meter.read() == pytest.approx(20)
    assert HostEnergy(tmp_path / "none").domains == [] and HostEnergy(tmp_path / "none").read() == 0


def test_the_account_marks_estimates() -> None:
    account = EnergyAccount(co2_g_per_kwh=500, usd_per_hour=4.0)
    assert account.metrics() == {}
    for _ in range(10):
        account.add(StepEnergy(1.0, 1000, device_j=300, host_j=60, cpu_s=0, memory_gib=0, sent_bytes=1e9))
    found = account.metrics()
    assert found["power_w"] == 361 and found["energy_measured_share"] == pytest.approx(360 / 361, abs=1e-4)
    kwh = 3610 / 3.6e6
    assert found["energy_kwh"] == pytest.approx(kwh, rel=1e-4) and found["co2_g"] == pytest.approx(kwh * 500, rel=1e-4)
    assert found["tokens_per_joule"] == pytest.approx(1e4 / 3610, rel=1e-4)
    assert found["cost_usd"] == pytest.approx(4 / 360, rel=1e-4)
    account.add(StepEnergy(1.0, 1000, 0, 0, cpu_s=2.0, memory_gib=8.0, sent_bytes=0))
    assert account.by_part["processors (estimated)"] == 12 and account.by_part["memory (estimated)"] == 3
    later = EnergyAccount(500, None)
    later.resume(found["energy_kwh"], found["energy_measured_share"])
    later.add(StepEnergy(1.0, 1000, 361, 0, 0, 0, 0))
    assert later.metrics()["energy_kwh"] == pytest.approx(3971 / 3.6e6, rel=1e-4) and "cost_usd" not in later.metrics()


def test_new_errors_of_a_gpu_are_reported_once(nvml: FakeNvml, gpu: NvmlDevice) -> None:
    result: list[tuple[str, str]] = []
    health = GpuHealth(gpu, lambda kind, text: result.append((kind, text)))

    def look() -> list[tuple[str, str]]:
        result.clear()
        health.look(gpu.sample())
        return list(result)

    nvml.ecc = {0: 4, 1: 1}  # errors from before the run
    assert look() == []
    nvml.ecc, nvml.links, nvml.xids = {0: 5, 1: 3}, 1, [79]
    assert look() == [
        ("xid", "GPU 0 reports XID 79: the GPU has fallen off the bus"),
        ("ecc", "GPU 0 has 1 new memory errors, corrected by ECC"),
        ("ecc", "GPU 0 has 2 new memory errors that ECC could not correct"),
        ("nvlink", "GPU 0 has 2 new errors of its NVLinks"),
    ]
    nvml.celsius = 85
    assert look() == [("overheat", "GPU 0 is at 85 °C; it slows down at 87 °C")] and look() == []
    nvml.reasons, nvml.clock, nvml.celsius = 0x4, 990, 60
    assert look() == look() == look() == []  # every GPU reaches its own limit under full load
    nvml.limit, nvml.reasons = 300_000, 0x4 | 0x20
    assert [look() for _ in range(3)][-1] == [
        ("throttle", "GPU 0 lowers its clock because it is too hot, to 50 % of the highest")
    ]
    assert health.share("power") == pytest.approx(6 / 10) and health.share("thermal") == pytest.approx(3 / 10)
    nvml.reasons = 0
    look()
    nvml.reasons = 0x4
    assert [look() for _ in range(3)][-1][0][1].startswith("GPU 0 lowers its clock because of its power limit")


def test_figures_since_the_last_step(nvml: FakeNvml, gpu: NvmlDevice, tmp_path: Path) -> None:
    path = domain(tmp_path, "intel-rapl:0", "package-0", 10)
    monitor = DeviceMonitor(gpu, HostEnergy(tmp_path), lambda kind, text: None, interval_s=1000)
    monitor.close()  # the thread has taken its first sample
    nvml.energy += 3_000
    (path / "energy_uj").write_text("12000000")
    nvml.limit, nvml.reasons = 400_000, 0x4
    monitor.look()
    found = monitor.figures()
    assert (found.joules, found.host_joules, found.watts, found.celsius) == (3, 2, 300, 50)
    assert (found.clock_share, found.utilisation, found.throttled_power) == (1, 0.8, 0.5)
    assert monitor.figures().joules == 0
    nvml.limit = 700_000
    assert monitor.figures().throttled_power == 0
    assert DeviceMonitor(None, None, lambda kind, text: None).figures() == NO_FIGURES


def test_a_power_cap_is_restored(nvml: FakeNvml, gpu: NvmlDevice, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    nvml.limit = 650_000
    cap = PowerCap(gpu, run)
    assert cap.set(400) == "" and nvml.limit == 400_000
    cap.restore()
    assert nvml.limit == 650_000 and not list(tmp_path.iterdir())
    cap.set(400)
    again = PowerCap(gpu, run)  # the rank was killed and replaced
    again.set(300)
    assert nvml.limit == 300_000
    restore_limits(run, lambda index: gpu)
    assert nvml.limit == 650_000 and not list(tmp_path.iterdir())
    assert "takes power limits from 200 to 700 W, not 100 W" in cap.set(100) and not list(tmp_path.iterdir())
    nvml.root = False
    assert "root may set it" in cap.set(400) and nvml.limit == 650_000
    (tmp_path / ".power-limit-x.json").write_text("{")
    (tmp_path / ".power-limit-0.json").write_text(json.dumps({"watts": "?"}))
    restore_limits(run, lambda index: gpu)
    assert nvml.limit == 650_000
    with pytest.raises(MachineError, match="does not know the GPU 3"):
        NvmlDevice(3, nvml=nvml)

"""One NVIDIA GPU through NVML: power, energy, temperature, clocks, limits and error counters. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.job.errors import MachineError

THROTTLE_BITS = {
    "power": 0x4 | 0x80,  # software power cap, external power brake
    "thermal": 0x20 | 0x40,  # software and hardware thermal slowdown
    "hardware": 0x8,  # hardware slowdown
}
"""Clock event reasons of NVML by what limits the clock."""
ECC_KINDS = {"corrected": 0, "uncorrected": 1}


@dataclass(frozen=True)
class GpuSample:
    """Figures of a GPU at one moment; None where the driver does not report one."""

    watts: float | None = None
    joules: float | None = None
    """The energy counter, since the driver was loaded."""
    celsius: float | None = None
    clock_share: float | None = None
    """Clock of the multiprocessors as a share of the highest."""
    utilisation: float | None = None
    """Share of the last moments in which a kernel ran."""
    limit_w: float | None = None
    throttled: frozenset[str] = frozenset()
    """Which of THROTTLE_BITS limit the clock."""


class NvmlDevice:
    """A GPU, found by its UUID or its index. Every reading that the driver refuses is None."""

    def __init__(self, index: int = 0, uuid: str | None = None, nvml: Any = None) -> None:
        """`nvml` stands in for pynvml in tests."""
        if nvml is None:
            try:
                import pynvml

                pynvml.nvmlInit()
                nvml = pynvml
            except Exception as error:  # NVML fails in many ways; each means that no GPU is usable
                raise MachineError(f"no NVIDIA driver answers on this machine ({error})") from None
        self.nvml, self.index = nvml, index
        try:
            self.handle = (
                nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid is not None else nvml.nvmlDeviceGetHandleByIndex(index)
            )
            self.index = int(nvml.nvmlDeviceGetIndex(self.handle))
        except nvml.NVMLError as error:
            raise MachineError(f"NVML does not know the GPU {uuid or index} ({error})") from None
        self.max_clock = self._read(lambda: nvml.nvmlDeviceGetMaxClockInfo(self.handle, nvml.NVML_CLOCK_SM))
        self.slowdown_c = self._read(
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(self.handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        )
        """Temperature at which the hardware lowers its clocks."""
        self._xid_events: Any = None

    def _read(self, call: Callable[[], Any]) -> float | None:
        try:
            return float(call())
        except (self.nvml.NVMLError, AttributeError, TypeError, ValueError):
            return None

    def watts(self) -> float | None:
        found = self._read(lambda: self.nvml.nvmlDeviceGetPowerUsage(self.handle))
        return None if found is None else found / 1e3

    def joules(self) -> float | None:
        """The energy counter, which GPUs have since Volta."""
        found = self._read(lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))
        return None if found is None else found / 1e3

    def limit_w(self) -> float | None:
        found = self._read(lambda: self.nvml.nvmlDeviceGetPowerManagementLimit(self.handle))
        return None if found is None else found / 1e3

    def limit_is_lowered(self) -> bool:
        """Whether the power limit is below the one that the GPU has by default."""
        usual = self._read(lambda: self.nvml.nvmlDeviceGetPowerManagementDefaultLimit(self.handle))
        now = self.limit_w()
        return usual is not None and now is not None and now < 0.98 * usual / 1e3

    def limits_w(self) -> tuple[float, float] | None:
        """Lowest and highest power limit that can be set."""
        try:
            low, high = self.nvml.nvmlDeviceGetPowerManagementLimitConstraints(self.handle)
        except (self.nvml.NVMLError, AttributeError):
            return None
        return low / 1e3, high / 1e3

    def set_limit(self, watts: float) -> None:
        """Set the power limit; needs root."""
        allowed = self.limits_w()
        if allowed is not None and not allowed[0] <= watts <= allowed[1]:
            raise MachineError(
                f"GPU {self.index} takes power limits from {allowed[0]:.0f} to {allowed[1]:.0f} W, not {watts:g} W"
            )
        try:
            self.nvml.nvmlDeviceSetPowerManagementLimit(self.handle, round(watts * 1e3))
        except self.nvml.NVMLError as error:
            raise MachineError(f"the power limit of GPU {self.index} cannot be set: {error}; root may set it") from None

    def sample(self) -> GpuSample:
        nvml, handle = self.nvml, self.handle
        clock = self._read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        used = self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return GpuSample(
            self.watts(), self.joules(),
            self._read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            clock / self.max_clock if clock is not None and self.max_clock else None,
            None if used is None else used / 100, self.limit_w(), self.throttled(),
        )  # fmt: skip

    def throttled(self) -> frozenset[str]:
        nvml = self.nvml
        call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        call = call or getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        bits = int((self._read(lambda: call(self.handle)) if call else None) or 0)
        return frozenset(kind for kind, mask in THROTTLE_BITS.items() if bits & mask)

    def error_counters(self) -> dict[str, int]:
        """ECC errors since the last reboot by kind, and errors of all NVLinks."""
        nvml, found = self.nvml, {}
        for kind, number in ECC_KINDS.items():
            count = self._read(partial(_call, nvml, "nvmlDeviceGetTotalEccErrors", self.handle, number, 0))
            if count is not None:
                found[f"ecc_{kind}"] = int(count)
        links = 0
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
            for counter in range(getattr(nvml, "NVML_NVLINK_ERROR_COUNT", 4)):
                count = self._read(partial(_call, nvml, "nvmlDeviceGetNvLinkErrorCounter", self.handle, link, counter))
                if count is None:
                    break
                links += int(count)
        found["nvlink"] = links
        return found

    def new_xids(self) -> list[int]:
        """XID errors of this GPU since the last call."""
        nvml, found = self.nvml, list[int]()
        try:
            if self._xid_events is None:
                self._xid_events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(self.handle, nvml.nvmlEventTypeXidCriticalError, self._xid_events)
            while True:
                found.append(int(nvml.nvmlEventSetWait_v2(self._xid_events, 0).eventData))
        except (nvml.NVMLError, AttributeError):  # a timeout: there are no more; or the driver has no events
            return found


def _call(nvml: Any, function: str, *args: Any) -> Any:
    return getattr(nvml, function)(*args)

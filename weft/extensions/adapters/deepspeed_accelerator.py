"""`get_accelerator()` of DeepSpeed: the device of this rank, by the names that scripts use."""

from __future__ import annotations

import torch

from weft.hardware.rank_environment import rank_info
from weft.job.errors import JobError


class DeviceAccelerator:
    """The GPUs of this host, or its CPU."""

    _name = "cuda" if torch.cuda.is_available() else "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda:1`, or `cpu`."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(rank_info().local_rank if device_index is None else device_index))

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def set_device(self, device_index: int) -> None:
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return self._name == "cuda"

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def __getattr__(self, name: str) -> None:
        raise JobError(f"get_accelerator().{name} is not supported; torch.{self._name} may have it")


def get_accelerator() -> DeviceAccelerator:
    """The device of this rank."""
    return DeviceAccelerator()

"""Devices, links and this machine: a catalog of facts, a probe, and a doctor."""

from weft.hardware.catalog import (
    DEVICES,
    NETWORKS,
    Device,
    Network,
    device_by_product,
    find_device,
    find_network,
)
from weft.hardware.doctor import Check, diagnose, to_json
from weft.hardware.probe import Gpu, Machine, probe

__all__ = [
    "DEVICES",
    "NETWORKS",
    "Check",
    "Device",
    "Gpu",
    "Machine",
    "Network",
    "device_by_product",
    "diagnose",
    "find_device",
    "find_network",
    "probe",
    "to_json",
]

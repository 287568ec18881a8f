"""Devices, links and this machine: a catalog of facts, a probe, and a doctor."""

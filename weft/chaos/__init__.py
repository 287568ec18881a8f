"""Fault injection: `weft chaos` runs a job, injects faults, and compares it with the undisturbed run."""

"""Measurements on this machine: calibration, collectives and step profiles."""

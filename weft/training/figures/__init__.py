"""Figures of a run: communication, energy, gradient noise, time lines and slices."""

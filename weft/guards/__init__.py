"""Checks of the start and of every training step: non-finite values, spikes, corruption, stragglers, out of memory."""

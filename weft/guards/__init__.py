"""Checks of every training step: non-finite values, spikes, corruption, stragglers, out of memory."""

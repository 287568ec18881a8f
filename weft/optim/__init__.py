"""Optimizers, learning-rate schedules, gradient clipping and the moving average of the weights."""

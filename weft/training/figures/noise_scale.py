"""The gradient noise scale: the batch at which the noise of a gradient is as large as the gradient itself.

From the norms of the gradients of one replica's samples and of all samples (McCandlish et al., 2018, appendix A.1).
Batches much smaller than it gain almost linearly from more samples; larger ones waste them.
"""

from __future__ import annotations

from collections import deque

WINDOW_STEPS, MIN_STEPS = 64, 16
"""Steps whose mean is taken, and how many are needed for a first value."""


class NoiseScale:
    """The noise scale over the last steps, in samples."""

    def __init__(self) -> None:
        self.signal: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Unbiased estimates of the squared norm of the true gradient."""
        self.noise: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Unbiased estimates of the variance of one sample's gradient."""

    def add(self, of_replica: float, of_all: float, batch: int, replicas: int) -> None:
        """Add a step: the mean square norm of the replicas' gradients, and the square norm of their mean."""
        small = batch / replicas
        self.signal.append((batch * of_all - small * of_replica) / (batch - small))
        self.noise.append((of_replica - of_all) / (1 / small - 1 / batch))

    @property
    def samples(self) -> float | None:
        """The noise scale; None while too little is known, or where the noise hides the gradient."""
        signal = sum(self.signal)
        return sum(self.noise) / signal if len(self.signal) >= MIN_STEPS and signal > 0 else None

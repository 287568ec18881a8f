"""Your own modules: what they take, what they return, their losses and metrics."""

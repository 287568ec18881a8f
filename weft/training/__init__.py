"""The training loop, its state, and the entry point of a rank."""

"""Expert parallelism: token exchange, replicated experts and load statistics."""

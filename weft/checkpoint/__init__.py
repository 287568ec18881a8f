"""Checkpoints on disk and snapshots in memory."""

"""Keeping a run alive: snapshots in memory, a board that shows what every rank does, and a supervisor that reads it."""

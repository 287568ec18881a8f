"""Modules that tests share: commands, ranks, parity checks, user modules."""

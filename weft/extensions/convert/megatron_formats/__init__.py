"""Megatron-LM: its arguments and scripts, by subject."""

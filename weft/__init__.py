"""Weft weaves one training run across any number of devices."""

"""Towers: encoders of one model, each spread over ranks by a layout of its own."""

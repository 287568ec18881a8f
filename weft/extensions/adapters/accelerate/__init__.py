"""Loops written for Hugging Face Accelerate."""

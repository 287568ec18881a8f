"""Step time: compute, collectives, pipeline schedule and compression."""

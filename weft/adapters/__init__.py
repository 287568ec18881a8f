"""Training loops written for other libraries, on Weft's ranks, layouts and checkpoints."""

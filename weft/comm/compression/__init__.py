"""Compressed gradients: codecs, sums of encoded messages, the warm-up, and the adaptive choice of a codec."""

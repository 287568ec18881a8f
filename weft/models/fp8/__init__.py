"""Products in fp8: linear layers, gated feed-forward parts and the head."""

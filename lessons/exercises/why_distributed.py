"""How much memory, and how long? Replace each ... by your answer, then run: weft lesson why_distributed --check"""


def training_bytes(weights: float) -> float:
    """Bytes of mixed-precision training with AdamW on one device: bf16 weights, fp32 gradients, fp32 master
    weights and two moments in fp32. Activations are not counted."""
    return ...


def training_days(weights: float, tokens: float, devices: int, flops: float, mfu: float) -> float:
    """Days to train on `tokens` tokens. A token costs 6 operations a weight; a device reaches the share `mfu`
    of its peak of `flops` operations a second."""
    return ...

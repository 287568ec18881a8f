"""Does it fit? Replace each ... by your answer, then run: weft lesson choosing_a_layout --check"""


def smallest_shards(weights: float, memory: float, activations: float) -> int:
    """The smallest power of two of devices on which states of 16 bytes a weight, split evenly, fit into
    `memory` bytes a device beside `activations` bytes."""
    return ...


def dp_and_tp(devices: int) -> list[tuple[int, int]]:
    """Every (dp, tp) with dp · tp = devices, tp from small to large."""
    return ...

"""Loss scale and recomputation. Replace each ... by your answer, then run: weft lesson precision_and_memory --check"""


def next_scale(scale: float, good: int, finite: bool, interval: int) -> tuple[float, int]:
    """Scale and count of good steps after a step. A step with a gradient that is not finite halves the scale
    and sets the count to 0. The step that makes the count reach `interval` doubles the scale and sets the
    count to 0."""
    return ...


def recompute_cost(layers: int, recomputed: int) -> float:
    """Operations of a step in which `recomputed` of `layers` layers are recomputed, divided by those without
    recomputation. The backward pass of a layer costs twice its forward pass."""
    return ...

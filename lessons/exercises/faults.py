"""When to save. Replace each ... by your answer, then run: weft lesson faults --check"""


def interval(save_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose least: save_s / interval for saving and interval / (2 · mtbf_s) for
    work done again."""
    return ...


def resume_from(records: list[tuple[int, bool]]) -> int:
    """The step to resume from. A record is a step and whether its bytes are those that were written. 0 if none
    is good."""
    return ...

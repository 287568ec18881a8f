"""Right answers to exercises/faults.py. Try it yourself first."""


def interval(save_s: float, mtbf_s: float) -> float:
    return (2 * save_s * mtbf_s) ** 0.5


def resume_from(records: list[tuple[int, bool]]) -> int:
    return max((step for step, good in records if good), default=0)

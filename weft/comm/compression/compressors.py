"""The built-in gradient compressors. A new one is an entry here, or in a module of a job's `extensions`."""

from __future__ import annotations

import math

from weft.job.compression import COMPRESSORS, CompressionKind, Number


def _normal_above(times: float) -> float:
    """Share of normally distributed elements above so many times their root mean square."""
    return math.erfc(times / math.sqrt(2))


_CODECS = "weft.comm.compression.codecs"
_SHARE = Number(0.01, "a share of the elements above 0 and up to 1", lambda x: 0 < x <= 1)
_TIMES = Number(3.0, "a number above 0", lambda x: 0 < x < math.inf)
_RANK = Number(4, "a whole number from 1 up", lambda x: x >= 1 and x == x // 1)

for entry in (
    CompressionKind("none", "Gradients as they are.", f"{_CODECS}:none", 0.0, 4.0, 0.0),
    CompressionKind(
        "fp16", "fp16 with a power of two for each block.", f"{_CODECS}:fp16", 2.01, 2.01, 28.0,
        summing=(13.0, 0.0), scattering=(12.0, 0.0), gathering=(11.0, 0.0),
    ),
    CompressionKind(
        "bf16", "bf16, rounded stochastically.", f"{_CODECS}:bf16", 2.0, 2.0, 20.0,
        summing=(6.5, 3.0), scattering=(9.0, 3.0), gathering=(7.0, 0.0),
    ),
    CompressionKind(
        "int8", "8-bit integers, rounded stochastically.", f"{_CODECS}:int8", 1.016, 1.03, 28.0,
        summing=(3.0, 3.5), scattering=(6.3, 3.2),
    ),
    CompressionKind(
        "int4", "4-bit integers with error feedback.", f"{_CODECS}:int4", 0.53, 1.03, 40.0, 4.0,
        summing=(1.8, 5.0), scattering=(5.6, 4.2),
    ),
    CompressionKind(
        "topk", "That share of the elements, the largest.", f"{_CODECS}:topk", 0.06, 1.03, 32.0, 4.0,
        summing=(4.5, 0.0), scattering=(4.4, 0.0), number=_SHARE, share=lambda share: share, ramped=True,
    ),
    CompressionKind(
        "threshold", "Elements above so many times their root mean square.", f"{_CODECS}:threshold", 0.02, 1.03,
        40.0, 4.0, summing=(4.5, 0.0), scattering=(4.4, 0.0), number=_TIMES, share=_normal_above, ramped=True,
    ),
    CompressionKind(
        "powersgd", "Matrices of that rank (Vogels et al. 2019).", f"{_CODECS}:powersgd", 0.0, 1.03, 24.0, 4.0,
        summing=(8.0, 0.0), scattering=(12.0, 0.0), number=_RANK, ramped=True, low_rank=True,
    ),
    CompressionKind(
        "onebit", "Signs and a mean size (Seide et al. 2014).", f"{_CODECS}:onebit", 0.13, 1.03, 32.0, 4.0,
        summing=(8.3, 0.0), scattering=(8.7, 0.0), ramped=True, ramped_through="int4",
    ),
    # its cost is taken as int8's, which is in the middle of what it chooses from
    CompressionKind(
        "adaptive", "The least compression that the link needs.", f"{_CODECS}:none", 1.016, 1.03, 28.0, 4.0,
        adaptive=True,
    ),
):  # fmt: skip
    COMPRESSORS.register(entry)

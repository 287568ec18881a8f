"""The entry point of a rank into which `weft chaos` injects faults: `python -m weft.chaos.rank RUN`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft.training import rank, supervised_rank

if TYPE_CHECKING:
    from weft.training.session import Session


def inject(session: Session) -> None:
    """Let the injected faults of this run reach the session."""
    from weft.chaos.injection import arm  # imports torch, which signals must not wait for

    arm(session)


if __name__ == "__main__":
    supervised = "WEFT_MEMORY" in os.environ
    rank.end(supervised_rank.main(inject) if supervised else rank.run_here(hook=inject))

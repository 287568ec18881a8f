"""The entry point of a rank into which `weft chaos` injects faults, started as a module with the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.training import rank, supervised_rank

if TYPE_CHECKING:
    from weft.training.session import Session


def inject(session: Session) -> None:
    """Add the injected faults of this run to the session."""
    from weft.extensions.chaos.rank_faults import arm  # imports torch, so only after signal handlers are installed

    arm(session)


if __name__ == "__main__":
    supervised = supervised_rank.is_supervised()
    rank.exit_process(supervised_rank.main(inject) if supervised else rank.run_launched_rank(hook=inject))

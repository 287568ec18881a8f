"""The resilience section of a job: what a run does about faults."""

from __future__ import annotations

from pydantic import Field

from weft.job.section import Section


class Resilience(Section):
    """What a run does about faults. The defaults keep it alive and change nothing about its numbers."""

    bad_steps: int = Field(3, ge=1)
    """Steps in a row whose loss or gradients are not finite after which the run ends as diverged; fewer are skipped."""
    bind: str | None = None
    """Address at which this node's supervisor listens to those of other nodes. Left out: the one that leads to
    MASTER_ADDR; on one machine, loopback."""
    check_every: int = Field(10, ge=0)
    """Steps within which ranks that hold the same weights notice that they differ, and at most so many are lost (from 2
    on); 0 compares never."""
    evict_slow: bool = False
    """Ask for another process in the place of a rank that stays slow."""
    gather_s: float = Field(300.0, gt=0)
    """How long a node waits for the others at the start, and to be taken back after they went on without it."""
    node_lost_s: float = Field(2.4, ge=1)
    """Silence after which a node is lost, and the others go on without it."""
    patience_s: float = Field(1.5, gt=0)
    """Shortest standstill of all ranks that counts as a hang; it grows with the longest pauses the run makes itself."""
    rebalance: bool = True
    """Move sequences from a slow rank to fast ones. The same run within rounding, though not bit for bit."""
    restarts: int = Field(100, ge=0)
    """Faults after which a run gives up. The same fault at the same step ends it sooner."""
    roll_back: bool = True
    """Undo a step whose loss or gradient norm leaves all bounds, and pass over its batch."""
    spares: int = Field(1, ge=0)
    """Processes that have imported everything and wait to take the place of one that is lost."""

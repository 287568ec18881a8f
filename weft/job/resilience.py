"""`resilience`: detection of faults and recovery."""

from __future__ import annotations

from pydantic import Field

from weft.job.section import Section


class Resilience(Section):
    """Fault detection and recovery. The defaults keep a run alive without changing its results."""

    bad_steps: int = Field(3, ge=1, le=10**6)
    """Consecutive steps with a non-finite loss or gradient after which the run ends as diverged; single ones are
    skipped."""
    bind: str | None = None
    """Address on which this node's supervisor listens for other nodes. Default: the address of the route to
    MASTER_ADDR; on one machine, loopback."""
    check_every: int = Field(10, ge=0, le=10**12)
    """Steps between comparisons of replicated weights for silent data corruption; from 2 on, also the most steps that
    are lost when they differ. 0 turns this off."""
    evict_slow: bool = False
    """Replace the process of a rank that stays slow."""
    gather_s: float = Field(300.0, gt=0)
    """Time that a node waits for the others at the start, and to rejoin after they continued without it."""
    node_lost_s: float = Field(2.4, ge=1)
    """Heartbeat timeout of a node: after it the others continue without the node."""
    patience_s: float = Field(1.5, gt=0)
    """Hang timeout: shortest standstill of all ranks that counts as a hang. It grows with the longest normal pause of
    the run."""
    rebalance: bool = True
    """Move sequences from a slow rank to fast ones. The results are the same up to rounding, not bit for bit."""
    restarts: int = Field(100, ge=0, le=10**6)
    """Maximum number of restarts. The same fault at the same step ends the run earlier."""
    roll_back: bool = True
    """Undo a step with an outlier loss or gradient norm, and skip its batch."""
    spares: int = Field(1, ge=0, le=64)
    """Standby processes, started in advance to replace a lost rank."""

"""`parallel`, `memory`, `fp8`, `comm`: how a run is laid over its devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.compression import parse_compression
from weft.job.section import Section


class Parallel(Section):
    """The degree of each axis. -1 stands for the rest of the ranks, on one axis."""

    dp_replicate: int = 1
    """Copies of the model (or of the sharded group) that average their gradients."""
    dp_shard: int = -1
    """Ranks among which the optimizer state, gradients and parameters are cut, as zero says."""
    zero: Literal[1, 2, 3] = 3
    """What dp_shard cuts: 1 the optimizer state, 2 the gradients too, 3 the parameters too."""
    tp: int = 1
    """Ranks among which each matrix is cut."""
    sequence: bool = True
    """With tp: norms and residuals are cut along the sequence."""
    cp: int = 1
    """Ranks among which the sequence is cut."""
    cp_style: Literal["auto", "ring", "ulysses", "hybrid"] = "auto"
    """How the ranks of cp attend to each other's tokens: ring sends keys and values around, ulysses deals out the
    heads, hybrid does the second inside groups and the first between them."""
    pp: int = 1
    """Stages among which the layers are cut."""
    ep: int = 1
    """Ranks among which the experts are cut, laid over dp_shard × cp × tp. -1: as many of these as divide the number of
    experts."""
    ep_exchange: Literal["direct", "two-hop"] = "direct"
    """How tokens reach experts on other nodes: each rank to each, or first inside the node and then between nodes,
    which makes fewer and larger messages. Where ep lies inside a node, both are the same."""
    ep_overlap: bool = False
    """Tokens travel to experts in two halves: one half's experts compute while the other half is under way. Worth it
    where an exchange takes about as long as the experts; products are half as large."""
    ep_rebalance: float = Field(0.0, ge=0, lt=1)
    """At a checkpoint experts change ranks, with all that belongs to them, if the load of the fullest rank since the
    last one would have been less by this share; the model stays the same. 0: never; 0.1 is usual."""
    ep_copies: int = Field(1, ge=0)
    """With ep_rebalance: experts of other ranks that a rank may compute beside its own, in each block. A hot expert's
    tokens are then shared by several ranks, where that saves more than lending its weights costs. 0: experts only
    move."""
    schedule: str = "1f1b"
    """The order of a pipeline's work: naive, gpipe, 1f1b, interleaved-1f1b, zero-bubble (zb-h1, zbv) or dualpipe-v."""
    virtual_stages: int | None = Field(None, ge=1)
    """Stages on each rank of a pipeline. Left out: what the schedule wants, 1 or 2."""
    microbatches: int | Literal["auto"] = "auto"
    """Microbatches of a rank's share of the global batch; the same thing as train.accumulation."""
    split: list[int] | None = None
    """Blocks in each stage, in order. Left out: split by cost, so that no stage is slower than it must be."""

    @field_validator("microbatches")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @field_validator("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    @classmethod
    def _degree(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError("must be at least 1, or -1 for the rest of the ranks")
        return value


class Memory(Section):
    """Where a tensor waits until it is needed."""

    recompute: int | Literal["auto", "none", "selective", "full"] = "auto"
    """What is computed again in the backward pass instead of kept: nothing (none), all but the outputs of matrix
    products and attention (selective), that many blocks (a number), or every block (full). auto is the least that
    fits."""
    budget_gib: float | None = Field(None, gt=0)
    """Memory a rank may use, by which the layout and recompute: auto are chosen. Left out: 90 % of the device's."""
    offload: Literal["none", "activations"] = "none"
    """none keeps everything on the device; activations parks what each block must remember in host memory until its
    backward pass, and computes the rest of the block again but for its attention."""
    chunk: int | Literal["auto"] = "auto"
    """Tokens of a sequence that pass at once through the linear parts of a block (norms, projections, feed-forward),
    which are then computed again chunk by chunk; 0 takes all at once. auto is 0 up to 65,536 tokens a rank."""
    host_gib: float | None = Field(None, ge=0)
    """Host memory that parked activations may take on each rank; what exceeds it stays on the device. Left out: 70 %
    of this machine's, shared by its ranks."""

    @field_validator("chunk")
    @classmethod
    def _tokens(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be a number of tokens, 0 for all at once, or auto")
        return value

    @field_validator("recompute")
    @classmethod
    def _count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be a number of blocks from 0 up, or auto, none, selective or full")
        return value


class Fp8(Section):
    """With precision: fp8, how the numbers of the blocks' matrix products are brought into fp8's small range."""

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale a tensor (fastest), or one for each row and column (finer: an outlier costs only its own row)."""
    amax: Literal["dynamic", "delayed"] = "dynamic"
    """The largest value that a scale is made from: the tensor's own, or (tensorwise) that of the steps before, which
    saves a pass over the tensor and clips what is larger."""
    history: int = Field(16, ge=1)
    """Steps remembered (delayed)."""
    fast_accumulation: Literal["none", "forward", "all"] = "forward"
    """Which products may add up in the tensor cores' own shorter registers, as NVIDIA's GPUs do fastest."""
    head: bool = False
    """Whether the head multiplies in fp8 as well: faster with a large vocabulary, and coarser where it matters most."""
    skip: list[str] = Field(default_factory=list)
    """Layers of the blocks that stay in bf16, as patterns of paths: [blocks.0.*, "*.down"]. Embedding, norms, attention
    and layers whose sizes are no multiples of 16 always do."""


class Comm(Section):
    """How ranks talk."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """auto is nccl where each rank has its own GPU, mpi on CPUs where mpirun started the ranks, gloo elsewhere."""
    allreduce: Literal["auto", "native", "ring", "tree", "hierarchical"] = "auto"
    """How replicas sum their gradients: by the backend's own all-reduce (native, which auto is), or by messages around
    a ring, up and down a tree, or inside each node first and then between nodes (hierarchical)."""
    compression: str = "none"
    """What gradients travel as between data-parallel ranks: as they are (none), rounded (fp16, bf16, int8, int4), the
    largest of them (topk:0.01, that share; threshold:3, those above so many times their root mean square), as matrices
    of a low rank (powersgd:4), as signs (onebit), or as the link asks (adaptive). Weights that dp_shard gathers travel
    in fp16, bf16 or int8 then."""
    compression_warmup: int | Literal["auto"] = "auto"
    """Steps at the beginning in which topk, threshold, powersgd and onebit travel as int8, while gradients still turn
    quickly. From then on less and less is sent: topk and threshold start from a sixth of the numbers, powersgd from
    four times its rank, onebit from int4. auto is 300, or three fifths of a shorter run, or a quarter of a longer one,
    at most 2000; 0 compresses as much as asked for from the first step. adaptive goes no further than int4 until
    then."""
    bucket_mb: float | Literal["auto"] = "auto"
    """Gradients of replicas are summed in buckets of this size, while the backward pass goes on. auto weighs what a
    message costs against what a byte does."""
    timeout_s: float = Field(600.0, gt=0)
    """A collective that takes longer ends the run and names the ranks that did not arrive."""

    @field_validator("compression_warmup")
    @classmethod
    def _steps(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be a number of steps from 0 up, or auto")
        return value

    @field_validator("compression")
    @classmethod
    def _known(cls, value: str) -> str:
        return str(parse_compression(value))

    @field_validator("bucket_mb")
    @classmethod
    def _size(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value <= 0:
            raise ValueError("must be more than 0, or auto")
        return value

"""The sections of a Job. The text under each field is its help; `weft schema` prints it as JSON Schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from weft.job.cluster import Cluster, Failures, Group, Level
from weft.job.compression import parse_compression
from weft.job.resilience import Resilience
from weft.job.section import Section
from weft.job.sync import Sync

__all__ = [
    "Checkpoint", "Cluster", "Comm", "Data", "Experts", "Failures", "Fp8", "Group", "Job", "Level", "Memory", "Model",
    "Optim", "Parallel", "Resilience", "RopeScaling", "Section", "Sync", "Train", "Watch",
]  # fmt: skip


class RopeScaling(Section):
    """How rotary positions are stretched beyond the length a model was trained on."""

    kind: Literal["linear", "ntk", "llama3"] = "llama3"
    """linear divides positions; ntk raises the base; llama3 stretches only the slow frequencies."""
    factor: float = Field(8.0, ge=1)
    """How many times longer the sequences become."""
    original_len: int = Field(8192, ge=1)
    """The length the model was first trained on (llama3)."""
    low_freq: float = Field(1.0, gt=0)
    """Wavelengths longer than original_len / low_freq are stretched in full (llama3)."""
    high_freq: float = Field(4.0, gt=0)
    """Wavelengths shorter than original_len / high_freq are left alone (llama3)."""


class Experts(Section):
    """Feed-forward parts of which each token uses a few. Neither they nor the router have biases."""

    count: int = Field(8, ge=1)
    """Routed experts in each block."""
    top_k: int = Field(2, ge=1)
    """Experts that a token is sent to."""
    ffn: int | None = Field(None, ge=1)
    """Hidden width of one expert. Left out: model.ffn."""
    shared: int = Field(0, ge=0)
    """Experts of the same width that every token uses; they are kept as one part of that many times the width."""
    first_dense: int = Field(0, ge=0)
    """Blocks at the start that keep the plain feed-forward part of width model.ffn."""
    groups: int = Field(1, ge=1)
    """Groups of experts; a token goes to experts of few groups, and so of few nodes."""
    top_groups: int | None = Field(None, ge=1)
    """Groups that a token may use. Left out: all."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's scores into weights."""
    renormalize: bool = True
    """Divide the weights of a token's experts by their sum."""
    scale: float = Field(1.0, gt=0)
    """What the routed experts' sum is multiplied by."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """How load is kept even: an auxiliary loss, a bias that learns from the load, or not at all."""
    aux_weight: float | None = Field(None, ge=0)
    """Weight of the auxiliary loss. Left out: 0.01 with balance aux, else 0."""
    aux_scope: Literal["sequence", "batch"] = "sequence"
    """Whose load the auxiliary loss evens out: each sequence's own, or that of the whole batch of the step before."""
    z_weight: float = Field(0.0, ge=0)
    """Weight of the router z-loss, the square of the scores' log-sum-exp; 0.001 is usual."""
    bias_rate: float = Field(0.001, gt=0)
    """What the bias of an expert moves by in a step (balance bias)."""
    capacity: float | None = Field(None, gt=0)
    """Tokens of a sequence that an expert takes, as a multiple of an even share; later ones are dropped, in training
    alone. Left out: none is dropped."""

    @model_validator(mode="after")
    def _few(self) -> Experts:
        if self.top_k > self.count:
            raise ValueError(f"must not ask for top_k={self.top_k} of count={self.count} experts")
        if self.count % self.groups:
            raise ValueError(f"must split count={self.count} experts evenly, which groups={self.groups} does not")
        groups = self.top_groups or self.groups
        if groups > self.groups:
            raise ValueError(f"must not ask for top_groups={groups} of groups={self.groups}")
        if self.top_k > (room := groups * self.count // self.groups):
            raise ValueError(f"must not ask for top_k={self.top_k} of the {room} experts in top_groups={groups}")
        return self


class Model(Section):
    """What is trained. A shape or a family sets the defaults; every field given here wins over them."""

    shape: str | None = None
    """A named shape, such as tiny, gpt2-125m, llama-1b, llama-8b or llama-405b."""
    module: str | None = None
    """Your own nn.Module, as package.module:Class. `model: package.module:Class` is short for this."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your own module's constructor."""
    loss: str = "auto"
    """For your own module: auto (cross-entropy for integer targets, squared error otherwise) or package.module:function
    taking (outputs, targets) and returning one loss a target."""
    family: Literal["gpt2", "llama", "vit", "mlp"] | None = None
    """gpt2 and llama (decoder-only), vit (an encoder of image patches), mlp (the deep MLP of the lessons)."""
    dim: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    layers: int | None = Field(None, ge=1)
    """Number of blocks (for the MLP: of square layers)."""
    heads: int | None = Field(None, ge=1)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads; fewer than heads is grouped-query attention. Left out: the same as heads."""
    head_dim: int | None = Field(None, ge=1)
    """Width of one head. Left out: dim / heads."""
    ffn: int | None = Field(None, ge=1)
    """Hidden width of the feed-forward part. Left out: 4 × dim (gpt2), 8/3 × dim rounded up to 64 (llama)."""
    vocab: int | None = Field(None, ge=1)
    """Vocabulary size. Left out: the tokenizer's. For vit: the number of classes."""
    max_len: int | None = Field(None, ge=1)
    """Longest sequence of a model with learned positions. Left out: data.seq_len."""
    norm: Literal["layernorm", "rmsnorm"] | None = None
    """Normalisation before each part of a block."""
    norm_eps: float | None = Field(None, gt=0)
    """Added to the variance inside the norm."""
    positions: Literal["learned", "rope"] | None = None
    """How a token knows where it stands."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary positions for longer sequences."""
    activation: Literal["gelu", "swiglu"] | None = None
    """The feed-forward part's non-linearity."""
    tied: bool | None = None
    """Share the token embedding with the output head."""
    bias: bool | None = None
    """Biases in the linear layers and the layer norms."""
    qk_norm: bool | None = None
    """Normalise queries and keys by head before attention."""
    causal: bool | None = None
    """A token sees only those before it."""
    experts: Experts | None = None
    """Experts instead of one feed-forward part (gpt2 and llama)."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Share of activations dropped after the embedding, attention and feed-forward parts; the same in every layout."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"module": value} if ":" in value else {"shape": value}
        return value


class Data(Section):
    """Where samples come from."""

    source: str = "pydoc"
    """pydoc (Python's own reference text), stdlib (its source code), synthetic, the path of a store made by
    `weft data build`, or your own dataset as package.module:name."""
    seq_len: int = Field(128, ge=1)
    """Tokens in a sample."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json. A built store brings its own."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the corpus, at its end, kept for evaluation."""
    mask_documents: bool = False
    """Packed documents do not see one another, positions restart in each, and no token predicts the next document."""
    prefetch: int = Field(2, ge=0)
    """Steps read ahead of the one being computed."""
    record_ids: bool = False
    """Write which samples each rank read at each step to samples/rank-*.jsonl."""


class Train(Section):
    """The recipe: how long, how many samples a step. Batches count sequences."""

    steps: int = Field(600, ge=0)
    """Optimizer steps in the whole run."""
    global_batch: int = Field(32, ge=1)
    """Sequences in one optimizer step, over all ranks."""
    microbatch: int | Literal["auto"] = "auto"
    """Sequences one rank computes at once."""
    accumulation: int | Literal["auto"] = "auto"
    """Microbatches one rank computes in a step. Follows from microbatch, or the other way round."""
    seed: int = Field(0, ge=0, lt=2**62)
    """Fixes the initial weights, the order of samples and the dropout masks, whatever the layout."""
    eval_every: int = Field(100, ge=0)
    """Steps between evaluations on the held-out part; 0 evaluates never."""
    eval_batches: int = Field(8, ge=1)
    """Global batches in one evaluation, at most what the held-out part has."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Probability spread evenly over the vocabulary in the training target."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. auto does so on GPUs, for Weft's own models."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights; 0 keeps none. 0.999 is usual."""
    sync: Sync = Sync()
    """How often ranks that read different samples come together: step, local:8, diloco:50, server:async, server:sync,
    federated, or a section of these."""

    @field_validator("microbatch", "accumulation")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value


class Optim(Section):
    """The optimizer and its learning rate over time."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """adamw, sgd with momentum, adafactor, or muon (muon on the blocks' matrices, adamw on the rest)."""
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd and muon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices, apart from the gradient (sgd adds it to the gradient, as torch does). Vectors never decay."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate falls after warm-up; wsd is warm-up, stable, decay."""
    warmup: float = Field(0.02, ge=0)
    """Warm-up: below 1 a share of all steps, from 1 up a number of steps."""
    min_lr: float = Field(0.1, ge=0, le=1)
    """Where cosine, linear and wsd end, as a share of lr."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of all steps in which wsd decays, at the end."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr with train.global_batch / base_batch."""
    base_batch: int = Field(256, ge=1)
    """The global batch for which lr was chosen (scale_lr)."""

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must be two numbers from 0 to below 1, such as [0.9, 0.95]")
        return value


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
    """Ranks among which the experts are cut, laid over dp_shard × cp × tp."""
    ep_exchange: Literal["direct", "two-hop"] = "direct"
    """How tokens reach experts on other nodes: each rank to each, or first inside the node and then between nodes,
    which makes fewer and larger messages. Where ep lies inside a node, both are the same."""
    ep_rebalance: float = Field(0.0, ge=0, lt=1)
    """At a checkpoint experts change ranks, with all that belongs to them, if the load of the fullest rank since the
    last one would have been less by this share; the model stays the same. 0: never; 0.1 is usual."""
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
    skip: list[str] = Field(default_factory=list)
    """Layers of the blocks that stay in bf16, as patterns of paths: [blocks.0.*, "*.down"]. Embedding, head, norms,
    attention and layers whose sizes are no multiples of 16 always do."""


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
    at most 2000; 0 compresses as much as asked for from the first step."""
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


class Checkpoint(Section):
    """When the state of the run is written, and how much of it is kept."""

    every: int = Field(200, ge=0)
    """Steps between checkpoints; 0 writes only the last. The last step is always written."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints kept."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for ever; 0 keeps none for ever."""
    background: bool = True
    """Training goes on while a checkpoint is written."""


class Watch(Section):
    """What a person sees of the run."""

    every: int = Field(10, ge=1)
    """Steps between plain progress lines."""
    gantt_step: int = Field(5, ge=0)
    """The step of a pipelined run whose time line the report shows; 0 records none."""
    comm_every: int = Field(10, ge=0)
    """Steps between those whose communication is timed: its share of the step, what of it nothing hid, its speed. 0
    times none."""
    trackers: list[str] = Field(default_factory=list)
    """Other programs that are told the metrics; metrics.jsonl is always written."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if value:
            raise ValueError(f"no tracker is named {value[0]!r}; metrics.jsonl is always written, so leave this empty")
        return value


class Job(Section):
    """One training run, as a person describes it."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run lives in runs/NAME."""
    model: Model = Model()
    """What is trained."""
    data: Data = Data()
    """What it is trained on."""
    train: Train = Train()
    """The recipe."""
    optim: Optim = Optim()
    """The optimizer."""
    cluster: Cluster = Cluster()
    """The devices."""
    parallel: Parallel | Literal["auto"] = "auto"
    """The layout: auto, or the degree of each axis."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """What the matrices are multiplied in; weights and optimizer stay fp32. auto is bf16 on GPUs, fp32 on CPUs.
    fp8 is bf16 with the blocks' matrix products in fp8."""
    fp8: Fp8 = Fp8()
    """Scaling, with precision: fp8."""
    memory: Memory = Memory()
    """Recompute and offload."""
    comm: Comm = Comm()
    """Communication."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    resilience: Resilience = Resilience()
    """What is done about faults."""
    watch: Watch = Watch()
    """Progress and metrics."""
    runs_dir: str = "runs"
    """The folder that holds the runs."""

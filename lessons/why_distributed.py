"""Why distributed: where the memory of a model goes, and what a step costs. The text is in why_distributed.md.

weft lesson why_distributed
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.cli.lessons.output import say, show, t

LAYERS, DIM, HEADS, VOCAB, BATCH, LENGTH = 4, 256, 4, 1024, 4, 128
GB = 1e9


class Block(nn.Module):
    """One layer of a transformer: attention, then an MLP four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x [batch, length, dim]
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def parameters(dim: int, layers: int, vocab: int) -> int:
    """Attention has 4 dim² weights, the MLP 8 dim², the norms 2 dim; embedding and head have vocab · dim each."""
    return layers * (12 * dim * dim + 2 * dim) + 2 * vocab * dim


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def kept_bytes(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """The loss, and the bytes that autograd keeps for the backward pass; weights are not counted."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(tokens)
    return loss, sum(kept.values())


def seconds(work: object, times: int = 3) -> float:
    """The shortest of several runs."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()  # type: ignore[operator]
        took.append(time.perf_counter() - began)
    return min(took)


def lesson() -> None:
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(VOCAB, (BATCH, LENGTH))
    optimizer = torch.optim.AdamW(model.parameters())
    _, kept = kept_bytes(model, tokens)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).backward()

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    step_s = seconds(step)
    weights, n = list(model.parameters()), parameters(DIM, LAYERS, VOCAB)
    states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    count = BATCH * LENGTH
    products = LAYERS * 12 * DIM * DIM + VOCAB * DIM  # weights of matrices that multiply
    flops = 6 * products * count + LAYERS * 12 * LENGTH * DIM * count
    activations = LAYERS * (18 * DIM + HEADS + 2) + DIM + VOCAB + 2  # numbers a token
    a = torch.randn(count, DIM)
    b = torch.randn(DIM, 4 * DIM)
    rate = 2 * count * DIM * 4 * DIM / seconds(lambda: a @ b, 10)
    say("A model of {n:,} weights in fp32, {count} tokens a step:", n=n, count=count)
    show([
        (t("weights, bytes"), 4 * n, size(weights)),
        (t("gradients, bytes"), 4 * n, size([w.grad for w in weights])),
        (t("two moments of AdamW, bytes"), 8 * n, size(states)),
        (t("activations, bytes"), 4 * count * activations, kept),
        (t("operations of a step"), flops, counter.get_total_flops()),
        (t("seconds of a step"), flops / rate, step_s),
    ])  # fmt: skip
    with_weft()


def with_weft() -> None:
    """The same arithmetic for 7 billion weights, beside Weft's plan."""
    from weft.job.load import parse_job
    from weft.planner import make_plan

    def planned(devices: int) -> dict[str, float]:
        return make_plan(parse_job({
            "model": {"shape": "llama-7b"}, "data": {"source": "synthetic", "seq_len": 2048}, "precision": "bf16",
            "train": {"global_batch": 64, "microbatch": 1}, "parallel": {"dp_shard": devices, "zero": 3},
            "cluster": {"device": "h200-sxm", "devices_per_node": devices},
        }))[1].predicted  # fmt: skip

    n, one, eight = 6.738e9, planned(1), planned(8)
    say("\nLlama 7B in bf16 with fp32 master weights, in GB a device:")
    show([
        (t("states, 1 device, 18 bytes a weight"), 18 * n / GB, one["states_gib"] * 2**30 / GB),
        (t("states, 8 devices, 16 bytes a weight"), 16 * n / 8 / GB, eight["states_gib"] * 2**30 / GB),
        (t("all, 1 device (an H100 has 80)"), "", one["memory_gib"] * 2**30 / GB),
        (t("all, 8 devices"), "", eight["memory_gib"] * 2**30 / GB),
    ], ("by hand", "Weft"))  # fmt: skip


if __name__ == "__main__":
    lesson()

"""The other trainers of bench/gpu.py, each a function that trains a Llama of one shape on one GPU and reports.

    python bench/peers.py CASE SHAPE STEPS

Hugging Face with Accelerate, torchtitan (from the folder PEERS_SITE), and a bare loop. All of them: random tokens,
fused AdamW, fp32 master weights and Adam states, bf16 products, clipping at 1, no recompute.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WARM = 4
"""Steps that are not counted: compilation, allocation, and the clocks of a cold card."""


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    dim: int
    layers: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    seq: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def flops_per_token(self) -> float:
        """Six for each multiplied weight, and causal attention counted once; norms and the embedding do not count."""
        head = self.dim // self.heads
        block = 2 * self.dim * self.dim + 2 * self.dim * self.kv * head + 3 * self.dim * self.ffn
        return 6.0 * (self.layers * block + self.vocab * self.dim) + 6.0 * self.layers * self.dim * self.seq


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192, 128256, 8192, 2),
    "3b": Shape(3072, 28, 24, 8, 8192, 128256, 8192, 1),
    "tiny": Shape(256, 2, 4, 2, 1024, 1024, 256, 2),
}


def report(times: list[float], began: float, first: float) -> None:
    """Seconds of each step, and when the process and the end of its first step were, as one line for bench/gpu.py."""
    import torch

    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    found = {"step_time_s": statistics.median(times[WARM:]), "peak_gib": peak, "first_step_s": first - began}
    print("RESULT " + json.dumps(found), flush=True)


class Clock:
    """Times steps from idle device to idle device."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.began = float(os.environ.get("BENCH_BEGAN", time.time()))
        self.first = 0.0

    def __call__(self, step: Callable[[], Any]) -> None:
        self._wait()
        began = time.perf_counter()
        step()
        self._wait()
        self.times.append(time.perf_counter() - began)
        self.first = self.first or time.time()

    def report(self) -> None:
        report(self.times, self.began, self.first)

    @staticmethod
    def _wait() -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def hugging_face(s: Shape, steps: int, compiled: bool) -> None:
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        hidden_size=s.dim, intermediate_size=s.ffn, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        num_key_value_heads=s.kv, vocab_size=s.vocab, max_position_embeddings=s.seq, tie_word_embeddings=False,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    accelerator = Accelerator(mixed_precision="bf16")
    with accelerator.device:
        model: Any = LlamaForCausalLM(config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if compiled:
        model = torch.compile(model)
    clock = Clock()

    def step() -> None:
        ids = torch.randint(0, s.vocab, (s.batch, s.seq), device=accelerator.device)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        clock(step)
    clock.report()


def torchtitan(s: Shape, steps: int, compiled: bool, fp8: bool) -> None:
    site = os.environ.get("PEERS_SITE")
    if site:
        sys.path.insert(0, site)
    _stand_in("datasets", Dataset=object, load_dataset=None)
    _stand_in("datasets.distributed", split_dataset_by_node=None)
    if importlib.util.find_spec("tensorboard") is None:
        _stand_in("torch.utils.tensorboard", SummaryWriter=None)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    import torch
    import torchtitan.models.llama3 as llama3
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    # torchtitan derives the hidden width: 8/3 of dim times this, up to the next multiple of 256
    factor = s.ffn / int(2 * 4 * s.dim / 3)
    llama3.llama3_args["bench"] = TransformerModelArgs(
        dim=s.dim, n_layers=s.layers, n_heads=s.heads, n_kv_heads=s.kv, vocab_size=s.vocab, multiple_of=256,
        ffn_dim_multiplier=factor, rope_theta=500000,
    )  # fmt: skip

    class Random(BaseDataLoader):
        def __iter__(self) -> Iterator[Any]:
            while True:
                x = torch.randint(0, s.vocab, (s.batch, s.seq + 1))
                yield {"input": x[:, :-1]}, x[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    usual = llama3.get_train_spec

    def spec() -> Any:
        made = usual()
        made.build_dataloader_fn = lambda **kwargs: Random()
        made.build_tokenizer_fn = None
        return made

    llama3.get_train_spec = spec
    args = [
        "--model.name", "llama3", "--model.flavor", "bench", "--training.seq_len", str(s.seq),
        "--training.local_batch_size", str(s.batch), "--training.steps", str(steps), "--metrics.log_freq", "1",
        "--lr_scheduler.warmup_steps", "2", "--activation_checkpoint.mode", "none", "--optimizer.implementation",
        "fused", *(["--compile.enable"] if compiled else []),
    ]  # fmt: skip
    if fp8:
        args += [
            "--model.converters", "quantize.linear.float8", "--quantize.linear.float8.recipe_name", "rowwise",
            "--quantize.linear.float8.filter_fqns", "output",
        ]  # fmt: skip
    config = ConfigManager().parse_args(args)
    from torchtitan.train import Trainer

    trainer = Trainer(config)
    hidden = trainer.model_parts[0].layers["0"].feed_forward.w1.weight.shape[0]
    if hidden != s.ffn:
        raise SystemExit(f"torchtitan made a hidden width of {hidden}, not {s.ffn}")
    # or the peak would be that since the last line of its log
    trainer.metrics_processor.device_memory_monitor.reset_peak_stats = lambda: None
    clock = Clock()
    one = trainer.train_step
    trainer.train_step = lambda batches: clock(lambda: one(batches))
    trainer.train()
    clock.report()


def _stand_in(name: str, **content: Any) -> None:
    """A module of which torchtitan imports names that this bench never calls."""
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def bare(s: Shape, steps: int) -> None:
    """What a careful person writes by hand: bf16 weights and fp32 masters, compiled blocks, a chunked loss."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = s.dim // s.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)
            self.qkv = nn.Linear(s.dim, (s.heads + 2 * s.kv) * head, bias=False)
            self.o = nn.Linear(s.dim, s.dim, bias=False)
            self.up = nn.Linear(s.dim, 2 * s.ffn, bias=False)
            self.down = nn.Linear(s.ffn, s.dim, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q, k, v = self.qkv(self.n1(x)).split([s.heads * head, s.kv * head, s.kv * head], -1)
            q, k, v = (t.view(s.batch, s.seq, -1, head).transpose(1, 2) for t in (q, k, v))
            q, k = _turn(q, cos, sin), _turn(k, cos, sin)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(s.batch, s.seq, s.dim))
            gate, up = self.up(self.n2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    with torch.device(device):
        embed, norm = nn.Embedding(s.vocab, s.dim), nn.RMSNorm(s.dim)
        blocks = nn.ModuleList(Block() for _ in range(s.layers))
        out = nn.Parameter(torch.randn(s.vocab, s.dim) * 0.02)
        angles = torch.outer(torch.arange(s.seq), 500000.0 ** (-torch.arange(0, head, 2) / head))
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    params = [*embed.parameters(), *blocks.parameters(), *norm.parameters(), out]
    masters = [p.detach().clone().requires_grad_() for p in params]
    for p in params:
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if device == "cuda":
        for block in blocks:
            block.compile()
    rows = max(1, s.tokens // 8)

    def slopes(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        total = wide.logsumexp(1, keepdim=True)
        hit = torch.arange(s.vocab, device=logits.device) == targets[:, None]
        loss = (total[:, 0] - wide.gather(1, targets[:, None])[:, 0]).sum()
        return loss, (((wide - total).exp() - hit.float()) / s.tokens).bfloat16()

    if device == "cuda":
        slopes = torch.compile(slopes)

    class Loss(torch.autograd.Function):
        """The gradients are made with the loss, chunk by chunk, so that the logits never exist as a whole."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
            total = torch.zeros((), device=x.device)
            for i in range(0, len(x), rows):
                part = slice(i, i + rows)
                loss, slope = slopes(x[part] @ weight.t(), targets[part])
                total += loss
                torch.mm(slope, weight, out=dx[part])
                dw += slope.t() @ x[part]
            ctx.save_for_backward(dx, dw.bfloat16())
            return total / len(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            dx, dw = ctx.saved_tensors
            return dx, dw, None

    def step() -> None:
        ids = torch.randint(0, s.vocab, (s.batch, s.seq + 1), device=device)
        x = embed(ids[:, :-1])
        for block in blocks:
            x = block(x, cos, sin)
        Loss.apply(norm(x).reshape(-1, s.dim), out, ids[:, 1:].reshape(-1)).backward()
        for m, p in zip(masters, params, strict=True):
            m.grad = p.grad.float()  # type: ignore[union-attr]
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    clock = Clock()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        for _ in range(steps):
            clock(step)
    clock.report()


def _turn(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


CASES: dict[str, Callable[[Shape, int], None]] = {
    "hf-accelerate-eager": lambda s, n: hugging_face(s, n, False),
    "hf-accelerate-compile": lambda s, n: hugging_face(s, n, True),
    "torchtitan-eager": lambda s, n: torchtitan(s, n, False, False),
    "torchtitan-compile": lambda s, n: torchtitan(s, n, True, False),
    "torchtitan-compile-fp8": lambda s, n: torchtitan(s, n, True, True),
    "bare-loop": bare,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](SHAPES[sys.argv[2]], int(sys.argv[3]))

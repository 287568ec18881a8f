"""The other trainers of bench/gpu.py, each a function that trains a Llama of one shape on one GPU and reports.

    python bench/peers.py CASE SHAPE STEPS

Hugging Face with Accelerate, torchtitan (from the folder PEERS_SITE), and a bare loop (bare.py). All of them: random
tokens, fused AdamW, fp32 master weights and Adam states, bf16 products, clipping at 1, no recompute.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from shapes import SHAPES, Clock, Shape


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
    import_torchtitan()
    import torchtitan.models.llama3 as llama3
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    # torchtitan derives the hidden width: 8/3 of dim times this, up to the next multiple of 256
    factor = s.ffn / int(2 * 4 * s.dim / 3)
    llama3.llama3_args["bench"] = TransformerModelArgs(
        dim=s.dim, n_layers=s.layers, n_heads=s.heads, n_kv_heads=s.kv, vocab_size=s.vocab, multiple_of=256,
        ffn_dim_multiplier=factor, rope_theta=500000,
    )  # fmt: skip

    args = ["--compile.enable"] if compiled else []
    if fp8:
        args += [
            "--model.converters", "quantize.linear.float8", "--quantize.linear.float8.recipe_name", "rowwise",
            "--quantize.linear.float8.filter_fqns", "output",
        ]  # fmt: skip
    trainer = torchtitan_trainer(llama3, "llama3", s.vocab, s.seq, s.batch, steps, args)
    hidden = trainer.model_parts[0].layers["0"].feed_forward.w1.weight.shape[0]
    if hidden != s.ffn:
        raise SystemExit(f"torchtitan made a hidden width of {hidden}, not {s.ffn}")
    train_timed(trainer)


def import_torchtitan() -> None:
    """Make torchtitan importable, from PEERS_SITE if that is set, for one rank."""
    if site := os.environ.get("PEERS_SITE"):
        sys.path.insert(0, site)
    if importlib.util.find_spec("torchtitan") is None:
        raise SystemExit("torchtitan is not installed; PEERS_SITE must name a folder that holds it")
    _stub("datasets", Dataset=object, load_dataset=None)
    _stub("datasets.distributed", split_dataset_by_node=None)
    if importlib.util.find_spec("tensorboard") is None:
        _stub("torch.utils.tensorboard", SummaryWriter=None)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")


def torchtitan_trainer(model: Any, name: str, vocab: int, seq: int, batch: int, steps: int, args: list[str]) -> Any:
    """torchtitan's trainer of the flavour `bench` of a model, on random tokens."""
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager

    class Random(BaseDataLoader):
        def __iter__(self) -> Iterator[Any]:
            while True:
                x = torch.randint(0, vocab, (batch, seq + 1))
                yield {"input": x[:, :-1]}, x[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    usual = model.get_train_spec

    def spec() -> Any:
        made = usual()
        made.build_dataloader_fn = lambda **kwargs: Random()
        made.build_tokenizer_fn = None
        return made

    model.get_train_spec = spec
    config = ConfigManager().parse_args([
        "--model.name", name, "--model.flavor", "bench", "--training.seq_len", str(seq),
        "--training.local_batch_size", str(batch), "--training.steps", str(steps), "--metrics.log_freq", "1",
        "--lr_scheduler.warmup_steps", "2", "--activation_checkpoint.mode", "none", "--optimizer.implementation",
        "fused", *args,
    ])  # fmt: skip
    from torchtitan.train import Trainer

    return Trainer(config)


def train_timed(trainer: Any) -> None:
    """Run a torchtitan trainer and report its step times and peak memory."""
    # otherwise the peak is that since the last line of its log
    trainer.metrics_processor.device_memory_monitor.reset_peak_stats = lambda: None
    clock = Clock()
    one = trainer.train_step
    trainer.train_step = lambda batches: clock(lambda: one(batches))
    trainer.train()
    clock.report()


def _stub(name: str, **content: Any) -> None:
    """A stub for a module from which torchtitan imports names that this bench does not use."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    sys.modules[name] = module


CASES: dict[str, Callable[[Shape, int], None]] = {
    "hf-accelerate-eager": lambda s, n: hugging_face(s, n, False),
    "hf-accelerate-compile": lambda s, n: hugging_face(s, n, True),
    "torchtitan-eager": lambda s, n: torchtitan(s, n, False, False),
    "torchtitan-compile": lambda s, n: torchtitan(s, n, True, False),
    "torchtitan-compile-fp8": lambda s, n: torchtitan(s, n, True, True),
    "bare-loop": lambda s, n: importlib.import_module("bare").bare(s, n),  # imports torch, which gpu.py does not
}

if __name__ == "__main__":
    CASES[sys.argv[1]](SHAPES[sys.argv[2]], int(sys.argv[3]))

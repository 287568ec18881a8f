"""Training scripts under the library they were written for and under Weft: losses and time, on two CPU ranks.

Run it where the libraries are installed: python bench/own_code.py [lightning strategy trainer accelerate …]. Horovod,
if it or its native library is missing, is replaced by what its docs define: gradients averaged over ranks
before each step. It prints the table of docs/your-own-code.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

STEPS = 200


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 64, generator=generator), torch.randint(8, (samples,), generator=generator)
    )


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 8))


def lightning_run(original: bool, folder: str, strategy: bool = False) -> dict[str, Any]:
    import lightning

    import weft

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = net(), list[float]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = functional.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(data(16 * STEPS), batch_size=8, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(data(64), batch_size=8)

    module = Module()
    if original or strategy:
        layout: Any = "ddp"
        if not original:
            from weft.lightning import WeftStrategy

            layout = WeftStrategy(weft.Job(precision="fp32", parallel={"dp_replicate": 1, "dp_shard": -1, "zero": 3}))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=layout, max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, gradient_clip_val=1.0,
        )  # fmt: skip
        begin = time.perf_counter()
        trainer.fit(module, datamodule=Data())
        validated = float(trainer.callback_metrics["val_loss"])
    else:
        import weft.lightning
        from weft.job.schema import Job, Optim

        job = Job(name="lightning", runs_dir=folder, precision="fp32", optim=Optim(clip=1.0))
        begin = time.perf_counter()
        loops = weft.lightning.fit(module, Data(), job, max_epochs=2)
        validated = float(loops.callback_metrics["val_loss"])
    return {"losses": module.losses, "seconds": time.perf_counter() - begin, "validation": validated}


def accelerate_run(original: bool, folder: str) -> dict[str, Any]:
    if original:
        from accelerate import Accelerator
    else:
        from weft.accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(1)
    loader: Any = DataLoader(data(16 * STEPS), batch_size=8, shuffle=True, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, begin = [], time.perf_counter()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "seconds": time.perf_counter() - begin, "validation": 0.0}


def trainer_run(original: bool, folder: str) -> dict[str, Any]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if original:
        from transformers import Trainer
    else:
        from weft.transformers import WeftTrainer as Trainer
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, **sizes))
    texts = torch.randint(97, (16 * 50, 24), generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-3, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=5,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in texts]
    trainer = Trainer(model, arguments, train_dataset=rows)
    begin = time.perf_counter()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "seconds": time.perf_counter() - begin, "validation": 0.0}


def deepspeed_run(original: bool, folder: str) -> dict[str, Any]:
    if original:
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        import weft.deepspeed as deepspeed
    config = {
        "train_batch_size": 16, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": 2 if not original else 0},
    }  # fmt: skip
    model = net()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data(16 * STEPS), config=config
    )
    losses, begin = [], time.perf_counter()
    for inputs, targets in loader:
        loss = functional.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "seconds": time.perf_counter() - begin, "validation": 0.0}


class _HorovodDefinition:
    """What Horovod's docs define of the names that the script uses, on torch's all-reduce."""

    def init(self) -> None:
        torch.distributed.init_process_group("gloo")

    def rank(self) -> int:
        return torch.distributed.get_rank()

    def size(self) -> int:
        return torch.distributed.get_world_size()

    def broadcast_parameters(self, params: dict[str, torch.Tensor], root_rank: int) -> None:
        for value in params.values():
            torch.distributed.broadcast(value, root_rank)

    def broadcast_optimizer_state(self, optimizer: Any, root_rank: int) -> None: ...

    def DistributedOptimizer(self, optimizer: Any, named_parameters: Any) -> Any:
        def average(*_: Any) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    torch.distributed.all_reduce(param.grad)
                    param.grad /= self.size()

        optimizer.register_step_pre_hook(average)
        return optimizer


def horovod_run(original: bool, folder: str) -> dict[str, Any]:
    hvd: Any = _HorovodDefinition()
    if not original:
        hvd = importlib.import_module("weft.hvd")
    elif importlib.util.find_spec("horovod") is not None:
        found = importlib.import_module("horovod.torch")
        hvd = found if hasattr(found, "init") else hvd  # it imports without its native library
    hvd.init()
    dataset = data(16 * STEPS)
    sampler: Any = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses, begin = [], time.perf_counter()
    for inputs, targets in DataLoader(dataset, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "seconds": time.perf_counter() - begin, "validation": 0.0}


RUNS: dict[str, Callable[[bool, str], dict[str, Any]]] = {
    "lightning": lightning_run, "strategy": partial(lightning_run, strategy=True), "trainer": trainer_run,
    "accelerate": accelerate_run, "deepspeed": deepspeed_run, "horovod": horovod_run,
}  # fmt: skip
SCRIPTS = {
    "lightning": "a LightningModule with `weft.lightning.fit`", "strategy": "the same with `WeftStrategy`, ZeRO 3",
    "trainer": "an HF Trainer script", "accelerate": "an Accelerate loop", "deepspeed": "a DeepSpeed script, ZeRO 2",
    "horovod": "a Horovod script",
}  # fmt: skip


def launch(name: str, original: bool) -> dict[str, Any]:
    """The result of rank 0 of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, name,
                   "original" if original else "weft", str(out)]  # fmt: skip
        subprocess.run(
            command,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def main() -> None:
    if len(sys.argv) > 3:
        name, kind, out = sys.argv[1:4]
        found = RUNS[name](kind == "original", str(Path(out).parent))
        if int(os.environ["RANK"]) == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        return
    print(
        "| script | losses compared | largest difference | batches/s of the original | of Weft |\n|---|---|---|---|---|"
    )
    for name in sys.argv[1:] or list(RUNS):
        theirs, ours = launch(name, True), launch(name, False)
        pairs = list(zip(theirs["losses"], ours["losses"], strict=True))
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        rate = len(pairs) / theirs["seconds"], len(pairs) / ours["seconds"]
        print(f"| {SCRIPTS[name]} | {len(pairs)} | {worst:.1e} | {rate[0]:.0f} | {rate[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()

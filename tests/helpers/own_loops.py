"""Loops of your own that tests run on ranks, and the same loops in plain PyTorch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import weft.hvd as hvd
from weft.extensions.adapters.accelerate.accelerator import Accelerator
from weft.extensions.adapters.deepspeed_accelerator import get_accelerator
from weft.extensions.adapters.deepspeed_engine import initialize
from weft.extensions.adapters.lightning_loop import fit
from weft.extensions.adapters.whole_weights import load_whole, spread_state
from weft.job.errors import JobError
from weft.job.schema import Job, Optim, Parallel

STEPS = 4


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 8, generator=generator), torch.randint(4, (samples,), generator=generator)
    )


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def plain_losses(lr: float = 1e-2, clip: float = 0.5, steps: int = STEPS, sampler: Any = None) -> list[float]:
    """One process, batches of 8."""
    model, found = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for inputs, targets in list(DataLoader(data(), batch_size=8, sampler=sampler))[:steps]:
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _mean(loss: Tensor, accelerator: Accelerator) -> float:
    return float(accelerator.reduce(loss.detach(), "mean"))


def accelerate_losses(
    parallel: dict[str, Any], folder: str, resume: bool = False, precision: str = "no"
) -> list[float]:
    """Half of the steps and a checkpoint, or the other half from it."""
    job = Job(parallel=Parallel(**parallel)) if parallel else None
    accelerator = Accelerator(cpu=True, mixed_precision=precision, job=job)
    model = net(accelerator.process_index)  # rank 0's weights are used
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(data(), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, STEPS // 2)
    found = []
    for _, (inputs, targets) in zip(range(STEPS // 2), loader, strict=False):
        loss = functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(_mean(loss, accelerator))
    if not resume:
        accelerator.save_state(folder)
    accelerator.end_training()
    return found


def deepspeed_losses(stage: int, more: dict[str, Any] | None = None) -> list[float]:
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage}, **(more or {}),
    }  # fmt: skip
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = initialize(model=model, optimizer=optimizer, training_data=data(), config=config)
    assert loader is not None and engine.zero_optimization_stage() == stage and not engine.bfloat16_enabled()
    assert get_accelerator().device(engine.local_rank) == engine.device and len(loader) == STEPS
    found = []
    for inputs, targets in loader:
        loss = functional.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.mesh.close()
    return found


def step_after_plain_backward() -> str:
    """What optimizer.step() says after loss.backward() instead of accelerator.backward(loss)."""
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    try:
        optimizer.step()
    except JobError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


def whole_weights_loaded() -> list[Any]:
    """Whole weights and momentum loaded into shards, as whole tensors again."""
    job = Job(parallel=Parallel(dp_replicate=1, dp_shard=-1, zero=3))
    accelerator = Accelerator(cpu=True, job=job)
    model, other = net(), net(1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, _ = accelerator.prepare(model, optimizer)
    load_whole(model, other.state_dict())
    momentum = [torch.full_like(p, 2.0 + i) for i, p in enumerate(other.parameters())]
    state = {i: {"momentum_buffer": value} for i, value in enumerate(momentum)}
    optimizer.load_state_dict(spread_state(optimizer, {**optimizer.state_dict(), "state": state}))
    loaded = [optimizer.state[p]["momentum_buffer"].full_tensor() for p in optimizer.param_groups[0]["params"]]
    same = all(torch.equal(a, b) for a, b in zip(loaded, momentum, strict=True))
    same = same and all(torch.equal(v, other.state_dict()[n]) for n, v in accelerator.get_state_dict(model).items())
    try:
        load_whole(model, {"0.weight": other.state_dict()["0.weight"]})
    except JobError as error:
        return [same, str(error)]
    finally:
        accelerator.end_training()
    return [same, ""]


def horovod_values(compression: str) -> dict[str, Any]:
    """Collectives, and the weights after steps of DistributedOptimizer with two passes a step."""
    hvd.init()
    rank = hvd.rank()
    found: dict[str, Any] = {
        "sum": hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum).item(),
        "mean": hvd.allreduce(torch.full((3,), float(rank)), compression=hvd.Compression.fp16).tolist(),
        "rows": hvd.allgather(torch.full((rank + 1, 1), rank)).flatten().tolist(),
        "root": hvd.broadcast(torch.tensor([rank]), root_rank=1).item(),
        "all": hvd.alltoall(torch.arange(4) + 10 * rank).tolist(),
        "object": hvd.broadcast_object({"rank": rank}),
    }
    model = net(rank)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), compression,
        backward_passes_per_step=2,
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    inputs, targets = data().tensors
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            rows = slice(8 * step + 4 * rank + 2 * part, 8 * step + 4 * rank + 2 * part + 2)
            functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    found["weights"] = [p.detach().clone() for p in model.parameters()]
    hvd.shutdown()
    return found


def plain_weights() -> list[Tensor]:
    """What horovod_values trains: the sum of two passes' means over the ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = data().tensors
    for step in range(3):
        optimizer.zero_grad()
        rows = slice(8 * step, 8 * step + 8)
        (2 * functional.cross_entropy(model(inputs[rows]), targets[rows])).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def elastic_values(folder: str, restarted: bool) -> dict[str, Any]:
    """Two commits, or what a restarted process reads."""
    hvd.init()
    model = net(hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state: Any = hvd.elastic.TorchState(model, optimizer, folder=folder, epoch=0)
    if restarted:
        loaded = state.load_commit()
    else:
        state.sync()
        loaded = False
        for state.epoch in (1, 2):
            functional.cross_entropy(model(torch.ones(2, 8)), torch.tensor([1, 2])).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        with torch.no_grad():
            model[0].weight.add_(1)  # type: ignore[operator, union-attr]
        state.epoch = 7
        state.restore()
    momentum = [s["momentum_buffer"].sum().item() for s in optimizer.state.values()]
    out = {"loaded": loaded, "epoch": state.epoch, "weights": [p.detach().clone() for p in model.parameters()]}
    hvd.shutdown()
    return {**out, "momentum": momentum}


class LitModule(nn.Module):
    """What weft.lightning.fit needs of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.hooks: list[str] = []
        self.log: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def on_train_start(self) -> None:
        self.hooks.append("start")


class LitData:
    """What weft.lightning.fit needs of a LightningDataModule."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")))

    def val_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=4)


class Recorder:
    """A callback of your own."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.hooks.append(f"epoch {trainer.current_epoch}")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.hooks.append("end")


class ModelCheckpoint:
    dirpath = None


def fit_job(parallel: dict[str, Any], folder: str) -> Job:
    layout: Any = Parallel(**parallel) if parallel else "auto"
    return Job(name="fit", runs_dir=folder, precision="fp32", optim=Optim(clip=0.5), parallel=layout)


def lightning_values(parallel: dict[str, Any], folder: str, resume: bool = False) -> dict[str, Any]:
    module = LitModule()
    saved = f"{folder}/fit/checkpoints" if resume else None
    loops = fit(
        module, LitData(), fit_job(parallel, folder), callbacks=[Recorder(), ModelCheckpoint()],
        max_epochs=3 if resume else 2, ckpt_path=saved,
    )  # fmt: skip
    values = {"losses": loops.losses, "val_loss": float(loops.callback_metrics["val_loss"]), "hooks": module.hooks}
    loops.accelerator.end_training()
    return {**values, "step": loops.global_step}

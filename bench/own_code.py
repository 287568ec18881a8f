"""Training scripts under the library they were written for and under Weft: losses and time, on two CPU ranks.

Run it where lightning, accelerate and deepspeed are installed: python bench/own_code.py [lightning|accelerate]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
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


def lightning_run(original: bool, folder: str) -> dict[str, Any]:
    import lightning

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
    if original:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
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
        from weft.accelerate import Accelerator  # type: ignore[assignment]
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


RUNS = {"lightning": lightning_run, "accelerate": accelerate_run}


def launch(name: str, original: bool) -> dict[str, Any]:
    """The result of rank 0 of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, name,
                   "original" if original else "weft", str(out)]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def main() -> None:
    if len(sys.argv) > 3:
        name, kind, out = sys.argv[1:4]
        found = RUNS[name](kind == "original", str(Path(out).parent))
        if int(os.environ["RANK"]) == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        return
    for name in sys.argv[1:] or list(RUNS):
        theirs, ours = launch(name, True), launch(name, False)
        pairs = list(zip(theirs["losses"], ours["losses"], strict=True))
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        rate = len(pairs) / theirs["seconds"], len(pairs) / ours["seconds"]
        print(f"{name}: {len(pairs)} batches, losses differ by at most {worst:.1e} (relative)")
        print(f"  validation {theirs['validation']:.6f} and {ours['validation']:.6f}")
        print(f"  {rate[0]:.0f} and {rate[1]:.0f} batches/s")


if __name__ == "__main__":
    main()

"""The others of bench/chaos.py: one rank of a small DDP run under torchrun, torchft or nvidia-resiliency-ext.

    python bench/chaos_peers.py CASE FOLDER

Each commits a step by a line in FOLDER/lines-RANK.jsonl: time, step, and `era`, a number that changes when a fault was
recovered from. torchft and nvidia-resiliency-ext are read from the folder that WEFT_PEERS names; nothing here is needed
by Weft.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if site := os.environ.get("WEFT_PEERS"):
    sys.path.append(site)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

MODEL = {"family": "llama", "dim": 128, "layers": 2, "heads": 4, "ffn": 256}
SEQ, BATCH = 64, 4
"""Sequences a rank and step."""

STEPS = 100_000
SAVE_EVERY = 5
HANG_S = 10.0
"""After this a collective of torchrun's is given up; torchft and nvidia-resiliency-ext get their own below."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    from weft.job import parse_job
    from weft.job.shapes import resolve
    from weft.models.build_model import build_model
    from weft.models.init import initialise

    torch.set_num_threads(1)
    job = resolve(parse_job({"model": MODEL, "data": {"seq_len": SEQ}}))
    model = build_model(job.model).to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            initialise(name, p, model, 0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    maker = torch.Generator().manual_seed(1000 * step + rank)
    window = torch.randint(0, 256, (BATCH, SEQ + 1), generator=maker)
    loss: Tensor = model(window[:, :-1], targets=window[:, 1:].contiguous()) / (BATCH * SEQ)
    return loss


def teller(folder: Path, rank: int) -> Callable[..., None]:
    file = (folder / f"lines-{rank}.jsonl").open("ab", buffering=0)

    def report(step: int, era: int) -> None:
        file.write(json.dumps({"time": time.time(), "step": step, "era": era}).encode() + b"\n")

    return report


def torchrun(folder: Path) -> None:
    """Every rank starts again from the newest checkpoint; keys of the store carry the number of the attempt."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(host, port, is_master=False))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    limit = datetime.timedelta(seconds=HANG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    model, optimizer = build()
    saved, step = folder / "state.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp, report = DistributedDataParallel(model), teller(folder, rank)
    while step < STEPS:
        loss_of(ddp, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report(step, attempt)
        if rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").replace(saved)


def torchft(folder: Path) -> None:
    """Each process a replica group of its own; a lost one is left out and heals from another when it is back.

    Gradients are summed by the manager itself, in one message: torchft's DDP ends with a failed assertion in every
    survivor when a sum fails (0.2.0 with torch 2.13).
    """
    from torchft import Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    model, inner = build()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)), load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, min_replica_size=1,
        timeout=datetime.timedelta(seconds=10), rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"], replica_id=f"rank-{rank}-", hostname="127.0.0.1",
    )  # fmt: skip
    optimizer, report = Optimizer(manager, inner), teller(folder, rank)
    weights = list(model.parameters())
    while manager.current_step() < STEPS:
        optimizer.zero_grad()  # also begins the quorum
        loss_of(model, manager.current_step(), rank).backward()
        flat = torch.cat([w.grad.reshape(-1) for w in weights if w.grad is not None])
        manager.allreduce(flat).wait()
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view_as(weight)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            report(manager.current_step(), manager._quorum_id)


def nvrx(folder: Path) -> None:
    """The function starts again inside the living processes, without those that died."""
    from nvidia_resiliency_ext import inprocess

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    base = dist.TCPStore(host, port, world, is_master=rank == 0, multi_tenant=True, wait_for_workers=True)
    model, optimizer = build()
    report = teller(folder, rank)
    done = [0]

    def seconds(value: float) -> datetime.timedelta:
        return datetime.timedelta(seconds=value)

    wrapper = inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        initialize=inprocess.initialize.RetryController(min_world_size=1),
        abort=inprocess.abort.AbortTorchDistributed(),
        monitor_thread_interval=seconds(0.25), monitor_process_interval=seconds(0.25),
        progress_watchdog_interval=seconds(0.25), heartbeat_interval=seconds(0.5), heartbeat_timeout=seconds(6),
        soft_timeout=seconds(3), hard_timeout=seconds(8), last_call_wait=seconds(0.1),
        termination_grace_time=seconds(0.5), barrier_timeout=seconds(60), completion_timeout=seconds(60),
    )  # fmt: skip

    def train(call_wrapper: Any = None) -> None:
        era = call_wrapper.iteration
        store = dist.PrefixStore(f"era-{era}", base)
        here, now = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=here, world_size=now, timeout=seconds(30))
        steps = torch.tensor([done[0]])
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
        done[0] = int(steps)
        ddp = DistributedDataParallel(model)
        while done[0] < STEPS:
            optimizer.zero_grad()
            loss_of(ddp, done[0], here).backward()
            optimizer.step()
            done[0] += 1
            report(done[0], era)
            call_wrapper.ping()

    train.__annotations__["call_wrapper"] = inprocess.CallWrapper  # it is looked for by its class, not by its name
    wrapper(train)()


CASES = {"torchrun": torchrun, "torchft": torchft, "nvrx": nvrx}

if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))

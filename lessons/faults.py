"""Faults and resumption by hand: a run is killed and continues as if nothing had happened. The text is in faults.md.

weft lesson faults
"""

import hashlib
import json
import os
import random
import signal
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.cli.lessons.output import say, show, t

DIM, BATCH, STEPS, EVERY, KILLED_AT = 16, 8, 20, 5, 13


def batch(step: int) -> Tensor:
    """The samples of a step depend on the seed and the step alone, so the state of the data is one number."""
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(1000 + step))


def save(folder: Path, step: int, tensors: dict[str, Tensor]) -> None:
    """Write beside, then rename: a kill at any moment leaves a whole checkpoint or none."""
    part = folder / "part"
    save_file(tensors, part)
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    os.replace(part, folder / f"step-{step}.safetensors")
    (folder / "part").write_text(json.dumps({"step": step, "sha256": digest}), encoding="utf-8")
    os.replace(folder / "part", folder / f"step-{step}.json")  # last: a checkpoint without it does not count


def newest(folder: Path) -> tuple[int, dict[str, Tensor] | None]:
    """The newest checkpoint whose bytes are those that were written. A damaged one is skipped."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("step-*.json")]
    for record in sorted(records, key=lambda r: -r["step"]):
        path = folder / f"step-{record['step']}.safetensors"
        if hashlib.sha256(path.read_bytes()).hexdigest() == record["sha256"]:
            return record["step"], load_file(path)
    return 0, None


def train(folder: Path, killed_at: int = 0) -> dict[str, Tensor]:
    """Train to STEPS from the newest checkpoint; the weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.1), nn.Linear(DIM, DIM))
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    done, saved = newest(folder)
    if saved is not None:
        model.load_state_dict({n: x for n, x in saved.items() if not n.startswith("velocity.")})
        velocity = {n.removeprefix("velocity."): x for n, x in saved.items() if n.startswith("velocity.")}
    for step in range(done + 1, STEPS + 1):
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step)  # dropout too depends on the step alone
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                weight -= 0.1 * velocity[name].mul_(0.9).add_(weight.grad)
        if step % EVERY == 0:
            save(folder, step, {**model.state_dict(), **{f"velocity.{n}": v for n, v in velocity.items()}})
    return {n: x.clone() for n, x in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    return t("equal bit by bit") if all(torch.equal(a[n], b[n]) for n in a) else t("different")


def lost_share(interval: float, save_s: float, mtbf_s: float, hours: float = 2000.0) -> float:
    """Simulated: the share of time that goes to saving and to work that is done again."""
    random_, useful, clock = random.Random(0), 0.0, 0.0
    while clock < hours * 3600:
        until_fault = random_.expovariate(1 / mtbf_s)
        useful += until_fault // (interval + save_s) * interval  # what was saved before the fault
        clock += until_fault
    return 1 - useful / clock


def lesson() -> None:
    torch.set_num_threads(1)  # a fork has no threads but one
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        whole = train(Path(a))
        child = os.fork()  # the process that will be killed
        if child == 0:
            train(Path(b), KILLED_AT)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        last = newest(Path(b))[0]
        resumed = train(Path(b))
        rows: list[tuple[str, object, object]] = [
            (t("signal that ended the process"), signal.SIGKILL.value, os.WTERMSIG(status)),
            (t("step of the newest checkpoint"), (KILLED_AT - 1) // EVERY * EVERY, last),
            (t("weights after the resumed run"), t("equal bit by bit"), equal(whole, resumed)),
        ]
        damaged = Path(b) / f"step-{STEPS}.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        rows.append((t("newest after a byte has changed"), STEPS - EVERY, newest(Path(b))[0]))
        show([*rows, (t("weights after resuming from it"), t("equal bit by bit"), equal(whole, train(Path(b))))])

    save_s, mtbf_s = 60.0, 8 * 3600.0
    best = (2 * save_s * mtbf_s) ** 0.5
    say("\nA checkpoint takes {save:.0f} s, a fault comes every {hours:.0f} h. The share of time that is lost:",
        save=save_s, hours=mtbf_s / 3600)  # fmt: skip
    show([(t("a checkpoint every {minutes:.0f} min", minutes=x / 60), f"{save_s / x + x / 2 / mtbf_s:.1%}",
           f"{lost_share(x, save_s, mtbf_s):.1%}") for x in (best / 4, best, best * 4)])  # fmt: skip
    with_weft(whole)


def with_weft(weights: dict[str, Tensor]) -> None:
    """The same weights through Weft's checkpoints: whole, damaged, and the older one that is taken instead."""
    import weft

    mesh = weft.connect(weft.Plan("cpu", "cpu", "gloo"))
    with tempfile.TemporaryDirectory() as folder:
        for step in (5, 10):
            weft.save(folder, {n: x + step for n, x in weights.items()}, mesh, step=step)
        data = max(Path(folder).glob("*10/*"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        into = {n: torch.zeros_like(x) for n, x in weights.items()}
        found = weft.load(folder, into, mesh)
        say("\nWeft's checkpoints of steps 5 and 10, after a byte of the newer one has changed:")
        same = equal({n: x + 5 for n, x in weights.items()}, into)
        show([(t("step that is loaded"), 5, found["step"] if found else 0),
              (t("weights"), t("equal bit by bit"), same)], ("predicted", "Weft"))  # fmt: skip


if __name__ == "__main__":
    lesson()

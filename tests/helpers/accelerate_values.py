"""What Accelerate's names give on ranks, for the tests of weft.accelerate."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from helpers import own_loops
from weft import accelerate
from weft.accelerate import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin


class Streamed(IterableDataset[Tensor]):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Any:
        yield from torch.arange(self.count)


def _gathered(loader: Any, **config: Any) -> list[list[int]]:
    """What gather_for_metrics gives for each batch of a loader."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    return [accelerator.gather_for_metrics(batch).tolist() for batch in accelerator.prepare(loader)]


def loaders() -> dict[str, Any]:
    """Samples of all ranks in each batch, and of this one."""
    batches = BatchSampler(range(7), 2, drop_last=False)
    numbers: Any = torch.arange(7)
    listed: DataLoader[Any] = DataLoader(numbers, sampler=batches, batch_size=None, collate_fn=torch.as_tensor)  # type: ignore[arg-type]
    values: dict[str, Any] = {
        "dropped": _gathered(DataLoader(range(21), batch_size=5, drop_last=True)),  # type: ignore[arg-type]
        "filled": _gathered(DataLoader(range(7), batch_size=2)),  # type: ignore[arg-type]
        "fewer than sampled": _gathered(DataLoader(range(9), batch_size=2, sampler=range(5))),  # type: ignore[arg-type]
        "streamed": _gathered(DataLoader(Streamed(11), batch_size=2)),
        "streamed, split": _gathered(DataLoader(Streamed(11), batch_size=4), split_batches=True),
        "streamed, dispatched": _gathered(DataLoader(Streamed(11), batch_size=2), dispatch_batches=True),
        "batches as samples": _gathered(listed),
    }
    accelerator = Accelerator(cpu=True, even_batches=False)
    for name, data in (("uneven", range(7)), ("uneven, streamed", Streamed(7))):
        loader = accelerator.prepare(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
        values[name] = [batch.tolist() for batch in loader]
    words: DataLoader[Any] = DataLoader(list("abcde"), batch_size=2, collate_fn=list)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True)
    values["words"] = [
        accelerator.gather_for_metrics(batch, use_gather_object=True) for batch in accelerator.prepare(words)
    ]
    seeded = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
    shuffled = seeded.prepare(DataLoader(range(8), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    first, second = ([batch.tolist() for batch in shuffled] for _ in range(2))
    shuffled.set_epoch(0)
    values["seeded"] = [first, second, [batch.tolist() for batch in shuffled]]
    accelerator.end_training()
    return values


def ranks_and_values(folder: str) -> dict[str, Any]:
    """This rank among others, shares, operations and trackers."""
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    state, values = accelerate.PartialState(), dict[str, Any]()
    values["type"] = str(accelerator.distributed_type.value)
    shares = {}
    for name, whole in (("list", [1, 2, 3]), ("dict", {"a": "abc", "b": torch.arange(3)}), ("tensor", torch.arange(3))):
        with accelerator.split_between_processes(whole, apply_padding=True) as share:
            shares[name] = share.tolist() if isinstance(share, Tensor) else share
    shares["dict"] = {k: list(v) if isinstance(v, str) else v.tolist() for k, v in shares["dict"].items()}
    values["shares"] = shares
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.on_main_process(print)("main")
        accelerator.on_last_process(print)("last")
        state.on_process(process_index=1)(print)("one")
        accelerate.get_logger("weft.test").warning_once("")
    values["printed"] = printed.getvalue().split()
    values["triggers"] = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    values["triggers"] += [accelerator.check_trigger(), accelerator.check_trigger()]
    rank = accelerator.process_index
    sent = {"t": torch.tensor([rank]), (1, 2): {"x"}, "n": None}
    values["objects"] = accelerate.gather_object([sent])[1]
    values["largest"] = accelerate.reduce(torch.tensor([rank, -rank]), "max").tolist()
    values["sent"] = accelerate.broadcast_object_list([rank, "x"], from_process=1)
    state.debug = True
    try:
        accelerate.gather(torch.zeros(rank + 1))
    except accelerate.DistributedOperationException as error:
        values["error"] = str(error)
    state.debug = False
    accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5), "name": "no number"}, step=3)
    values["freed"] = accelerator.free_memory(1, 2)
    accelerator.end_training()
    values["events"] = len(list((Path(folder) / "run").rglob("events*")))
    return values


def gradients() -> dict[str, Any]:
    """Gradients after passes that sum and passes that do not, beside those of plain PyTorch."""
    inputs, targets = own_loops.data(16).tensors

    def loss_of(model: nn.Module, rows: slice) -> Tensor:
        return functional.cross_entropy(model(inputs[rows]), targets[rows])

    def gradient(model: nn.Module) -> Tensor:
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = own_loops.net()
    for start in (0, 8):
        loss_of(plain, slice(start, start + 8)).backward()
    accelerator = Accelerator(cpu=True)
    rank, values = accelerator.process_index, dict[str, Any]()
    mine = [slice(start + 4 * rank, start + 4 * rank + 4) for start in (0, 8)]
    model, other = accelerator.prepare(own_loops.net(), own_loops.net(1))
    for rows in mine:
        accelerator.backward(loss_of(model, rows))  # two passes that sum
    values["two sums"] = torch.allclose(gradient(model), gradient(plain), rtol=1e-4, atol=1e-6)
    values["other model"] = all(p.grad is None or not p.grad.any() for p in other.parameters())
    model.zero_grad()
    with accelerator.no_sync(model):
        losses = [loss_of(model, rows) for rows in mine]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
    values["triggered"] = torch.allclose(gradient(model), gradient(plain), rtol=1e-4, atol=1e-6)
    model.zero_grad()
    with model.no_sync():
        accelerator.backward(loss_of(model, mine[0]))
    accelerator.backward(loss_of(model, mine[1]))
    values["the model's no_sync"] = torch.allclose(gradient(model), gradient(plain), rtol=1e-4, atol=1e-6)
    alone = own_loops.net()
    accelerator.backward(loss_of(alone, mine[0]))
    expected = own_loops.net()
    loss_of(expected, mine[0]).backward()
    values["not prepared"] = torch.equal(gradient(alone), gradient(expected))
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(own_loops.net())
    for rows in mine:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows))
    values["each batch"] = torch.allclose(2 * gradient(model), gradient(plain), rtol=1e-4, atol=1e-6)
    accelerator.end_training()
    return values


def joined() -> dict[str, Any]:
    """Three batches for two ranks: the second step has gradients of one of them. Afterwards their weights are equal."""
    accelerator = Accelerator(cpu=True, even_batches=False)
    model = own_loops.net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(own_loops.data(12), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    passes = 0
    with accelerator.join_uneven_inputs([model]):
        for inputs, targets in loader:
            accelerator.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            passes += 1
    weights = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        streamed = accelerator.prepare(DataLoader(Streamed(4), batch_size=2))
        with accelerator.join_uneven_inputs([model], even_batches=True):
            pass
    del streamed
    accelerator.end_training()
    return {"passes": passes, "weights": weights, "warning": str(caught[-1].message)}


def local_steps() -> list[Any]:
    """Weights after two steps of each replica by itself and their average."""
    accelerator = Accelerator(cpu=True)
    model = own_loops.net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(own_loops.data(16), batch_size=4, collate_fn=default_collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerate.LocalSGD(accelerator, model, 2) as local:
        for inputs, targets in loader:
            accelerator.backward(functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    weights = [p.detach().clone() for p in model.parameters()]
    accelerator.end_training()
    return weights


def continued(folder: str) -> list[Any]:
    """The batches that follow a saved position, twice: as they came, and after it was loaded."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    rest = []
    for number, batch in enumerate(loader):
        if number == 1:
            accelerator.save_state(folder)
        if number > 1:
            rest.append(batch.tolist())
    accelerator.load_state(folder)
    again = [batch.tolist() for batch in loader]
    accelerator.end_training()
    return [rest, again]

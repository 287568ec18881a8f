"""Data loaders of your own, of which each data-parallel rank reads its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from weft.extensions.adapters.training import to_device
from weft.job.errors import JobError
from weft.mesh import Mesh
from weft.planner.plan import Plan


class RankBatches(Sampler[list[int]]):
    """Every world-th batch of a batch sampler. The last batches are filled up with samples from the start, so that all
    ranks have as many; with `split`, each batch is divided among the ranks instead."""

    def __init__(self, batches: Any, rank: int, world: int, split: bool = False):
        self.batches, self.rank, self.world, self.split = batches, rank, world, split
        self.size = int(getattr(batches, "batch_size", 0) or 0)
        if split and self.size % world:
            raise JobError(
                f"split_batches: the batch size {self.size} is not a multiple of {world} data-parallel ranks"
            )

    def __len__(self) -> int:
        groups, rest = (len(self.batches), 0) if self.split else divmod(len(self.batches), self.world)
        return groups + bool(rest and not self._drops)

    @property
    def _drops(self) -> bool:
        return bool(getattr(self.batches, "drop_last", False))

    def __iter__(self) -> Iterator[list[int]]:
        group: list[int] = []
        first: list[int] = []
        whole = self.size if self.split else self.size * self.world
        for number, batch in enumerate(self.batches, 1):
            group += batch
            if len(first) < max(whole, 1):
                first += batch
            if len(group) >= whole if whole else number % self.world == 0:
                yield self._share(group)
                group = []
        if group and not self._drops:
            target = whole or -(-len(group) // self.world) * self.world
            while len(group) < target:
                group += first[: target - len(group)]
            yield self._share(group)

    def _share(self, group: list[int]) -> list[int]:
        size = len(group) // self.world
        return group[self.rank * size : (self.rank + 1) * size]


class RankLoader:
    """A loader's batches for this rank, on its device. `ended` is set while the last batch is in use."""

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, mesh: Mesh, split: bool = False, place: bool = True,
        began: Callable[[RankLoader], None] = lambda loader: None, shared_out: bool = False,
    ):  # fmt: skip
        """`shared_out` where the loader's own sampler gives each rank its samples."""
        self.plan, self.mesh, self.place, self.began = plan, mesh, place, began
        self.rank, self.world = mesh.dp_rank(plan), plan.dp
        self.ended, self.skip, self.split = False, 0, split
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.streamed = isinstance(loader.dataset, IterableDataset)
        self.loader: DataLoader[Any] = loader
        if not self.streamed and self.world > 1 and not shared_out:
            self.loader = self._sharded(loader, split)

    def _sharded(self, loader: DataLoader[Any], split: bool) -> DataLoader[Any]:
        sampler = loader.batch_sampler.sampler if isinstance(loader.batch_sampler, BatchSampler) else loader.sampler
        if isinstance(sampler, RandomSampler):
            self._same_order(sampler)
        batches = RankBatches(loader.batch_sampler, self.rank, self.world, split)
        return DataLoader(
            loader.dataset, batch_sampler=batches, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context, prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers, generator=loader.generator,
        )  # fmt: skip

    def _same_order(self, sampler: RandomSampler) -> None:
        """Give a random sampler a generator with the state of rank 0's."""
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        state = sampler.generator.get_state()
        dist.broadcast(state, src=0, group=self.mesh.host_group)
        sampler.generator.set_state(state)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one batch."""
        size = getattr(self.loader.batch_sampler, "size", None) or self.batch_size or 1
        return int(size) * (1 if self.split else self.world)

    @property
    def remainder(self) -> int:
        """Samples of the last batch of all ranks that are not repeated ones; -1 if all are new or it is not known."""
        try:
            left = len(self.dataset) % self.total_batch_size  # type: ignore[arg-type]
        except TypeError:
            return -1
        return left or -1

    def _batches(self) -> Iterator[Any]:
        if not self.streamed or self.world == 1:
            yield from self.loader
            return
        group: list[Any] = []
        first: list[Any] = []
        for batch in self.loader:
            group.append(batch)
            if len(first) < self.world:
                first.append(batch)
            if len(group) == self.world:
                yield group[self.rank]
                group = []
        if group:
            yield (group + first * self.world)[self.rank]

    def __iter__(self) -> Iterator[Any]:
        self.began(self)
        self.ended = False
        batches = self._batches()
        for _ in range(self.skip):
            next(batches, None)
        self.skip = 0
        missing = object()
        batch = next(batches, missing)
        while batch is not missing:
            following = next(batches, missing)
            self.ended = following is missing
            yield to_device(batch, self.mesh.device) if self.place else batch
            batch = following

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch to the sampler or dataset, where it takes one."""
        targets: list[Any] = [self.dataset, getattr(self.loader, "sampler", None)]
        for target in targets:
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

"""Data loaders of your own, of which each data-parallel rank reads its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from weft.extensions.adapters.accelerate.accelerate_settings import DataLoaderConfiguration
from weft.extensions.adapters.rank_values import count_rows, has_tensors, join, of_json, on_tensors, rows, to_json
from weft.extensions.adapters.training import to_device
from weft.job.errors import JobError
from weft.mesh import Mesh
from weft.planner.plan import Plan


class RankBatches(Sampler[list[int]]):
    """Every world-th batch of a batch sampler. The last batches are filled up with samples from the start, so that all
    ranks have as many, unless `even_batches` is false; with `split`, each batch is divided among the ranks instead."""

    def __init__(self, batches: Any, rank: int, world: int, split: bool = False, even_batches: bool = True):
        self.batches, self.rank, self.world, self.split = batches, rank, world, split
        self.even_batches, self.remainder = even_batches, -1
        """New samples of the last batch of all ranks, if some were repeated; else -1."""
        self.size = int(getattr(batches, "batch_size", 0) or 0)
        if split and self.size % world:
            raise JobError(
                f"split_batches: the batch size {self.size} is not a multiple of {world} data-parallel ranks"
            )

    @property
    def batch_sampler(self) -> Any:
        """The sampler whose batches are shared."""
        return self.batches

    def __len__(self) -> int:
        groups, rest = (len(self.batches), 0) if self.split else divmod(len(self.batches), self.world)
        if not self.even_batches and not self._drops:
            return groups + (rest > self.rank)
        return groups + bool(rest and not self._drops)

    @property
    def _drops(self) -> bool:
        return bool(getattr(self.batches, "drop_last", False))

    def __iter__(self) -> Iterator[list[int]]:
        group: list[int] = []
        first: list[int] = []
        self.remainder = -1
        whole = self.size if self.split else self.size * self.world
        for number, batch in enumerate(self.batches, 1):
            group += batch
            if len(first) < max(whole, 1):
                first += batch
            if len(group) >= whole if whole else number % self.world == 0:
                yield self._share(group)
                group = []
        if not group or self._drops:
            return
        if not self.even_batches:
            size = (whole or -(-len(group) // self.world) * self.world) // self.world
            if mine := group[self.rank * size : (self.rank + 1) * size]:
                yield mine
            return
        self.remainder = len(group)
        target = whole or -(-len(group) // self.world) * self.world
        while len(group) < target:
            group += first[: target - len(group)]
        yield self._share(group)

    def _share(self, group: list[int]) -> list[int]:
        size = len(group) // self.world
        return group[self.rank * size : (self.rank + 1) * size]


class SeedableRandomSampler(RandomSampler):
    """Shuffles by a seed and the number of the pass."""

    def __init__(self, *args: Any, data_seed: int | None = None, **options: Any):
        super().__init__(*args, **options)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        self.epoch += 1
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class RankLoader:
    """A DataLoader whose batches are those of this rank, on its device. `ended` is true in the last batch."""

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, mesh: Mesh, split: bool = False, place: bool = True,
        began: Callable[[RankLoader], None] = lambda loader: None, shared_out: bool = False,
        config: DataLoaderConfiguration | None = None, left: Callable[[RankLoader], None] = lambda loader: None,
    ):  # fmt: skip
        """With `shared_out` its sampler gives each rank its samples. `began` and `left` are called around each pass."""
        self.plan, self.mesh, self.place, self.began, self.left = plan, mesh, place, began, left
        self.rank, self.world = mesh.dp_rank(plan), plan.dp
        self.config = config or DataLoaderConfiguration(split_batches=split)
        self.split = self.config.split_batches
        self.ended, self.skip = False, 0
        self.done = 0
        """Batches of the current pass that were given out."""
        self.order: Tensor | None = None
        """The state of the random sampler's generator before the current pass."""
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.streamed = isinstance(loader.dataset, IterableDataset)
        self.dispatched = bool(self.config.dispatch_batches) and self.world > 1 and not shared_out
        self._streamed_remainder = -1
        self.loader: DataLoader[Any] = loader
        sampler = self._random_sampler(loader)
        given = isinstance(sampler, SeedableRandomSampler)
        if self.config.use_seedable_sampler and isinstance(sampler, RandomSampler) and not given:
            self.loader = loader = self._seeded(loader, sampler)
            sampler = self._random_sampler(loader)
        self.random = sampler
        if not self.streamed and not self.dispatched and self.world > 1 and not shared_out:
            self.loader = self._sharded(loader)

    def _random_sampler(self, loader: DataLoader[Any]) -> RandomSampler | None:
        batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        sampler = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
        return sampler if isinstance(sampler, RandomSampler) else None

    def _again(self, loader: DataLoader[Any], **sampling: Any) -> DataLoader[Any]:
        """The loader with other sampling."""
        return DataLoader(
            loader.dataset, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context, prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers, generator=loader.generator, **sampling,
        )  # fmt: skip

    def _seeded(self, loader: DataLoader[Any], sampler: RandomSampler) -> DataLoader[Any]:
        seed = self.config.data_seed
        if seed is None:
            seed = int(self.mesh.all_gather_json(torch.initial_seed() % 2**62)[0])
        own = SeedableRandomSampler(
            sampler.data_source, sampler.replacement, sampler._num_samples, torch.Generator(), data_seed=seed
        )
        batches = loader.batch_sampler
        if not isinstance(batches, BatchSampler):
            return self._again(loader, batch_size=None, sampler=own)
        return self._again(loader, batch_sampler=BatchSampler(own, batches.batch_size, batches.drop_last))

    def _sharded(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if self.random is not None and not isinstance(self.random, SeedableRandomSampler):
            self._same_order(self.random)
        whole = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        if loader.batch_sampler is None and not isinstance(whole, BatchSampler):
            raise JobError(
                "a data loader with batch_size=None gives single samples, which ranks cannot share; give a batch_size "
                "or a BatchSampler"
            )
        batches = RankBatches(whole, self.rank, self.world, self.split, self.config.even_batches)
        if loader.batch_sampler is None:
            return self._again(loader, batch_size=None, sampler=batches)
        return self._again(loader, batch_sampler=batches)

    def _same_order(self, sampler: RandomSampler) -> None:
        """Give a random sampler a generator with the state of rank 0's."""
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        state = sampler.generator.get_state()
        dist.broadcast(state, src=0, group=self.mesh.host_group)
        sampler.generator.set_state(state)

    @property
    def shared(self) -> RankBatches | None:
        """The sampler that gives this rank its batches, where there is one."""
        for sampler in (self.loader.batch_sampler, self.loader.sampler):
            if isinstance(sampler, RankBatches):
                return sampler
        return None

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are filled up."""
        return self.shared.even_batches if self.shared is not None else self.config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        if self.shared is not None:
            self.shared.even_batches = value

    def __len__(self) -> int:
        whole = len(self.loader)
        if self.shared is not None or self.world == 1 or not (self.streamed or self.dispatched):
            return whole
        return whole if self.split else -(-whole // self.world)

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one batch."""
        size = (self.shared.size if self.shared is not None else 0) or self.batch_size
        size = size or getattr(self.loader.batch_sampler, "batch_size", None) or 1
        return int(size) * (1 if self.split else self.world)

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def remainder(self) -> int:
        """Samples of the last batch of all ranks that are not repeated ones; -1 if all are new."""
        return self.shared.remainder if self.shared is not None else self._streamed_remainder

    def _batches(self) -> Iterator[Any]:
        if self.world == 1 or not (self.streamed or self.dispatched):
            yield from self.loader
            return
        self._streamed_remainder = -1
        source = self._from_rank_0() if self.dispatched else iter(self.loader)
        many = 1 if self.split else self.world
        group: list[Any] = []
        first: Any = None
        for batch in source:
            group.append(batch)
            if len(group) == many:
                joined = join(group)
                first = joined if first is None else first
                yield from self._mine(joined, first)
                group = []
        if group and not getattr(self.loader, "drop_last", False):
            joined = join(group)
            yield from self._mine(joined, joined if first is None else first)

    def _mine(self, joined: Any, first: Any) -> Iterator[Any]:
        """This rank's samples of a batch of all ranks; those that are missing in the last are taken from the first."""
        length, whole = count_rows(joined), count_rows(first)
        size = -(-whole // self.world)
        if not self.config.even_batches:
            if self.rank * size < length:
                yield rows(joined, self.rank * size, (self.rank + 1) * size)
            return
        if length < size * self.world:
            self._streamed_remainder = length
            while (missing := size * self.world - count_rows(joined)) > 0:
                joined = join([joined, rows(first, 0, missing)])
        yield rows(joined, self.rank * size, (self.rank + 1) * size)

    def _from_rank_0(self) -> Iterator[Any]:
        """The batches that rank 0 reads, on every rank: their structure as JSON, then their tensors."""
        source = iter(self.loader) if self.mesh.rank == 0 else iter(())
        while True:
            batch = next(source, None)
            message = None if batch is None else to_json(_described(batch))
            described = self.mesh.all_gather_json(message)[0]
            if described is None:
                return
            tensors: Iterator[Tensor] = iter(_tensors(batch))

            def sent(item: Any, own: Iterator[Tensor] = tensors) -> Any:
                if isinstance(item, dict) and set(item) == {"shape", "dtype"}:
                    here = self.mesh.rank == 0
                    value = next(own).cpu().contiguous() if here else torch.empty(
                        item["shape"], dtype=getattr(torch, item["dtype"])
                    )  # fmt: skip
                    dist.broadcast(value, src=0, group=self.mesh.host_group)
                    return value
                if isinstance(item, dict):
                    return {key: sent(each) for key, each in item.items()}
                return type(item)(sent(each) for each in item) if isinstance(item, list | tuple) else item

            received = sent(of_json(described))
            yield (
                received
                if batch is None or not hasattr(batch, "keys") or type(batch) is dict
                else type(batch)(received)
            )

    def __iter__(self) -> Iterator[Any]:
        self.began(self)
        self.ended, self.done = False, 0
        generator = getattr(self.random, "generator", None)
        self.order = generator.get_state() if isinstance(generator, torch.Generator) else None
        batches = self._batches()
        while self.done < self.skip and next(batches, None) is not None:
            self.done += 1
        self.skip = 0
        missing = object()
        try:
            batch = next(batches, missing)
            while batch is not missing:
                following = next(batches, missing)
                self.ended = following is missing
                self.done += 1
                yield to_device(batch, self.mesh.device) if self.place else batch
                batch = following
        finally:
            self.left(self)

    def state_dict(self) -> dict[str, Any]:
        """The position in the current pass and the order of its samples."""
        order = None if self.order is None else self.order.tolist()
        epoch = self.random.epoch - 1 if isinstance(self.random, SeedableRandomSampler) else None
        return {"batches": 0 if self.ended else self.done, "order": order, "epoch": epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the next pass where state_dict() was called."""
        self.skip = int(state["batches"])
        if self.skip and isinstance(self.random, SeedableRandomSampler) and state.get("epoch") is not None:
            self.random.epoch = int(state["epoch"])
        elif self.skip and state.get("order") is not None and self.random is not None:
            self.random.generator = self.random.generator or torch.Generator()
            self.random.generator.set_state(torch.tensor(state["order"], dtype=torch.uint8))

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch to the sampler or dataset, where it takes one."""
        targets: list[Any] = [self.dataset, getattr(self.loader, "sampler", None), self.random]
        for target in {id(target): target for target in targets}.values():
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def _described(batch: Any) -> Any:
    """A batch with shapes and dtypes in the place of its tensors."""
    if not has_tensors(batch):
        return batch
    return on_tensors(
        lambda tensor: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")},
        dict(batch) if hasattr(batch, "keys") else batch,
    )


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    on_tensors(lambda tensor: found.append(tensor) or tensor, batch)  # type: ignore[func-returns-value]
    return found

"""`model.tables`: embedding tables of recommenders, where they live, and their optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section


class EmbeddingTable(Section):
    """An embedding table: a vector for each value of a categorical feature."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the table, and of the key of a sample that holds its ids."""
    rows: int = Field(ge=1, le=2**40)
    """Number of rows: ids are from 0 to rows - 1; -1 is a missing value."""
    dim: int | None = Field(None, ge=1, le=65_536)
    """Width of a row. Default: model.dim."""
    pooling: Literal["sum", "mean", "none"] = "sum"
    """A sample's ids [length] become one vector, the sum or mean of their rows; lengths may differ between samples.
    none: every id has a vector of its own, such as one of several candidates."""
    features: tuple[str, ...] = ()
    """Keys of a sample whose ids are looked up in this table. Default: its name."""
    tower: Literal["user", "item"] = "user"
    """Tower that takes its vectors (two_tower)."""
    spread: Literal["auto", "table", "row", "column", "replicate"] = "auto"
    """How it is spread over the ranks: whole on one rank (table), by rows, by columns, or a copy on every rank
    (replicate). auto places tables by size and traffic."""
    home: Literal["device", "host"] = "device"
    """Memory that holds it: that of the device, or that of the host, with a cache of rows on the device."""
    cache_rows: int | None = Field(None, ge=1, le=2**40)
    """Rows of a host table that a rank caches on its device. Default: a tenth of its rows on the rank, at least
    65536."""
    init: float | None = Field(None, ge=0)
    """Initial values are uniform between -init and init. Default: 1 / √rows."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a sample whose ids are looked up."""
        return self.features or (self.name,)


class TableOptim(Section):
    """The optimizer of embedding tables. It changes only rows that a batch has used, and does not decay them."""

    name: Literal["adagrad", "adam", "rowwise_adam", "sgd"] = "adagrad"
    """adagrad (row-wise: one sum of squares a row), adam (lazy: moments of used rows only), rowwise_adam (the same with
    one second moment a row), or sgd."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate, with the schedule of optim. Default: optim.lr."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the squares."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moments (adam, rowwise_adam)."""

    @field_validator("betas")
    @classmethod
    def _below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must be two numbers from 0 to below 1")
        return value

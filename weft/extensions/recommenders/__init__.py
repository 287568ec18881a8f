"""Recommenders: embedding tables spread over ranks, DLRM, two towers of users and items, and ratings.

Registers the families dlrm and two_tower, the sources of ratings, and what spreads embedding tables.
"""

from weft.data.source_kinds import SOURCES, SourceKind
from weft.job.model import FAMILIES, Family
from weft.parallel.spreaders import SPREADERS, Spreader

PACKAGE = __name__

for family in (
    Family(
        "dlrm", "DLRM: embedding tables, dense features and their dot products.", f"{PACKAGE}.models.dlrm:DLRM",
        "module", dict(loss="bce", dim=16, bottom=(64,), top=(64,)), args=f"{PACKAGE}.models.arguments:dlrm_args",
        has_tables=True, fields=("dim", "tables", "table_optim", "dense_features", "bottom", "top"),
    ),
    Family(
        "two_tower", "Two towers, of users and of items, and the dot product of their outputs.",
        f"{PACKAGE}.models.two_tower:TwoTower", "module", dict(loss="bce", dim=16, bottom=(64,)),
        args=f"{PACKAGE}.models.arguments:two_tower_args",
        has_tables=True, fields=("dim", "tables", "table_optim", "dense_features", "bottom"),
    ),
):  # fmt: skip
    FAMILIES.register(family)

SOURCES.register(
    SourceKind(
        "ratings", f"{PACKAGE}.data.ratings:reads_ratings", f"{PACKAGE}.data.ratings:open_ratings", ("movielens",),
        f"{PACKAGE}.data.rating_files:is_local",
    )
)  # fmt: skip
SPREADERS.register(
    Spreader(
        "tables",
        lambda model, plan: any(getattr(module, "rows_on_ranks", False) for module in model.modules()),
        take_out=f"{PACKAGE}.tables.sharded_tables:spread_tables",
    )
)

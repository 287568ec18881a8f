"""What ranks of a pool need and takes seconds to import: imported once, by the process that they are forks of."""

from weft.launch.imports import importing

with importing():
    import weft.train.prove  # noqa: F401
    from weft.comm.leave import settle

settle()

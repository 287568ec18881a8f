"""Imported once by the fork server of a pool of ranks, since it takes seconds."""

from weft.training.imports import importing

with importing():
    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import settle

settle()

"""Slow imports of the rank pool, done once in the fork server of the pool."""

from weft.training.imports import importing

with importing():
    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import freeze_imports

freeze_imports()

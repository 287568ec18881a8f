"""Slow imports of the rank pool, done once in the fork server of the pool."""

from weft.training.garbage_collection import no_collection

with no_collection():
    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import freeze_imports

freeze_imports()

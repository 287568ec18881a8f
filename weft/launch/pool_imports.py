"""What ranks of a pool need and takes seconds to import: imported once, by the process that they are forks of."""

from weft.training.garbage_collection import no_collection

with no_collection():
    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import settle

settle()

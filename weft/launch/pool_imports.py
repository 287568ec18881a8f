"""What ranks of a pool need and takes seconds to import: imported once, by the process that they are forks of."""

from weft.training.imports import importing

with importing():
    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import freeze_imports

freeze_imports()

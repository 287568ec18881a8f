"""Slow imports of the rank pool, done once in the fork server of the pool."""

from weft.training.garbage_collection import no_collection

with no_collection():
    import torch
    import torch.distributed.tensor.debug

    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import freeze_imports

    torch.compiler.disable(freeze_imports)  # imports dynamo, which optimizers and FSDP need

freeze_imports()

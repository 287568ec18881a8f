"""For LightningModules: `weft.lightning.fit(module, datamodule, job)`, or `Trainer(strategy=WeftStrategy(job))`."""

from typing import Any

from weft.extensions.adapters.lightning_loop import Loops, fit
from weft.job.errors import MachineError

__all__ = ["Loops", "fit"]


def __getattr__(name: str) -> Any:
    if name != "WeftStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from weft.extensions.adapters.lightning_strategy import WeftStrategy
    except ImportError as error:
        raise MachineError(f"WeftStrategy needs Lightning ({error}); pip install lightning") from None
    return WeftStrategy

"""For LightningModules: `weft.lightning.fit(module, datamodule, job)`, or `Trainer(strategy=WeftStrategy(job))`.

`import weft.lightning as pl` also has the names of Lightning, where it is installed, and a Trainer on WeftStrategy.
"""

import importlib
from typing import Any

from weft.extensions.adapters.lightning_loop import Loops, fit
from weft.job.errors import MachineError

__all__ = ["Loops", "fit"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        strategy = importlib.import_module("weft.extensions.adapters.lightning_strategy")
    except ImportError as error:
        if name not in ("WeftStrategy", "Trainer"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        raise MachineError(f"{name} needs Lightning ({error}); pip install lightning") from None
    if name in ("WeftStrategy", "Trainer"):
        return getattr(strategy, name)
    package = importlib.import_module(strategy.PACKAGE)
    if not hasattr(package, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has {strategy.PACKAGE}")
    return getattr(package, name)

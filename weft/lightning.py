"""For LightningModules: `weft.lightning.fit(module, datamodule, job)`."""

from weft.adapters.lightning_loop import Loops, fit

__all__ = ["Loops", "fit"]

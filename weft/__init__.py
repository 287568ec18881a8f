"""Distributed training of neural networks with PyTorch, on any number of devices.

Three layers: functions (`connect`, `parallelize`, `save`, `load`), the loop in `weft/training/loop.py`, and
`weft.train(job)`. Names are imported on first use, so `import weft` is cheap and has no side effects. Nothing is
imported here: until `weft/__main__.py` handles signals, Ctrl-C would end in a traceback.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MODULES = {
    "Job": "weft.job",
    "load_job": "weft.job",
    "Plan": "weft.planner",
    "make_plan": "weft.planner",
    "plan": "weft.planner",
    "Mesh": "weft.mesh",
    "connect": "weft.mesh",
    "parallelize": "weft.parallel.apply",
    "save": "weft.checkpoint.save_load",
    "load": "weft.checkpoint.save_load",
    "train": "weft.launch.train",
    "from_hf": "weft.extensions.pretrained.reader",
    "Accelerator": "weft.extensions.adapters.accelerate.accelerator",
    "initialize": "weft.extensions.adapters.deepspeed_engine",
    "WeftTrainer": "weft.extensions.adapters.transformers.hf_trainer",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from weft.hardware.can_train import explain_missing_module

        if (reason := explain_missing_module(error)) is None:
            raise
        raise ImportError(f"weft.{name} {reason}", name=error.name) from None

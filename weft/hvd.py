"""For PyTorch scripts written for Horovod: `import weft.hvd as hvd`."""

import sys
from importlib import import_module

PACKAGE = "weft.extensions.adapters.hvd"

import_module(PACKAGE)
for name in [name for name in sys.modules if name.startswith(PACKAGE)]:  # its modules are not imported twice
    sys.modules[f"weft.hvd{name.removeprefix(PACKAGE)}"] = sys.modules[name]

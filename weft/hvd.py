"""For PyTorch scripts written for Horovod: `import weft.hvd as hvd`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("weft.extensions.adapters.hvd")

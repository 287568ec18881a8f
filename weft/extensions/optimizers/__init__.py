"""Optimizers that update a matrix as a whole: Adafactor, Muon, LARS and LAMB.

Registers adafactor, muon, lars and lamb for optim.name.
"""

from weft.extensions.optimizers.entries import ENTRIES
from weft.job.optim import OPTIMIZERS

for entry in ENTRIES:
    OPTIMIZERS.register(entry)

"""The dry run traces the engine; what it finds are the formulas' own numbers, and those of real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command import weft
from test_weights_models import MODELS, make

from weft.job.errors import JobError
from weft.launch.pool import RankPool
from weft.plan import make_plan
from weft.plan.memory import predict_memory
from weft.train.dryrun import DryRun, dryrun, measured_peak

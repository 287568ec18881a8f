"""The commands of `weft`, one entry each. Extensions register theirs in their own folder."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.hardware.can_train import check_can_train
from weft.job.registry import Registry

SECTIONS = ("Train", "Plan and prove", "Watch", "Results", "Data and machine")
"""Headings of `weft --help`, in order."""


@dataclass(frozen=True)
class Command:
    """A command, of one word or two."""

    name: str
    """What is typed after `weft`, such as `train` or `data build`."""
    function: str
    """`module:function`; its docstring is the help text. Imported when the command is used or listed."""
    section: str
    """Its heading in `weft --help`, one of SECTIONS."""
    group_help: str = ""
    """For a command of two words: the help text of the first, if no command has that name."""
    trains: bool = False
    """Whether it computes with torch or starts ranks. Where that is impossible it ends with one sentence."""

    @property
    def group(self) -> str:
        """The first word."""
        return self.name.split()[0]

    def load(self) -> Callable[..., Any]:
        """The function, imported. If the command trains, the function first checks that this machine can."""
        module, name = self.function.split(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
        if not self.trains:
            return loaded

        @functools.wraps(loaded)
        def checked(*args: Any, **options: Any) -> Any:
            check_can_train(f"weft {self.name}")
            return loaded(*args, **options)

        return checked


COMMANDS: Registry[Command] = Registry("command", __name__)

TRAIN, PLAN, WATCH, RESULTS, MACHINE = SECTIONS
TRAINING = {"train", "prove", "dryrun", "generate", "eval", "calibrate"}

for name, function, section in (
    ("train", "train:train", TRAIN),
    ("launch", "launching:launch", TRAIN),
    ("attach", "launching:attach", TRAIN),
    ("stop", "launching:stop", TRAIN),
    ("plan", "planning:plan", PLAN),
    ("estimate", "planning:estimate", PLAN),
    ("prove", "train:prove", PLAN),
    ("dryrun", "planning:dryrun", PLAN),
    ("runs", "launching:runs", WATCH),
    ("logs", "launching:logs", WATCH),
    ("report", "results:report", WATCH),
    ("generate", "results:generate", RESULTS),
    ("eval", "evaluation:evaluate", RESULTS),
    ("export", "results:export", RESULTS),
    ("recipes", "machine:recipes", MACHINE),
    ("lesson", "machine:lesson", MACHINE),
    ("schema", "machine:schema", MACHINE),
    ("doctor", "machine:doctor", MACHINE),
    ("calibrate", "planning:calibrate", MACHINE),
):
    COMMANDS.register(Command(name, f"weft.cli.{function}", section, trains=name in TRAINING))

for name, function, help_text in (
    ("data build", "data:data_build", "Build and convert token stores."),
    ("bench step", "bench:bench_step", "Measure this machine."),
    ("bench collectives", "bench:bench_collectives", "Measure this machine."),
    ("bench scaling", "bench:bench_scaling", "Measure this machine."),
    ("bench tiers", "bench:bench_tiers", "Measure this machine."),
):
    COMMANDS.register(Command(name, f"weft.cli.{function}", MACHINE, help_text, trains=name.startswith("bench")))

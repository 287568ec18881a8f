"""`launch.when`: runs a job while a rule of prices and hours holds, and stops it with a checkpoint otherwise."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from weft.job.errors import Exit, JobError, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.launch.launch_settings import LaunchPolicy
from weft.job.launch.when_rule import Rule, parse_rule
from weft.launch.launch_job import POLL_S, follow, submit
from weft.launch.process_start import own_record, running_process
from weft.launch.targets.driver import write_json
from weft.launch.targets.known_targets import find_target
from weft.launch.targets.target import LaunchRecord, LaunchRequest, Target, launch_folder

POLICY_FILE = "policy.json"
"""The process that applies the rule, in runs/NAME/launch."""
POLICY_LOG = "policy.log"
COMMAND_TIMEOUT_S = 30.0
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass
class PolicyState:
    """The rule of a job, and when it was last evaluated."""

    settings: LaunchPolicy
    log: Callable[[str], None]
    folder: Path
    known: bool | None = None
    """Whether the rule held at the last check."""
    why: str = ""
    prices: str = ""
    """The prices at the last check, as text."""
    _checked: float = field(default=-1e9)

    def rule(self) -> Rule:
        """The rule; a file is read again at each check."""
        text = self.settings.when or ""
        if not text.startswith("@"):
            return parse_rule(text)
        path = self.folder / text[1:]
        try:
            found = parse_rule(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise JobError(f"launch.when={text}: {path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise JobError(f"launch.when={text}: {error}") from None
        self.settings.check_names(found)
        return found

    def holds(self) -> bool | None:
        """Whether the run may run now, at most check_s old; None while a price is not known."""
        if time.monotonic() - self._checked >= self.settings.check_s:
            first, self._checked = self._checked < 0, time.monotonic()
            try:
                rule = self.rule()
            except JobError as error:
                if first:
                    raise
                self.known, self.why = None, str(error)  # a file that is being edited does not end a run
                self.log(self.why)
                return None
            prices = {name: self._price(name) for name in sorted(rule.names)}
            self.known = rule.holds(datetime.now(), prices)
            self.prices = "".join(f"{name} is {'unknown' if v is None else f'{v:g}'}, " for name, v in prices.items())
            self.why = f"{self.prices}it is {datetime.now():%a %H:%M}, and launch.when is {self.settings.when!r}"
        return self.known

    def _price(self, name: str) -> float | None:
        """The first number in a file, or in the output of a command; None if there is none."""
        source = self.settings.prices[name]
        try:
            if (path := self.folder / source).is_file():
                text = path.read_text(encoding="utf-8")
            else:
                done = subprocess.run(
                    shlex.split(source), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
                text = done.stdout if done.returncode == 0 else ""
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.log(f"launch.prices.{name}: {source!r} is neither a file nor a command that works: {error}")
            return None
        found = NUMBER.search(text)
        if found is None:
            self.log(f"launch.prices.{name}: {source!r} gave no number")
        return float(found[0]) if found else None


class _Stop(Exception):
    """The process that applies a rule was asked to end."""


def run_by_policy(target: Target, request: LaunchRequest, log: Callable[[str], None]) -> int:
    """Start the run while its rule holds, stop it with a checkpoint while it does not, until it has ended itself.

    Returns its exit code. A run that was preempted is started again. A stop signal stops the run, and ends this too.
    """
    state = PolicyState(request.job.launch, log, request.folder)
    request.launch_folder.mkdir(parents=True, exist_ok=True)
    path = request.launch_folder / POLICY_FILE

    received: list[int] = []

    def check_signals() -> None:  # not raised in a handler: it could be in submit(), or lost in a destructor
        if received:
            raise _Stop(received[0])

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    write_json(path, own_record())
    record: LaunchRecord | None = None
    try:
        while True:
            _wait(state, log, check_signals)
            record = submit(target, request)
            log(f"{request.job.name} is {target.name} job {record.job_id}: {state.why}")
            code = _follow(record, state, log, check_signals)
            if code != Exit.PREEMPTED:
                return code
            record = None
    except _Stop as stop:
        if record is not None:
            target.stop(record)
            return follow(record, log, offset=_output_size(record))
        return int(Exit.INTERRUPTED if stop.args[0] == signal.SIGINT else Exit.PREEMPTED)
    finally:
        path.unlink(missing_ok=True)


def _wait(state: PolicyState, log: Callable[[str], None], check_signals: Callable[[], None]) -> None:
    """Wait until the rule holds; the reason is logged when it changes."""
    logged: str | None = None
    while not state.holds():
        check_signals()
        if state.prices != logged:
            log(f"waiting: {state.why}")
            logged = state.prices
        time.sleep(min(1.0, state.settings.check_s))
    check_signals()


def _follow(
    record: LaunchRecord, state: PolicyState, log: Callable[[str], None], check_signals: Callable[[], None]
) -> int:
    """Follow a run; it is stopped when the rule no longer holds."""
    asked = False

    def check() -> None:
        nonlocal asked
        check_signals()
        if not asked and state.holds() is False:
            asked = True
            log(f"stopping: {state.why}; the run saves, and starts again when the rule holds")
            find_target(record.target).stop(record)

    return follow(record, log, meanwhile=check)


def _output_size(record: LaunchRecord) -> int:
    target, offset = find_target(record.target), 0
    while True:
        data, offset = target.output(record, offset)
        if not data:
            return offset


def policy_process(folder: Path) -> psutil.Process | None:
    """The process that applies the rule of a launched run, if it is alive on this machine."""
    with suppress(OSError, psutil.Error, KeyError, TypeError, ValueError):
        found = json.loads((folder / POLICY_FILE).read_text(encoding="utf-8"))
        return running_process(found)
    return None


def stop_policy(name: str, runs_dir: str, timeout_s: float) -> bool:
    """Stop a run that a rule starts and stops, and the process that does so; False if there is no such process."""
    folders = [launch_folder(RunDir(path)) for path in (Path(name), Path(runs_dir) / name)]
    for folder in folders:
        if (process := policy_process(folder)) is not None:
            deadline = time.monotonic() + timeout_s
            with suppress(psutil.Error):
                process.send_signal(signal.SIGTERM)
            while policy_process(folder) is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return policy_process(folder) is None
    return False


def start_in_background(request: LaunchRequest, arguments: Sequence[str]) -> Path:
    """Apply the rule in a process of its own (--detach). Returns the path of its log."""
    folder = request.launch_folder
    if (running := policy_process(folder)) is not None:
        raise JobError(f"{request.job.name} already waits for its rule in process {running.pid}; weft stop ends it")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POLICY_FILE).unlink(missing_ok=True)
    with (folder / POLICY_LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "launch", *arguments], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
    while not (folder / POLICY_FILE).exists():
        if process.poll() is not None:
            raise MachineError(f"the rule could not be applied; see {folder / POLICY_LOG}")
        time.sleep(0.02)
    return folder / POLICY_LOG

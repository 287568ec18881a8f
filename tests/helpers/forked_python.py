"""Start Python commands as forks of a process that has imported torch and weft, instead of new interpreters.

Importing takes most of the CPU time of a short run: about 7 s for `weft train` with its fork server, supervisor and
ranks. `Popen` here works like subprocess.Popen; `python -m`, `python -c` and `python FILE` become forks, and so do the
Python processes that such a fork starts itself. A fork has the arguments, environment, directory, open files, signal
handlers, process group and parent that the new interpreter would have. With `WITH_TWIN` in its environment, a fork may
have threads when it starts others. What a new interpreter reads before `main`
(`IMPORT_TIME`) cannot be changed by a fork, so a command with other values gets a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

IMPORT_TIME = (
    "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "TORCH", "PYTORCH_", "TRITON_", "LD_", "MALLOC_",
    "GLIBC_", "ATEN_", "LC_", "LANG", "TZ",
)  # fmt: skip
"""Prefixes of environment variables that interpreters or libraries read when they start."""
APPLIED = {"PYTHONPATH", "PYTHONUNBUFFERED"}
"""Those of them that a fork applies."""
LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
"""Prefixes of variables that torch reads when it joins a group or compiles; it sets the last one itself."""

ARGUMENT_BYTES, ENVIRONMENT_BYTES = 16384, 32768
"""Space for the command line and environment that /proc shows."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
FIRST_FREE_FILE = 200
TORCHRUN = os.path.join("torch", "distributed", "run.py")
START_TIMEOUT_S = 600.0
ROOT = Path(__file__).resolve().parents[2]

TEMPLATE_ENV = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
}
"""Environment of the template; commands with other import-time variables get a new interpreter."""

TWIN = "WEFT_TEST_TWIN"
WITH_TWIN = {TWIN: "1"}
"""Environment of a command that starts Python processes while it has threads: a fork of such a process may hang, so a
copy of it from before its first thread is forked instead."""

GC_THRESHOLD = gc.get_threshold()

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Start:
    """What a new process is started with."""

    command: list[str]
    """With the interpreter."""
    env: dict[str, str]
    cwd: str
    new_session: bool
    files: dict[int, int]
    """Open files of the new process: its number and ours."""
    network: str = ""
    """Network namespace to enter, if any."""
    blocked: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    """Signals that are blocked, and those that are ignored."""

    def can_fork(self, image: Mapping[str, str]) -> bool:
        """Whether a fork can do the same as a new interpreter; `image` are the variables of the process to fork."""
        return (
            sys.platform == "linux"
            and self.command[0] == sys.executable
            and len(self.command) > 1
            and (self.command[1] in ("-m", "-c", "-u") or self.command[1].endswith(".py"))
            and import_time(self.env) == import_time(image)
            and sum(map(len, self.command)) + len(self.command) < ARGUMENT_BYTES
            and len(_environment_block(self.env)) < ENVIRONMENT_BYTES
        )


def import_time(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that count when an interpreter starts."""
    return {k: v for k, v in env.items() if k.startswith(IMPORT_TIME) and k not in APPLIED and not k.startswith(LATER)}


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen whose Python commands are forks of a template process, started at the first use."""

    def _execute_child(self, *args: Any) -> None:
        start = _start_of(self, *args)
        if start is None or not start.can_fork(TEMPLATE_ENV):
            super()._execute_child(*args)
            return
        _started(self, template().start(start), args)


@contextlib.contextmanager
def forked_fork_server() -> Iterator[None]:
    """Let multiprocessing start its fork server as a fork of the template."""

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        start = _spawn_start(args, passfds, {**os.environ, **import_time(TEMPLATE_ENV)})
        forks = start.can_fork(TEMPLATE_ENV) and "forkserver" in start.command[-1]
        return template().start(start) if forks else int(_real_spawnv_passfds(path, args, passfds))

    multiprocessing.util.spawnv_passfds = spawn
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = _real_spawnv_passfds


def _spawn_start(args: Sequence[Any], passfds: Sequence[int], env: Mapping[str, str]) -> Start:
    """The arguments of multiprocessing.util.spawnv_passfds, without options of the interpreter."""
    words = [os.fsdecode(word) for word in args]
    words = [words[0], *words[next((i for i, w in enumerate(words) if w == "-c"), 1) :]]
    return Start(words, dict(env), os.getcwd(), False, {number: number for number in (0, 1, 2, *map(int, passfds))})


def _start_of(popen: subprocess.Popen[Any], *args: Any) -> Start | None:
    """The arguments of Popen, if none needs more than a fork does."""
    a = inspect.signature(_real_execute_child).bind(popen, *args).arguments
    own = ("gid", "gids", "uid", "preexec_fn", "executable", "shell")
    if any(a.get(name) for name in own) or not isinstance(a["args"], list | tuple) or a.get("umask", -1) >= 0:
        return None
    stdio = {0: a["p2cread"], 1: a["c2pwrite"], 2: a["errwrite"]}
    files = {number: file if file >= 0 else number for number, file in stdio.items()} | {f: f for f in a["pass_fds"]}
    env = os.environ if a["env"] is None else a["env"]
    command = [os.fsdecode(word) for word in a["args"]]
    cwd, env, network = os.path.abspath(a["cwd"] or os.curdir), dict(env), ""
    if command[:3] == ["ip", "netns", "exec"]:
        network, command = command[3], command[4:]
    if command[0] == "env":
        while command[1] == "-u":
            env.pop(command[2], None)
            command = ["env", *command[3:]]
        command = command[1:]
    return Start(command, env, cwd, bool(a["start_new_session"]), files, network)


_real_execute_child = subprocess.Popen._execute_child


def _started(popen: Any, pid: int, args: tuple[Any, ...]) -> None:
    """Leave a Popen as its own `_execute_child` does."""
    popen.pid, popen._child_created = pid, True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    bound = inspect.signature(_real_execute_child).bind(popen, *args).arguments
    popen._close_pipe_fds(*(bound[name] for name in pipes))


class Template:
    """The process that is forked, seen from the one that starts commands."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            space = "x" * ARGUMENT_BYTES
            command = [sys.executable, "-m", "helpers.forked_python", str(theirs.fileno()), space]
            env = {**TEMPLATE_ENV, "WEFT_TEST_SPACE": "x" * ENVIRONMENT_BYTES}
            self.process = subprocess.Popen(command, env=env, pass_fds=(theirs.fileno(),))
        ours.settimeout(START_TIMEOUT_S)
        self.socket, self.lock = ours, threading.Lock()
        atexit.register(self.close)

    def start(self, start: Start) -> int:
        """Start a process as a child of this one. Returns its pid."""
        message = json.dumps({**asdict(start), "files": list(start.files), "parent": os.getpid()}).encode()
        with self.lock, _subreaper():
            socket.send_fds(self.socket, [message], list(start.files.values()))
            return int(self.socket.recv(64))

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


class Twin(Template):
    """A copy of this process that is forked in its place, for a process that will have threads."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_TIMEOUT_S)
        self.lock, self.inherited = threading.Lock(), _inherited()
        if os.fork() == 0:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those to the process group
                os.closerange(0, theirs.fileno())
                os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
                serve(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def start(self, start: Start) -> int:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
        return super().start(replace(start, blocked=tuple(blocked), ignored=tuple(ignored)))


def _inherited() -> Any:
    """What a process inherits of its parent, but not of the parent's twin: limits and processors."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return limits, os.sched_getaffinity(0)


@functools.cache
def template() -> Template:
    return Template()


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Make orphaned descendants children of this process."""
    before = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# ---- in the template ----


def serve(sock: socket.socket) -> None:
    """Fork for each request until the other side closes."""
    while True:
        message, files, _, _ = socket.recv_fds(sock, 1 << 20, 64)
        if not message:
            return
        asked = json.loads(message)
        parent, numbers = asked.pop("parent"), asked.pop("files")
        start = Start(**asked, files=dict(zip(numbers, files, strict=True)))
        sock.send(str(_fork_orphan(start, parent)).encode())
        for file in files:
            os.close(file)


def _fork_orphan(start: Start, parent: int) -> int:
    """Fork a process that is re-parented to `parent`, which is a subreaper. Returns its pid."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = _fork(start, parent)
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(between, 0)
    with os.fdopen(read) as pipe:
        return int(pipe.read())


def _fork(start: Start, parent: int | None = None) -> int:
    """Fork a process that becomes a command. Returns its pid when its signals, session and files are set."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become(start, parent)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(70)
    os.close(write)
    os.read(read, 1)  # until the child has closed its end
    os.close(read)
    return pid


def _become(start: Start, parent: int | None) -> NoReturn:
    """Turn this fork into what a new interpreter would be, and run the command."""
    if start.new_session:
        os.setsid()
    _reset_signals()
    for number in start.ignored:
        signal.signal(number, signal.SIG_IGN)
    if parent is not None:  # else this is a fork of the process that starts it
        signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)
    gc.freeze()
    gc.enable()
    gc.set_threshold(*GC_THRESHOLD)
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    os.environ.clear()
    os.environ.update(start.env)
    if start.network:
        _enter_network(start.network)
    os.chdir(start.cwd)
    _show(start)
    _set_files(start.files)  # the parent goes on
    while parent is not None and os.getppid() != parent:
        if not os.path.exists(f"/proc/{parent}"):
            os._exit(70)
        time.sleep(0.001)
    words = start.command[1:]
    unbuffered = words[0] == "-u" or bool(start.env.get("PYTHONUNBUFFERED"))
    _open_streams(unbuffered)
    fork_children()
    code = _run(words[1:] if words[0] == "-u" else words, start)
    _exit(code)


def _reset_signals() -> None:
    """Handlers are as after exec: what was handled has the default action, what was ignored stays ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            handler = signal.getsignal(number)
            if number == signal.SIGINT and handler != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
            elif number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_IGN)
            elif handler not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)


def _enter_network(name: str) -> None:
    """What `ip netns exec` does: the network, and its /sys in a mount namespace."""
    new_network, new_mounts, recursive, slave = 0x40000000, 0x00020000, 1 << 14, 1 << 19
    space = os.open(f"/run/netns/{name}", os.O_RDONLY)
    assert _libc.setns(space, new_network) == 0, f"cannot enter the network {name}"
    assert _libc.unshare(new_mounts) == 0 and _libc.mount(b"", b"/", b"none", slave | recursive, None) == 0
    _libc.umount2(b"/sys", 2)
    assert _libc.mount(name.encode(), b"/sys", b"sysfs", 0, None) == 0


def _set_files(files: Mapping[int, int]) -> None:
    """Give open files their numbers and close all others."""
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE_FILE) for number, file in files.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    kept = [*sorted(files), os.sysconf("SC_OPEN_MAX")]  # from 0, 1, 2
    for before, after in pairwise(kept):
        if after > before + 1:
            os.closerange(before + 1, after)


def _open_streams(unbuffered: bool) -> None:
    def stream(old: Any, number: int, mode: str) -> Any:
        new = open(number, mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        if mode == "w":
            lines = not unbuffered and (number == 2 or os.isatty(number))
            new.reconfigure(line_buffering=lines, write_through=unbuffered)
        return new

    sys.stdin = sys.__stdin__ = stream(sys.__stdin__, 0, "r")
    sys.stdout = sys.__stdout__ = stream(sys.__stdout__, 1, "w")
    sys.stderr = sys.__stderr__ = stream(sys.__stderr__, 2, "w")


def _environment_block(env: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in env.items())


def _show(start: Start) -> None:
    """Write command line and environment where /proc, and so ps and psutil, reads them. Unused space of the command
    line is filled with slashes before the path of the interpreter."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    argument_start, argument_end, environment_start, environment_end = map(int, fields[45:49])
    line = b"".join(os.fsencode(word) + b"\0" for word in start.command).rjust(argument_end - argument_start, b"/")
    ctypes.memmove(argument_start, line, len(line))
    block = _environment_block(start.env).ljust(environment_end - environment_start, b"\0")
    ctypes.memmove(environment_start, block, len(block))


def _run(words: Sequence[str], start: Start) -> int:
    """Run `-m MODULE`, `-c CODE` or a file as `__main__`. Returns the exit code."""
    kind, rest = words[0], list(words[1:])
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    python_path = [os.path.abspath(p) for p in start.env.get("PYTHONPATH", "").split(os.pathsep) if p]
    first = {"-m": start.cwd, "-c": ""}.get(kind, os.path.dirname(os.path.abspath(kind)))
    sys.path[:] = [first, *python_path, *BASE_PATH]
    importlib.invalidate_caches()
    try:
        if kind == "-m":
            sys.modules.pop(rest[0], None)  # it runs as __main__
            _, main.__spec__, code = runpy._get_module_details(rest[0])
            main.__package__, main.__file__ = main.__spec__.parent, main.__spec__.origin
            main.__loader__, sys.argv = main.__spec__.loader, [main.__spec__.origin, *rest[1:]]
        elif kind == "-c":
            sys.argv, code = ["-c", *rest[1:]], compile(rest[0], "<string>", "exec")
        else:
            sys.argv, main.__file__ = [kind, *rest], os.path.abspath(kind)
            with open(kind, "rb") as file:
                code = compile(file.read(), kind, "exec")
        exec(code, main.__dict__)  # noqa: S102 (the command of a test)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    """End like an interpreter: wait for threads, call exit functions, flush."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


def fork_children() -> None:
    """From now on, Python processes that this process starts are forks of it or of its twin."""
    image = dict(os.environ)
    twin = Twin() if TWIN in image and "RANK" not in image else None

    def fork(start: Start) -> int | None:
        """The pid of a fork, or None if only a new interpreter does the same. A fork may wait forever for locks of
        other threads; those of torchrun hold none that its ranks use."""
        if not start.can_fork(image):
            return None
        if len(os.listdir("/proc/self/task")) == 1 or sys.argv[0].endswith(TORCHRUN):
            return _fork(start)
        return twin.start(start) if twin is not None and twin.inherited == _inherited() else None

    def execute_child(popen: subprocess.Popen[Any], *args: Any) -> None:
        start = _start_of(popen, *args)
        if start is not None and (pid := fork(start)) is not None:
            _started(popen, pid, args)
        else:
            _real_execute_child(popen, *args)

    def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        pid = fork(_spawn_start(args, passfds, os.environ))
        return int(_real_spawnv_passfds(path, args, passfds)) if pid is None else pid

    subprocess.Popen._execute_child = execute_child
    multiprocessing.util.spawnv_passfds = spawnv_passfds


_real_spawnv_passfds = multiprocessing.util.spawnv_passfds

BASE_PATH: list[str] = []
"""sys.path of an interpreter without PYTHONPATH."""


def main() -> None:
    """The template: import, then serve."""
    given = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    BASE_PATH[:] = [p for p in sys.path[1:] if p not in given]
    gc.disable()
    import numpy.ma  # noqa: F401  np.unique imports it
    import torch._dynamo  # noqa: F401  torch.compiler.reset() would start CUDA

    import weft.cli
    import weft.extensions.server.main
    import weft.launch.node
    import weft.launch.train
    import weft.supervisor.nodes.node_supervisor
    import weft.supervisor.supervisor
    import weft.training.loop
    import weft.training.supervised_rank
    import weft.verify.prove  # noqa: F401
    from weft.comm.teardown import freeze_imports

    freeze_imports()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"forks of a process with {len(threads)} threads may hang"
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock)
    os._exit(0)  # Triton's bindings print hundreds of lines about leaks when Python ends


if __name__ == "__main__":
    main()

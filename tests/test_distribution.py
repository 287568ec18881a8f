"""The wheel and the source archive, built offline and installed into an environment of their own."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from weft.job.errors import Exit

ROOT = Path(__file__).parent.parent
LIBRARIES = Path(torch.__file__).parents[1]
"""Where the packages of this environment are."""
TORCH = ("torch", "functorch", "torchgen")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]

NO_UNIX = """
import builtins, importlib, os, signal
import psutil, tempfile  # for Unix, they use what is taken away here
MODULES = {"fcntl", "grp", "pwd", "resource", "termios", "tty"}
import_it, import_name = builtins.__import__, importlib.import_module
def absent(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    by_weft = str((globals or {}).get("__name__", "")).startswith("weft")
    return absent(name) if name in MODULES and by_weft else import_it(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
importlib.import_module = lambda name, package=None: absent(name) if name in MODULES else import_name(name, package)
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGKILL", "SIGCHLD", "SIGSTOP", "SIGCONT"):
    delattr(signal, name)
for name in ("getuid", "geteuid", "sched_getaffinity", "sysconf", "fork", "killpg", "setsid"):
    delattr(os, name)
"""
"""A sitecustomize.py that takes away what Windows does not have."""


def build(source: Path, target: Path, *kinds: str) -> dict[str, Path]:
    """Run hatchling, which needs no network. Returns the files by their endings."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *(f"-t={kind}" for kind in kinds)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n(hatchling is in the dev extras: pip install -e '.[dev]')"
    return {path.suffix: path for path in target.iterdir()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")


def link(target: Path, with_torch: bool) -> None:
    """Link torch, or every other library of this environment except weft."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in LIBRARIES.iterdir():
        is_torch = entry.name.partition("-")[0] in TORCH
        if is_torch == with_torch and entry.suffix != ".pth" and not entry.name.startswith(("weft", "_editable", "__")):
            (target / entry.name).symlink_to(entry)


class Installed:
    """An environment in which the wheel is installed."""

    def __init__(self, folder: Path, wheel: Path):
        self.folder, self.torch = folder, folder / "with-torch"
        env = folder / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(env / "bin" / "python"), "install", "--quiet"]
        subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", str(wheel)], check=True)
        self.bin = env / "bin"
        link(next(env.glob("lib/python*/site-packages")), with_torch=False)
        link(self.torch, with_torch=True)
        (folder / "windows").mkdir()
        (folder / "windows" / "sitecustomize.py").write_text(NO_UNIX)

    def run(self, *command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, with one more folder to import from."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"PYTHONPATH": str(path)} if path else {}
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(program, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def installed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), archives[".whl"])


def test_the_wheel_trains_and_reports(installed: Installed) -> None:
    assert installed.run("weft", "--version").stdout == f"weft {VERSION}\n"
    small = ("train.steps=2", "train.eval_every=2", "data.seq_len=16", "cluster.devices_per_node=1")
    trained = installed.run("weft", "train", "tiny", *small, path=installed.torch)
    assert trained.returncode == 0 and "done: step 2" in trained.stderr, trained.stdout + trained.stderr
    report = installed.folder / "runs" / "tiny" / "report.html"
    report.unlink()
    reported = installed.run("weft", "report", "tiny")
    assert reported.returncode == 0 and "const drawFigure = " in report.read_text("utf-8"), reported.stderr


def test_without_torch_a_plan_is_made_and_training_says_what_to_install(installed: Installed) -> None:
    planned = installed.run("weft", "plan", "llama-70b-64xh100")
    assert planned.returncode == 0 and "64 × h100-sxm" in planned.stdout, planned.stderr
    for command in ("train tiny", "lesson collectives", "export tiny"):
        refused = installed.run("weft", *command.split())
        verb = " ".join(command.split()[: 1 + command.startswith("lesson")])
        assert refused.stderr == (
            f"weft: weft {verb} needs torch, which is not installed: pip install 'torch>=2.11' "
            "(weft plan works without it)\n"
        )
        assert refused.returncode == Exit.MACHINE
    code = """if True:
        import weft
        print(weft.plan(weft.Job(model="tiny"), 1).world)
        for use in (lambda: weft.connect, lambda: weft.train(weft.Job(model="tiny"))):
            try:
                use()
            except Exception as error:
                print(error)
    """
    lines = installed.run("python", "-c", code).stdout.splitlines()
    assert lines[0] == "1" and lines[1].startswith("weft.connect needs torch, which is not installed: pip install")
    assert "needs torch" in lines[2]


def test_without_unix_a_plan_is_made_and_training_says_where_it_runs(installed: Installed) -> None:
    windows = installed.folder / "windows"
    planned = installed.run("weft", "plan", "demo", path=windows)
    assert planned.returncode == 0 and "layout" in planned.stdout, planned.stderr
    for command in ("train tiny", "data build notes --out store"):
        refused = installed.run("weft", *command.split(), path=windows)
        assert refused.returncode == Exit.MACHINE
        assert refused.stderr == (
            f"weft: weft {command.split()[0]} needs Linux or macOS: on Windows, run Weft inside WSL "
            "(weft plan works here)\n"
        )


def test_the_wheel_of_the_source_archive_is_the_same(archives: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(archives[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    wheels = [archives[".whl"], build(source, tmp_path / "dist", "wheel")[".whl"]]
    files = [{(each.filename, each.CRC) for each in zipfile.ZipFile(wheel).infolist()} for wheel in wheels]
    assert files[0] == files[1]
    names = {name for name, _ in files[0]}
    folder = f"weft-{VERSION}.dist-info"
    assert {f"{folder}/licenses/LICENSE", "weft/_recipes/demo.yaml"} <= names
    lessons = ("order.txt", "collectives.py", "zh/messages.yaml", "zh/collectives.md", "checks/collectives.py")
    assert {f"weft/_lessons/{file}" for file in lessons} <= names
    metadata = zipfile.ZipFile(wheels[0]).read(f"{folder}/METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata and "\nProvides-Extra: all\n" in metadata


def test_the_extra_all_has_every_extra_but_those_of_developers() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert everything == f"weft[{','.join(sorted(extras.keys() - {'all', 'dev', 'site'}))}]"


def test_the_version_is_that_of_the_changelog_and_the_citation() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)[1] == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_workflows_test_the_stated_versions() -> None:
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == classifiers
    assert PROJECT["requires-python"] == f">={classifiers[0]}"
    (oldest,) = (each.partition(">=")[2] for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"=={oldest}.*" in str(ci)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {classifiers[0]} to {classifiers[-1]}, torch {oldest} to the newest" in readme


def test_github_files_are_valid_and_name_existing_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    assert len(files) > 6
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert isinstance(yaml.safe_load(text), dict), file
        assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets, file


@pytest.mark.parametrize("page", ["AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_and_paths_of_the_pages_for_contributors_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    paths = re.findall(r"(?<![\w/])((?:weft|tests|docs)/[\w./]+)", text)
    missing = [path for path in (*links, *paths) if not (ROOT / path).exists()]
    assert not missing


def test_make_train_installs_the_runtime_only_and_make_test_the_rest(tmp_path: Path) -> None:
    def commands(target: str, path: str) -> list[str]:
        options = ["VENV=" + str(tmp_path / "venv"), "GPU="]
        done = subprocess.run(
            ["make", "-n", target, *options], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if "pip install" in line]

    (runtime,) = commands("train", "/usr/bin:/bin")
    assert runtime.endswith('pip install --quiet --no-compile -c constraints-cpu.txt -e "."')
    (everything,) = commands("test", "/usr/bin:/bin")
    assert everything.endswith('-c constraints-cpu.txt -e ".[dev]"')
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    lines = commands("train", f"{tmp_path}:/usr/bin:/bin")
    assert lines[0].startswith(f"{tmp_path}/uv pip install --quiet --python {tmp_path}/venv/bin/python")
    assert "|| " in lines[0] and runtime in lines[-1], "pip installs where uv fails"

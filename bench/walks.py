"""How many files of weft a plan with one pinned layout passes through.

    python bench/walks.py            # the number of files, and its limit
    python bench/walks.py --files    # their names too

A file counts if one of its functions runs. What runs while modules are imported does not count: bodies of modules and
of classes, entries that are registered.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import weft
from weft.cli.main import main as weft_command

PLAN = ("plan", "tiny", "parallel.dp_shard=2", "parallel.tp=1", "--nproc", "2")
PLAN_FILES = 60
"""Most files that a pinned plan may pass through."""
ROOT = Path(weft.__file__).parent


@contextmanager
def walked() -> Iterator[set[str]]:
    """Collect the files of weft whose functions run."""
    files: set[str] = set()
    importing = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal importing
        name = frame.f_code.co_name
        if name == "<module>" and event in ("call", "return"):
            importing += 1 if event == "call" else -1
        elif event == "call" and not importing and frame.f_code.co_filename.startswith(str(ROOT)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(profile)
    try:
        yield files
    finally:
        sys.setprofile(None)


def files_of(run: Callable[[], object]) -> set[str]:
    """The files that a call passes through."""
    with walked() as files, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run()
    return files


def run_plan() -> None:
    """`weft plan` of a pinned layout."""
    sys.argv = ["weft", *PLAN]
    weft_command()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="print the names of the files")
    args = parser.parse_args()
    files = files_of(run_plan)
    print(f"weft {' '.join(PLAN)}: {len(files)} files; at most {PLAN_FILES} are wanted")
    if args.files:
        print("\n".join(sorted(files)))


if __name__ == "__main__":
    main()

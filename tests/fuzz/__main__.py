"""Fuzz by hand: `python -m tests.fuzz [--target NAME] [--cases N] [--seconds S] [--seed SEED]`.

Each case is made from `SEED NUMBER`, so a finding is repeated with --seed and --first NUMBER --cases 1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from .targets import TARGETS, Target


def run_target(target: Target, seed: int, first: int, cases: int, seconds: float) -> tuple[int, Counter[str]]:
    """Run the corpus and random cases of a target; prints each new finding with how to repeat it."""
    found: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "work"
    folder.mkdir()
    began, done = time.monotonic(), 0
    try:
        for number in range(-len(target.corpus) if first == 0 else first, first + cases):
            if time.monotonic() - began > seconds:
                break
            done += 1
            try:
                if number < 0 and target.replay is not None:
                    target.replay(target.corpus[number], folder)
                else:
                    target.run(random.Random(f"{seed} {target.name} {number}"), folder)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                key = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"[:160]
                found[key] += 1
                if found[key] == 1:
                    print(f"\n{target.name}, --seed {seed} --first {number}:", file=sys.stderr)
                    traceback.print_exception(error)
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    return done, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="default: all")
    parser.add_argument("--cases", type=int, default=1000, help="cases per target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    total = findings = 0
    for name in asked.target or TARGETS:
        began = time.monotonic()
        done, found = run_target(TARGETS[name], asked.seed, asked.first, asked.cases, asked.seconds)
        total, findings = total + done, findings + len(found)
        print(f"{name:12} {done:7,} cases in {time.monotonic() - began:6.0f} s, {len(found)} findings", flush=True)
        for text, count in found.most_common():
            print(f"             {count:5} × {text}", flush=True)
    print(f"{total:,} cases, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

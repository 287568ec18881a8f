"""Reads configs of tiny models with one key deleted, nulled, changed or added, in Weft and in transformers, and counts
how many give the same logits.

    python bench/config_fuzz.py [NAME ...] [--verbose]

A config that Weft refuses in one sentence is counted as refused, whatever transformers does with it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.config_fuzz import DELETED, NAMES, edits, outcome, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="models; all without a name")
    parser.add_argument("--verbose", action="store_true", help="show each refused config too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for base in (base for name in args.names for base in saved(name, Path(folder) / name.replace(" ", "-"))):
            counts: Counter[str] = Counter()
            for edit in edits(base.config):
                result = outcome(base, edit)
                counts[result.split(" (")[0].split(":")[0]] += 1
                if args.verbose or result not in ("refused", "equal"):
                    value = "deleted" if edit[1] is DELETED else repr(edit[1])
                    print(f"  {base.name}: {'.'.join(edit[0])} {value}: {result}", flush=True)
            print(f"{base.name}: {dict(counts)}", flush=True)
            total += counts
    print(f"all {total.total()}: {dict(total)}")


if __name__ == "__main__":
    main()

"""`weft diagnose`: the command."""

from __future__ import annotations

from weft.cli.common import AsJson, RunArg, print_json, printable
from weft.cli.terminal import fit, text_width


def diagnose(run: RunArg, as_json: AsJson = False) -> None:
    """Say why a run is slow, or why it failed: causes with their evidence, what each costs, and what to change."""
    from weft.extensions.diagnose.diagnose import diagnose, sentences
    from weft.job.files.run_folder import find_run

    # a refused launch has no job.yaml
    findings, found = diagnose(find_run(run, files=("job.yaml", "events.jsonl")))
    if as_json:
        print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        print(fit(printable("\n".join(sentences(findings, found)).rstrip(), keep="\n"), text_width()))

"""train.sync=predict beside plain sums, local SGD and DiLoCo on a slow link: loss after equal steps and equal time.

    python bench/predict.py --write      # as root on Linux with iproute2; five minutes → predict.md

Two network namespaces with one core and one rank each (see slow_link.py), a llama of 7 million weights and 512 tokens
a step on pydoc, so that computing a step and summing its gradients take about as long. Evaluations use the weights
that the next step would use: of predict those are predicted, except after the last step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from slow_link import job_of, weft_run

HERE = Path(__file__).parent
MODES = ("step", "predict", "local:8", "diloco:20")


def loss_at(output: list[list[float]], seconds: float) -> float:
    """The validation loss after so many seconds, interpolated between evaluations."""
    before = output[0]
    for now in output:
        if now[2] >= seconds:
            share = 1.0 if now is before else (seconds - before[2]) / (now[2] - before[2])
            return before[1] + share * (now[1] - before[1])
        before = now
    return output[-1][1]


def main() -> None:
    from weft.extensions.chaos.virtual_hosts import VirtualHosts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--links", default="200", help="Mb/s")
    parser.add_argument("--write", action="store_true", help="write predict.md")
    asked = parser.parse_args()
    lines = [
        f"| link | `train.sync` | seconds a step | loss after {asked.steps} steps | loss after equal seconds |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="weft-predict-") as name:
        folder = Path(name)
        for mbit in (float(x) for x in asked.links.split(",")):
            found = {}
            with VirtualHosts(2, mbit=mbit) as hosts:
                for mode in MODES:
                    title = f"{mode.replace(':', '')}-{mbit:g}"
                    job = job_of(title, asked.steps, max(1, asked.steps // 10), folder, train={"sync": mode})
                    job["data"]["seq_len"], job["train"]["global_batch"] = 32, 16
                    found[mode] = weft_run(hosts, folder, job, 900)[0]
            seconds = min(output[-1][2] for output in found.values())
            for mode, output in found.items():
                each, loss = output[-1][2] / asked.steps, output[-1][1]
                at = f"{loss_at(output, seconds):.3f} ({seconds:.0f} s)"
                lines.append(f"| {mbit:g} Mb/s | `{mode}` | {each:.2f} | {loss:.3f} | {at} |")
                print(lines[-1], flush=True)
    if asked.write:
        text = (
            "# Predicted sums on a slow link\n\n`python bench/predict.py --write`: two network namespaces on one "
            "machine, with one core and one rank each, the link between them shaped by `tc tbf`; a llama of 7 million "
            "weights and 512 tokens a step, on pydoc, the same learning rate for all. Losses are of validation.\n\n"
        )
        (HERE / "predict.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

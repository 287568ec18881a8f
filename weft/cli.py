"""One command a verb, each a few lines that call the rooms below. Rooms are imported where they are used."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="weft", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Weft weaves one training run across any number of devices.",
    epilog="JOB is a recipe's name (weft recipes) or a YAML file; key=value changes it, as in train.steps=100.",
)  # fmt: skip
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Token stores.")
app.add_typer(data_app, name="data")
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measurements on this machine.")
app.add_typer(bench_app, name="bench")

JobArg = Annotated[str, typer.Argument(metavar="JOB", help="A recipe's name or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the job, such as optim.lr=3e-4.")
]
RunArg = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name below runs/.")]
Nproc = Annotated[int | None, typer.Option("--nproc", "-n", min=1, help="Ranks to start on this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON alone on stdout.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"weft {version('weft')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Weft weaves one training run across any number of devices."""


@app.command()
def train(
    job: JobArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    fresh: Annotated[bool, typer.Option(help="Set an earlier run of this name aside and start from step 0.")] = False,
    resilient: Annotated[
        bool | None,
        typer.Option(
            help="Replace ranks that are lost and go on. Left out: with more than one rank.", show_default=False
        ),
    ] = None,
) -> None:
    """Train a job. Started again, it resumes; started by torchrun or mpirun, it joins."""
    from weft.hardware.world import adopt
    from weft.job.load import load_job
    from weft.train.api import join, prepare, start
    from weft.train.several import start_node, this_node

    described = load_job(job, overrides or ())
    if (place := this_node(described, nproc)) is not None:
        raise typer.Exit(start_node(described, place, nproc, say=_say))
    if adopt():
        raise typer.Exit(join(described, say=_say))
    raise typer.Exit(start(*prepare(described, nproc), fresh=fresh, resilient=resilient, say=_say))


@app.command()
def plan(
    job: JobArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    gantt: Annotated[bool, typer.Option("--gantt", help="Draw the simulated time line of a pipelined step.")] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="Layouts to list, the winner and the runner-ups.")] = 5,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="List the front over time, memory, money and energy.")
    ] = False,
    why_not: Annotated[str | None, typer.Option("--why-not", help="Explain a layout, such as 'tp=8 pp=2'.")] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="Offers to price the run on: clouds, NAME:spot, own.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option("--history", help="A folder of runs to correct the estimate by.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Also choose batch, rate, warm-up and ramp.")] = False,
    tokens: Annotated[float | None, typer.Option("--tokens", min=1, max=1e18, help="Token budget of --tune.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw the plan as one offline page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search the best way to spread a job, and show why, what it takes, and what else there is."""
    from weft.job.load import load_job
    from weft.plan.show import Asked, show

    words = list(overrides or ())
    # `--compare a b own`: what follows the first offer arrives beside the overrides
    offers = [w for w in words if "=" not in w] if compare else []
    described = load_job(job, [w for w in words if w not in offers])
    named = [name for text in [compare, *offers] if text for name in text.split(",")]
    front = pareto or as_json or html is not None
    made = show(described, nproc, Asked(top, front, gantt, why_not, named, history, tune, tokens))
    if as_json:
        _print_json(made.data)
    else:
        print(made.text)
    if html is not None:
        from weft.watch.plan_page import write_plan_page

        _say(f"written: {write_plan_page(html, made.data)}")
    if made.failed:
        raise made.failed


@app.command()
def estimate(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A recipe's name or a YAML file.")] = None,
    overrides: Overrides = None,
    table: Annotated[Path | None, typer.Option(help="Score the estimates against a table of published runs.")] = None,
    stack: Annotated[str | None, typer.Option(help="The calibration: a stack's name or a JSON file.")] = None,
    fit: Annotated[
        bool, typer.Option(help="Scale sources no calibration knows, by their rows of other models.")
    ] = True,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Say what a job's layout would take: memory, time, energy, money. Or score a table of runs."""
    from weft.plan.estimate_view import run_and_show

    print(run_and_show(job, overrides or [], table, stack, fit, nproc, as_json))


@app.command()
def prove(
    job: JobArg,
    overrides: Overrides = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layouts", "-l", help="Such as ddp2,zero3,'dp_shard=2 tp=2'. Left out: all that fit the job."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    shrink: Annotated[bool, typer.Option(help="Prove a small model of the same kind instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove on local CPU ranks that every layout is the same run as one process."""
    from weft.job.load import load_job
    from weft.train.prove_view import run_and_show

    raise typer.Exit(run_and_show(load_job(job, overrides or ()), layouts or [], steps, shrink, as_json))


@app.command()
def chaos(
    job: JobArg,
    overrides: Overrides = None,
    faults: Annotated[
        str, typer.Option(help="Such as kill:3,stop@1,nan (KIND[:COUNT][@RANK]), random:10, or all.")
    ] = "random:5",
    seed: Annotated[int, typer.Option(help="Another seed: other ranks, other moments.")] = 0,
    nproc: Nproc = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of network namespaces (root), each with --nproc ranks.")] = 1,
    every: Annotated[
        float | None, typer.Option(min=1, help="Strike at about this many seconds' distance until the run ends.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Run undisturbed first, and compare every bit of the weights.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start the run again however it ended.")] = False,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without a step until the run is given up.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Rehearse: put faults into a real local run, and account for what they cost. Exit code 1 if anything was lost."""
    from weft.job.load import load_job
    from weft.train.chaos_conductor import Rehearsal
    from weft.train.chaos_view import run_and_show

    described = load_job(job, overrides or ())
    asked = Rehearsal(
        described, nproc, faults, seed, nodes, every_s=every, compare=compare, restart=restart, patience_s=patience
    )
    raise typer.Exit(run_and_show(asked, as_json))


@app.command()
def dryrun(
    job: JobArg,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks. Left out: those of the job's cluster.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which of them is traced.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Trace one rank's real step without data, devices or peers: memory, FLOPs and collectives beside the estimate."""
    from weft.job.load import load_job
    from weft.plan.make import make_plan
    from weft.plan.ranks import on_nodes
    from weft.train.dryrun import dryrun as trace
    from weft.train.dryrun import show

    found = trace(*make_plan(on_nodes(load_job(job, overrides or ()), world), world), rank)
    _print_json(found.to_json()) if as_json else print(show(found))


@app.command()
def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes: seconds instead of minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine into hardware/NAME.json; later estimates use it."""
    from weft.train.calibrate import run_and_show

    run_and_show(quick, as_json)


@app.command()
def generate(
    run: RunArg,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "The ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to make.")] = 300,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many likeliest tokens; 0 among all.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
    ema: Annotated[bool, typer.Option(help="Use the moving average of the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write text with a trained run."""
    from weft.job.run import find_run
    from weft.train.generate import generate as pieces
    from weft.train.weights import newest

    found = newest(find_run(run))
    made = pieces(found, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, ema=ema)
    if as_json:
        _print_json({"step": found.step, "prompt": prompt, "text": "".join(made)})
        return
    first = next(made, "")  # what cannot be generated is refused before anything is printed
    print(prompt + first, end="", flush=True)
    for piece in made:
        print(piece, end="", flush=True)
    print()


@app.command()
def export(
    run: RunArg,
    to: Annotated[str, typer.Option(help="The format: safetensors.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file. Left out: RUN/model.safetensors.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    ema: Annotated[bool, typer.Option(help="Export the moving average of the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights as one consolidated file."""
    from weft.job.errors import JobError
    from weft.job.run import find_run
    from weft.precision import EXPORT
    from weft.train.weights import export_safetensors, newest

    if to != "safetensors":
        raise JobError(f"--to {to!r} is not known; safetensors is")
    if dtype not in EXPORT:
        raise JobError(f"--dtype {dtype!r} is not known; use {', '.join(EXPORT)}")
    folder = find_run(run)
    found = newest(folder)
    path = export_safetensors(found, out or folder.path / "model.safetensors", ema, EXPORT[dtype])
    size = path.stat().st_size
    if as_json:
        _print_json({"path": str(path), "step": found.step, "bytes": size})
    else:
        print(f"{path}: step {found.step}, {size / 2**20:.1f} MiB")


@app.command()
def report(run: RunArg, as_json: AsJson = False) -> None:
    """Draw a run as one offline page, RUN/report.html."""
    from weft.job.run import find_run
    from weft.watch.report import write_report

    path = write_report(find_run(run))
    if as_json:
        _print_json({"path": str(path)})
    else:
        print(path)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what is missing, and what to do. Exit code 4 if something is missing."""
    from weft.hardware.doctor import diagnose, show, to_json, worst
    from weft.job.errors import Exit

    checks = diagnose()
    print(to_json(checks) if as_json else show(checks))
    raise typer.Exit(Exit.MACHINE if worst(checks) == "fail" else Exit.DONE)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job."""
    from weft.job.schema import Job

    _print_json(Job.model_json_schema())


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the recipes."""
    from weft.job.load import recipes as known

    lines = {name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for name, path in known().items()}
    if as_json:
        _print_json(lines)
        return
    width = max(len(name) for name in lines)
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")


@app.command()
def lesson(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Left out: list them.")] = None) -> None:
    """Run a lesson: one parallelism by hand, in plain PyTorch, on ranks of this machine."""
    from weft.job.errors import JobError
    from weft.job.load import lessons

    known = lessons()
    if name is None:
        for each, path in known.items():
            print(f"{each:16} {path.read_text(encoding='utf-8').splitlines()[0].strip(chr(34))}")
        return
    if name not in known:
        raise JobError(f"no lesson is named {name!r}; lessons: {', '.join(known) or 'none'}")
    raise typer.Exit(subprocess.run([sys.executable, known[name]], check=False).returncode)


@data_app.command("build")
def data_build(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Text files, JSONL files or folders.")],
    out: Annotated[Path, typer.Option(help="The store's folder.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, bpe:N to train one of N tokens, or a tokenizer.json.")
    ] = "bytes",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Left out: the cores.")] = None,
    field: Annotated[str, typer.Option(help="Which field of a JSONL line holds the text.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Turn text into a memory-mapped token store. Started again after a kill, it continues."""
    from weft.data.build import build
    from weft.watch.bar import byte_bar

    with byte_bar("building", quiet=as_json) as progress:
        made = build(sources, out, tokenizer, workers, field, progress)
    if as_json:
        _print_json(asdict(made))
    else:
        print(f"{made.path}: {made.tokens:,} tokens, {made.documents:,} documents, vocabulary {made.vocab:,}")


@bench_app.command("step")
def bench_step(
    job: JobArg,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile.")] = 3,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Show where one step's time goes, by class of kernel, and how far each is from what the device can do."""
    from weft.job.load import load_job

    described = load_job(job, overrides or ())
    from weft.train.profile import bench_step, show

    code, run = bench_step(described, nproc, steps, _say)
    if code:
        raise typer.Exit(code)
    print(run.profile.read_text(encoding="utf-8") if as_json else show(run))
    if not as_json:
        _say(f"profile: {run.profile}; picture: {run.report}")


@bench_app.command("collectives")
def bench_collectives(
    nproc: Nproc = None,
    kinds: Annotated[str | None, typer.Option(help="Such as all_reduce,broadcast. Left out: every collective.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Such as native,ring. Left out: every algorithm.")] = None,
    dtypes: Annotated[str, typer.Option(help="Such as fp32,bf16,fp16,int64.")] = "fp32,bf16",
    smallest: Annotated[str, typer.Option("--min", help="The smallest size.")] = "1K",
    largest: Annotated[str, typer.Option("--max", help="The largest size.")] = "4M",
    device: Annotated[str, typer.Option(help="cpu or cuda. auto: GPUs where there are several.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="About how long to measure.")] = 15.0,
    layout: Annotated[
        str | None, typer.Option(help="A mesh, such as 'dp_shard 2 x tp 2'; each axis is measured.")
    ] = None,
    axes: Annotated[str | None, typer.Option(help="Of the mesh, such as tp,everyone. Left out: all.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it as one offline page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every collective, on local ranks or those that torchrun or mpirun started: α, β and bandwidth."""
    from weft.train.collectives import run_and_show

    run_and_show(nproc, kinds, algorithms, dtypes, smallest, largest, device, seconds, html, as_json, layout, axes)


def main() -> None:
    """The entry point: a person's mistake is one sentence and an exit code, never a traceback."""
    from weft.job.errors import Exit, WeftError

    # once the exit code is known, one Ctrl-C more shall not change it
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        app(prog_name="weft")
    except WeftError as error:
        _say(f"weft: {error}")
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(Exit.DONE))
    except OSError as error:
        _say(f"weft: {error.strerror or error}: {error.filename or 'the machine refused'}")
        sys.exit(int(Exit.MACHINE))


if __name__ == "__main__":
    main()

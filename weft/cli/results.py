"""`weft generate`, `export` and `report`: the results of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.common import AsJson, RunArg, clean_up_on_interrupt, print_json, print_stderr

if TYPE_CHECKING:
    from weft.checkpoint.format import SavedCheckpoint
    from weft.job.schema import Job
    from weft.training.chat import Chat
    from weft.training.generate import Sampling

MIN_TEMPERATURE = 0.001
"""Smaller temperatures overflow the logits; they would choose the most likely token, as 0 does."""


def generate(
    run: RunArg,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; give it again for several. Default: 'The '.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=10**7, help="Number of tokens to generate.")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0, max=1000, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K most likely tokens; 0 uses all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens of this total probability.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End a text before this one; give it again for several.")
    ] = None,
    beams: Annotated[
        int, typer.Option(min=1, max=1000, help="Beam search over so many texts at once, of an encoder-decoder (t5).")
    ] = 1,
    tp: Annotated[
        int, typer.Option(min=1, max=1024, help="Split the model over so many processes by tensor parallelism.")
    ] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Answer a file of JSON lines with prompt or messages. Other fields are kept.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File of the answers to --prompts. Default: NAME.answers.jsonl beside it.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Lines of --prompts that are answered at once.")] = 16,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Talk by the tokenizer's chat template: each --prompt is a turn; without one, lines are read.",
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of --chat.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Chat template of --chat: chatml, plain or a .jinja file. Default: the tokenizer's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
    ema: Annotated[bool, typer.Option(help="Use the moving average of the weights.")] = False,
    trust_module: Annotated[
        bool, typer.Option(help="Import a module that the checkpoint names and the run's job.yaml does not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text with a trained or imported run."""
    from weft.job.errors import JobError
    from weft.job.files.run_folder import find_run
    from weft.job.load import load_job
    from weft.training.export import newest, saved_job
    from weft.training.generate import Sampling
    from weft.training.generate import generate as generate_texts

    if temperature != 0 and not temperature >= MIN_TEMPERATURE:
        raise JobError(f"--temperature {temperature:g} is too small; use 0 or at least {MIN_TEMPERATURE}")
    if not -(2**63) <= seed < 2**63:
        raise JobError(f"--seed {seed} is too large; use a number of up to 18 digits")
    folder, prompt_texts = find_run(run), prompt or ["The "]
    own, found = load_job(str(folder.job)), newest(folder)
    job = saved_job(found, own, trust_module)
    sampling = Sampling(temperature, top_k, top_p, tuple(word for word in stop or () if word), seed)
    if tp > 1 and (chat or beams > 1):
        raise JobError(f"--tp continues texts; leave out --{'chat' if chat else 'beams'}, or --tp")
    if prompts is not None:
        others = {"--prompt": prompt, "--chat": chat, "--system": system, "--tp": tp > 1, "--beams": beams > 1}
        for option in (option for option, given in others.items() if given):
            raise JobError(f"--prompts answers a file; leave out {option}, or --prompts")
        _answer_file(found, job, prompts, out, tokens, sampling, batch, ema, template, as_json)
        return
    if out is not None:
        raise JobError(f"--out {out} is for the answers to --prompts FILE; give both or leave it out")
    if chat:
        from weft.training.chat import Chat

        if beams > 1:
            raise JobError("--chat samples answers, and --beams searches translations; leave one out")
        talk = Chat.open(found, job, tokens, sampling, ema=ema, template=template, system=system)
        return _chat(talk, prompt, found.step, as_json)
    if system is not None or template is not None:
        raise JobError(f"--{'template' if system is None else 'system'} is for --chat; give both or leave it out")
    if tp > 1:
        from weft.launch.start_generation import generate_split

        pieces = generate_split(found, job, prompt_texts, tokens, sampling, ema, tp)
    else:
        pieces = generate_texts(found, job, prompt_texts, tokens, sampling, ema, beams)
    if as_json:
        texts = [""] * len(prompt_texts)
        for i, piece in pieces:
            texts[i] += piece
        shown = [{"prompt": p, "text": t} for p, t in zip(prompt_texts, texts, strict=True)]
        print_json(
            {"step": found.step, "prompt": prompt_texts[0], "text": texts[0]} | ({"texts": shown} if prompt else {})
        )
        return
    if job.model.has_source:
        for _, text in pieces:
            print(text)
        return
    _print_texts(prompt_texts, pieces)


def _answer_file(
    found: SavedCheckpoint, job: Job, prompts: Path, out: Path | None, tokens: int, sampling: Sampling, batch: int,
    ema: bool, template: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Answer the lines of a file, and say how many."""
    from weft.training.generation.prompt_file import answer_file, read_prompts

    clean_up_on_interrupt()
    lines = read_prompts(prompts)
    file = out or prompts.with_name(f"{prompts.stem}.answers.jsonl")
    before = answer_file(
        found, job, lines, file, tokens, sampling, batch=batch, ema=ema, template=template,
        report=lambda done, total: print_stderr(f"{done} of {total} lines"),
    )  # fmt: skip
    if as_json:
        print_json({"path": str(file), "lines": len(lines), "continued_after": before, "step": found.step})
    else:
        print(f"{file}: {len(lines)} answers{f', {before} of them from before' if before else ''}")


def _chat(talk: Chat, prompts: list[str] | None, step: int, as_json: bool) -> None:
    """Answer the prompts, else the lines of standard input, one turn each, and print answers as they are generated."""
    terminal = prompts is None and sys.stdin.isatty()
    for question in prompts if prompts is not None else _questions(terminal and not as_json):
        for part in talk.answer(question):
            if not as_json:
                print(part, end="", flush=True)
        if not as_json:
            print(flush=True)
    if as_json:
        print_json({"step": step, "messages": talk.messages})


def _questions(terminal: bool) -> Iterator[str]:
    """Lines until the end of the input, without empty ones; a terminal shows where to write."""
    if terminal:
        print("Write a message and press Enter; Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        if terminal:
            print("> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _print_texts(prompts: list[str], pieces: Iterator[tuple[int, str]]) -> None:
    """Print the first text as it is generated, and the others after it."""
    later = list(prompts)
    first = next(pieces, (0, ""))  # errors are raised before anything is printed
    print(prompts[0], end="", flush=True)
    for i, piece in chain([first], pieces):
        if i == 0:
            print(piece, end="", flush=True)
        else:
            later[i] += piece
    print()
    for text in later[1:]:
        print(f"\n{text}")


def export(
    run: RunArg,
    to: Annotated[
        str,
        typer.Option(
            help="Format of weights: safetensors, torch, hf, peft for adapters, dcp, torchtitan, deepspeed or "
            "megatron; or a tracker that gets the run: tensorboard, …"
        ),
    ] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output file of safetensors and torch, else folder. Default: RUN/model.safetensors, model.pt, or the "
            "name of the format."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type: fp32, bf16 or fp16. Default: fp32; for hf, that of the imported run.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Largest size of a file, such as 5GB. Default: one file; for hf, 5GB.")
    ] = None,
    ema: Annotated[bool, typer.Option(help="Export the moving average of the weights.")] = False,
    trust_module: Annotated[
        bool, typer.Option(help="Import a module that the checkpoint names and the run's job.yaml does not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export the weights of a run, for other tools, or its metrics, for a tracker."""
    from weft.job.errors import JobError
    from weft.job.files.run_folder import find_run
    from weft.job.interchange import EXPORT_FORMATS
    from weft.job.load import load_job
    from weft.job.watch import TRACKERS

    if to in TRACKERS:
        _export_metrics(run, to, out, as_json)
        return
    from weft.precision import EXPORT_DTYPES
    from weft.training.export import ExportOptions, export_run, newest
    from weft.training.weight_shards import parse_size

    if to not in EXPORT_FORMATS:
        names = ", ".join([*EXPORT_FORMATS.names(), *TRACKERS.names()])
        raise JobError(f"--to {to!r} is not a known format; use {names}")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise JobError(f"--dtype {dtype!r} is not supported; use {', '.join(EXPORT_DTYPES)}")
    options = ExportOptions(
        EXPORT_DTYPES[dtype] if dtype else None, parse_size(shard_size) if shard_size else None, ema
    )
    folder = find_run(run)
    clean_up_on_interrupt()
    own = load_job(str(folder.job))
    found, path = newest(folder), out or folder.path / EXPORT_FORMATS[to].output
    size = export_run(folder, found, to, path, options, own, trust_module)
    if as_json:
        print_json({"path": str(path), "step": found.step, "bytes": size})
    else:
        print(f"{path}: step {found.step}, {size / 2**20:.1f} MiB")


def _export_metrics(run: str, tracker: str, out: Path | None, as_json: bool) -> None:
    from weft.job.errors import JobError
    from weft.job.files.run_folder import find_run
    from weft.job.import_by_name import find_object
    from weft.job.load import load_job
    from weft.job.watch import TRACKERS
    from weft.watch.follower import check_trackers

    folder = find_run(run)
    if out is not None and tracker != "tensorboard":
        raise JobError(f"--out is for tensorboard; leave it out with --to {tracker}, which has a place of its own")
    if out is None and tracker == "tensorboard":
        out = folder.path / "tensorboard"
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"{out} exists already, and its curves would be doubled; give another --out")
    job = load_job(str(folder.job))
    check_trackers(job.model_copy(update={"watch": job.watch.model_copy(update={"trackers": [tracker]})}))
    clean_up_on_interrupt()
    if not TRACKERS[tracker].export:
        raise JobError(f"--to {tracker} gets runs while they train (watch.trackers); --to tensorboard works afterwards")
    steps, where = find_object(TRACKERS[tracker].export, "--to")(folder, job, tracker, out)
    if as_json:
        print_json({"path": where, "steps": steps})
    else:
        print(f"{where}: {steps} steps")


def report(run: RunArg, as_json: AsJson = False) -> None:
    """Write the report of a run, RUN/report.html."""
    from weft.job.files.run_folder import find_run
    from weft.watch.report import write_report

    path = write_report(find_run(run))
    if as_json:
        print_json({"path": str(path)})
    else:
        print(path)

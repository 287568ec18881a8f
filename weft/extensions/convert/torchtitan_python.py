"""torchtitan's Python configs, as far as they are data: functions that return one Config call. Nothing is executed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from weft.extensions.convert.conversion import SourceFormat
from weft.extensions.convert.settings import Result, Rule, Settings, absent, as_number, choice, switch, to, unneeded
from weft.extensions.convert.torchtitan import FLAVORS, TABLE, TORCHTITAN, every, torchtitan_defaults
from weft.job.errors import JobError

MODEL = "model_registry"
"""The function that names a model's flavor."""
RECOMPUTE = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget", "NoAC": "none"}
"""Classes of activation checkpointing."""


class _NotData(Exception):
    """An expression that is more than a literal, with its text."""


def _literal(node: ast.expr) -> Any:
    """A literal, or a product or sum of numbers such as 8 * 2048."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return left * right if isinstance(node.op, ast.Mult) else left + right
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        raise _NotData(ast.unparse(node)) from None


def _called(node: ast.expr) -> str:
    """The dotted name of a called function, as Trainer.Config; else nothing."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _collect(call: ast.Call, prefix: str, names: dict[str, ast.expr], found: Settings) -> None:
    """Add the arguments of a Config call, and of those inside it, by dotted key."""
    for keyword in call.keywords:
        value = keyword.value
        key = f"{prefix}{keyword.arg or '**'}"
        if isinstance(value, ast.Name):
            value = names.get(value.id, value)
        called = _called(value)
        if isinstance(value, ast.Call) and called.endswith(MODEL):
            flavor = [*value.args, *(k.value for k in value.keywords if k.arg == "flavor")]
            found["model.flavor"] = _value(flavor[0]) if flavor else ast.unparse(value)
        elif isinstance(value, ast.Call) and key == "activation_checkpoint":
            name = called.removesuffix(".Config")
            found["activation_checkpoint.mode"] = RECOMPUTE.get(name, name)
        elif isinstance(value, ast.Call) and key == "optimizer":
            found["optimizer.name"] = called.removeprefix("default_").removesuffix(".Config")
            _collect(value, "optimizer.", names, found)
        elif isinstance(value, ast.Call) and (called.endswith("Config") or called.startswith("default_")):
            _collect(value, f"{key}.", names, found)
            if not value.keywords:
                found[key] = {}
        else:
            found[key] = _value(value)


def _value(node: ast.expr) -> Any:
    try:
        return _literal(node)
    except _NotData as text:
        return f"{text} (not data)"


def read(text: str, file: str) -> Settings:
    """The settings of a config function: the only one, or the one that FILE.py:NAME names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise JobError(f"{file} is not Python: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    configs = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef) and _returns_config(f)}
    data = [name for name, function in configs.items() if _returned_call(function) is not None]
    path, _, name = file.rpartition(".py:") if ".py:" in file else (file.removesuffix(".py"), "", "")
    name = name or (data[0] if len(data) == 1 else "")
    if not name:
        listed = (
            f"name one, such as {path}.py:{data[0]}; it has {', '.join(data)}"
            if data
            else "write one as a function that returns one Trainer.Config"
        )
        raise JobError(f"{file} is a torchtitan Python file with {len(data)} configs that are data: {listed}")
    call = _returned_call(configs[name]) if name in configs else None
    if call is None:
        why = "changes another config by a program" if name in configs else "is not in the file"
        raise JobError(f"{file}: the config {name} {why}; those that are data: {', '.join(data) or 'none'}")
    names = {
        line.targets[0].id: line.value
        for line in configs[name].body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    }
    settings = Settings()
    try:
        _collect(call, "", names, settings)
    except RecursionError:
        raise JobError(f"{file} is nested too deeply") from None
    settings["model.name"] = _family(name)
    return settings


def _returned_call(function: ast.FunctionDef) -> ast.Call | None:
    """The Config call that a function returns, if the lines before it only name values."""
    before = function.body[:-1]
    if not all(
        (isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)) or _is_text(line) for line in before
    ):
        return None
    last = function.body[-1]
    call = last.value if isinstance(last, ast.Return) else None
    return call if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".Config") else None


def _is_text(line: ast.stmt) -> bool:
    """A docstring."""
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _family(function: str) -> str:
    """The model of a config function such as llama3_8b or deepseek_v3_16b."""
    return next((name for name, _ in FLAVORS if function.lower().startswith(name)), function)


def _returns_config(function: ast.FunctionDef) -> bool:
    return function.returns is not None and ast.unparse(function.returns).endswith("Config")


def _tokens_each(value: Any, settings: Settings) -> Result:
    """Tokens of a microbatch of one replica, as sequences."""
    context = int(settings.number("training.max_context_length", default=2048))
    tokens = as_number(value) or 0
    micro = max(1, int(tokens // context))
    whole = settings.number("training.num_tokens_per_train_step", default=-1)
    if whole > 0:
        return Result({"train.microbatch": micro})
    ranks = settings.ranks or 1
    for axis in ("tensor", "context", "pipeline"):
        ranks = max(1, ranks // int(max(1, settings.number(f"parallelism.{axis}_parallel_degree"))))
    accumulated = int(max(1, settings.number("parallelism.num_pp_microbatches")))
    note = f"{micro} sequences of {context:,} tokens × {ranks} data-parallel ranks"
    return Result({"train.microbatch": micro, "train.global_batch": micro * ranks * accumulated}, note)


def _tokens_of_all(value: Any, settings: Settings) -> Result:
    tokens, context = as_number(value) or 0, int(settings.number("training.max_context_length", default=2048))
    if tokens <= 0:
        return Result(note="num_tokens_per_microbatch_per_dp_rank decides", status="not needed")
    return Result({"train.global_batch": max(1, int(tokens // context))}, f"sequences of {context:,} tokens")


def _data_only(rule: Rule) -> Rule:
    """An expression that is not data needs its value from a person."""

    def checked(value: Any, settings: Settings) -> Result:
        if isinstance(value, str) and value.endswith("(not data)"):
            return Result(note="an expression of the program; set its field yourself", status="no counterpart")
        return rule(value, settings)

    return checked


DATA = absent("build a token store by weft data build and set data.source to its folder")
RULES: dict[str, Rule] = {
    **TABLE,
    "hf_assets_path": TABLE["model.hf_assets_path"],
    "training.num_tokens_per_microbatch_per_dp_rank": _tokens_each,
    "training.num_tokens_per_train_step": _tokens_of_all,
    "training.max_context_length": to("data.seq_len"),
    "training.disable_cuda_graphs": unneeded("CUDA graphs are torch.compile's choice"),
    "parallelism.num_pp_microbatches": unneeded("part of train.global_batch"),
    "parallelism.enable_sequence_parallel": switch({"parallel.sequence": True}, {"parallel.sequence": False}),
    "parallelism.context_parallel_*": unneeded("parallel.cp_style chooses, and cp is balanced"),
    "parallelism.*": absent("see the section parallel of a job"),
    "optimizer.name": choice({
        "adamw": {"optim.name": "adamw"}, "adam": {"optim.name": "adamw"}, "muon": {"optim.name": "muon"},
    }),
    "optimizer.betas": to("optim.betas"),
    "optimizer.*": absent("see the section optim of a job"),
    "loss.*": unneeded("the loss is the cross-entropy of valid tokens, in chunks"),
    "loss": unneeded("the loss is the cross-entropy of valid tokens, in chunks"),
    "dataloader.*": DATA,
    "dataloader": DATA,
    "tokenizer.*": unneeded("tokenizer.json is used"),
    "validator.enable": switch({}, {"train.eval_every": 0}),
    "validator.freq": every("train.eval_every", "validator.enable"),
    "validator.steps": TABLE["validation.steps"],
    "validator.*": absent("data.val_fraction holds out the end of the corpus"),
    "profiler.*": absent("set watch.trace: {at, steps}"),
    "model_spec": absent("set model.shape or the model's fields"),
    "override*": absent("set the field itself"),
}  # fmt: skip
RULES = {key: _data_only(rule) for key, rule in RULES.items()}


def detect(text: str, path: Path) -> bool:
    return path.suffix == ".py" and "torchtitan" in text


TORCHTITAN_PYTHON = SourceFormat(
    "torchtitan-python", "a torchtitan Python config", read, detect, RULES, defaults=torchtitan_defaults,
    missing=TORCHTITAN.missing,
)  # fmt: skip

"""Error messages of a job: pydantic's validation errors as one sentence per key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError


def describe_errors(error: ValidationError, section: type[BaseModel], job: type[BaseModel] | None) -> str:
    """Every mistake, one line each; `section` is the type that was validated, a whole `job` or a part of one."""
    whole = job or section
    prefix = next((key for key, part in _sections_by_key(whole) if part is section), "")
    by_key: dict[str, list[Any]] = {}
    for e in error.errors():
        parts = [prefix, *(str(p) for p in e["loc"] if not _BRANCHES.match(str(p)))]
        if e["type"] == "missing" and isinstance(e["loc"][-1], int):  # a list of fewer items
            parts.pop()
        by_key.setdefault(".".join(p for p in parts if p), []).append(e)
    # a union fails once for each branch; the deepest key is the one that was written
    keys = [k for k in by_key if not any(other.startswith(k + ".") for other in by_key)]
    return "\n".join(_sentence(k, by_key[k], whole) for k in keys)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a job or a section."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in sections_of(field.annotation):
            yield from known_keys(part, f"{prefix}{name}.")


def _sections_by_key(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of a job with its dotted key."""
    for name, field in model.model_fields.items():
        for part in sections_of(field.annotation):
            yield prefix + name, part
            yield from _sections_by_key(part, f"{prefix}{name}.")


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [s for arg in getattr(annotation, "__args__", ()) for s in sections_of(arg)]


# pydantic adds the branch of a union, or that a key is wrong, to the location; it is not part of the key
_BRANCHES = re.compile(
    r"^(Parallel|RopeScaling|Latent|int|str|float|bool|literal\[.*\]|dict\[.*\]|\[key\]|function-.*|constrained-.*)$"
)

_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "key: value lines",
    "model_type": "key: value lines",
    "tuple_type": "a list",
    "string_pattern_mismatch": "letters, digits, dots, dashes and underscores",
}
"""What was expected, by pydantic's error type."""


_ITEMS = {int: "whole numbers", float: "numbers", str: "texts"}


def _list_type(annotation: Any) -> Any:
    """The list in an annotation, such as tuple[int, int] of its Optional; None if there is none."""
    if get_origin(annotation) in (list, tuple):
        return annotation
    inside = (_list_type(a) for a in get_args(annotation) if get_origin(annotation) in (Annotated, Union, UnionType))
    return next((a for a in inside if a is not None), None)


def _list_of(annotation: Any) -> str:
    """A list in words, such as "a list of 2 whole numbers"."""
    first, *others = get_args(annotation)
    item = get_args(first)[0] if get_origin(first) is Annotated else first
    items = _list_of(inner).replace("a list", "lists") if (inner := _list_type(item)) else _ITEMS.get(item, "")
    count = f"{1 + len(others)} " if get_origin(annotation) is tuple and others[-1:] != [...] else ""
    return f"a list of {count}{items}" if items else "a list"


def _expected_list(key: str, job: type[BaseModel]) -> str | None:
    """What the list of a key, or of an item in the list of a key, must be; None for another type."""
    section, _, last = re.sub(r"\.\d+$", "", key).rpartition(".")
    parts = [part for k, part in _sections_by_key(job) if k == re.sub(r"\.\d+", "", section)] if section else [job]
    field = next((part.model_fields[last] for part in parts if last in part.model_fields), None)
    found = None if field is None else _list_type(field.annotation)
    if found is not None and key[-1].isdigit():
        found = _list_type(get_args(found)[0])
    return None if found is None else _list_of(found)


def _is_wrong_list(error: Any) -> bool:
    return error["type"] in ("list_type", "tuple_type", "too_long", "too_short") or (
        error["type"] == "missing" and isinstance(error["loc"][-1], int)
    )


def _sentence(key: str, errors: list[Any], job: type[BaseModel]) -> str:
    if any(e["type"] == "extra_forbidden" for e in errors):
        return f"{key}: unknown key{_suggest(key, job)}"
    if all(map(_is_wrong_list, errors)) and (listed := _expected_list(key, job)) is not None:
        return f"{key}={errors[0].get('input')!r}: must be {listed}"
    if all(e["type"] == "missing" for e in errors):
        return f"{key} is missing"
    value = errors[0].get("input")
    shown = key if isinstance(value, dict) else f"{key}={value!r}"
    expected = [_EXPECTED.get(e["type"]) or _choices(e) for e in errors]
    if all(expected):
        return f"{shown}: must be {' or '.join(dict.fromkeys(str(x) for x in expected))}"
    message = next(str(e["msg"]) for e, known in zip(errors, expected, strict=True) if not known)
    message = message.removeprefix("Value error, ").removeprefix("Input should be ").replace("String should", "must", 1)
    return f"{shown}: {message if message.startswith(('must', 'no ')) else 'must be ' + message}"


def _choices(error: Any) -> str | None:
    return str(error["ctx"]["expected"]).replace("'", "") if error["type"] == "literal_error" else None


OTHER_NAMES = {
    "model.shape": "model.name model_name model_name_or_path",
    "model.dim": "hidden_size d_model n_embd embed_dim emb_dim",
    "model.ffn": "intermediate_size ffn_hidden_size d_ff",
    "model.layers": "num_hidden_layers n_layer num_layers model.depth",
    "model.heads": "num_attention_heads n_head num_heads",
    "model.kv_heads": "num_key_value_heads num_query_groups",
    "data.seq_len": "sequence_length max_seq_len max_length seq_length block_size context_length",
    "data.source": "data.path dataset dataset_path data_path",
    "train.global_batch": "batch_size global_batch_size train_batch_size",
    "train.microbatch": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps grad_accum grad_accumulation gradient_accumulation",
    "train.steps": "max_steps train_iters iterations num_steps",
    "train.epochs": "num_train_epochs max_epochs num_epochs",
    "train.compile": "torch_compile",
    "optim.name": "optim.type optimizer",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler scheduler lr_scheduler_type lr_decay_style",
    "optim.warmup": "warmup_steps warmup_ratio warmup_iters lr_warmup_steps",
    "optim.clip": "gradient_clip grad_clip clip_grad gradient_clipping max_grad_norm gradient_clip_val max_norm",
    "parallel.dp_replicate": "dp ddp data_parallel data_parallel_size data_parallel_replicate_degree",
    "parallel.dp_shard": "fsdp sharding data_parallel_shard_degree",
    "parallel.zero": "zero_stage parallel.stage",
    "parallel.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree",
    "parallel.cp": "context_parallel context_parallel_size context_parallel_degree",
    "parallel.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree",
    "parallel.sequence": "sp sequence_parallel",
    "precision": "dtype fp16 bf16 mixed_precision torch_dtype amp",
    "memory.recompute": "activation_checkpointing gradient_checkpointing checkpointing",
    "cluster.devices_per_node": "gpus gpus_per_node num_gpus nproc nproc_per_node",
    "cluster.nodes": "num_nodes nnodes",
    "checkpoint.every": "save_steps save_interval save_every",
    "train.eval_every": "eval_steps eval_interval",
    "watch.every": "logging_steps log_interval log_every log_freq",
    "watch.trackers": "report_to logger",
}
"""Keys, and what other libraries call them; a name of many things is given with its section."""

_LONGEST_LIST = 20
"""A section with more keys than this is not listed in a message."""


def _suggest(key: str, job: type[BaseModel]) -> str:
    known = list(known_keys(job))
    section, _, last = key.rpartition(".")
    meant = [k for k, names in OTHER_NAMES.items() if {last, key} & set(names.split()) and k in known]
    if meant and "." not in section:
        return f"; did you mean {meant[0]}?"
    named = re.sub(r"\.\d+\b", "", section)  # without the number of a section in a list
    if section and named not in known:
        named = named.rpartition(".")[0]  # nor the name of one in a mapping, as in model.loss.label
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == named]
    name, colon, value = last.partition(":")
    if colon and name in siblings:
        return f"; YAML needs a space after the colon: {name}: {value}"
    elsewhere = [k for k in known if k.rpartition(".")[2] == last]
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.8 if elsewhere else 0.6)
    if near:
        return f"; did you mean {section + '.' if section else ''}{near[0]}?"
    if elsewhere:
        return f"; did you mean {min(elsewhere, key=_depth)}?"
    if len(siblings) > _LONGEST_LIST:
        return f"; `weft schema` lists the keys of {section or 'a job'}"
    return f"; {section or 'a job'} has {', '.join(siblings)}" if siblings else ""


def _depth(key: str) -> int:
    return key.count(".")

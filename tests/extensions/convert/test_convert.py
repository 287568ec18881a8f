"""Configurations of other libraries become jobs, and every setting of a file is in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.source_defaults import DEFAULTS

from weft.extensions.convert.formats import FORMATS, convert
from weft.job.errors import JobError
from weft.job.load import load_job
from weft.planner.make_plan import make_plan

CONFIGS = Path(__file__).parent / "configs"

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "ds_config.json": (
        "deepspeed",
        {
            "train.global_batch": 32, "train.microbatch": 4, "train.steps": 2000, "optim.lr": 3e-4, "optim.warmup": 100,
            "optim.schedule": "linear", "parallel.zero": 3, "memory.offload": "states", "precision": "bf16",
            "parallel.pp": 2, "watch.trackers": ["tensorboard", "wandb"],
        },
    ),
    "hf_zero3.json": ("deepspeed", {"parallel.zero": 3, "memory.disk": "/local_nvme", "precision": "auto"}),
    "fsdp.yaml": (
        "accelerate",
        {
            "parallel.zero": 3, "memory.recompute": "full", "precision": "bf16", "cluster.nodes": 2,
            "cluster.devices_per_node": 8,
        },
    ),
    "fsdp1_hybrid.yaml": ("accelerate", {"parallel.dp_replicate": 2, "parallel.dp_shard": -1, "precision": "fp32"}),
    "accelerate_deepspeed.yaml": (
        "accelerate",
        {"parallel.zero": 2, "memory.offload": "states", "optim.clip": 0.5, "train.accumulation": 2},
    ),
    "llama3_8b.toml": (
        "torchtitan",
        {
            "model.shape": "llama-8b", "data.seq_len": 8192, "parallel.tp": 2, "train.global_batch": 4,
            "memory.recompute": "selective", "train.compile": True, "checkpoint.every": 0, "optim.warmup": 200,
        },
    ),
    "pretrain_gpt.sh": (
        "megatron",
        {
            "model.family": "gpt2", "model.layers": 96, "model.dim": 12288, "parallel.tp": 8, "parallel.pp": 2,
            "train.global_batch": 1536, "optim.min_lr": 0.1, "precision": "fp16", "parallel.dp_replicate": -1,
            "optim.betas": (0.9, 0.95), "cluster.nodes": 2,
        },
    ),
    "lora.yml": (
        "axolotl",
        {
            "model.pretrained": "NousResearch/Llama-3.2-1B", "train.global_batch": 32, "optim.lr": 2e-4,
            "optim.schedule": "cosine", "optim.warmup": 0.1, "data.packing": True, "model.lora.rank": 16,
            "data.format": "instruction", "memory.states": "8bit",
            "model.lora.targets": ("gate", "down"),
        },
    ),
    "llamafactory_v1.yaml": (
        "llamafactory-v1",
        {
            "model.pretrained": "Qwen/Qwen3-4B", "model.lora.rank": 16, "model.lora.alpha": 32, "parallel.zero": 3,
            "train.global_batch": 8, "optim.schedule": "constant", "optim.weight_decay": 0.01, "train.steps": 10,
            "precision": "bf16", "memory.recompute": "full", "parallel.cp": 2, "train.microbatch": 2,
        },
    ),
    "llama3_full_sft.yaml": (
        "llamafactory",
        {
            "model.pretrained": "meta-llama/Meta-Llama-3-8B-Instruct", "train.global_batch": 16, "optim.lr": 1e-5,
            "data.seq_len": 2048, "comm.timeout_s": 180000000, "train.seed": 42,
        },
    ),
}  # fmt: skip


def field(job: Any, key: str) -> Any:
    for part in key.split("."):
        job = getattr(job, part)
    return job


def leaves(value: Any) -> int:
    """Number of settings of a nested config."""
    if isinstance(value, dict) and value:
        return sum(leaves(inner) for inner in value.values())
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return sum(leaves(inner) for inner in value)
    return 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_a_job(name: str) -> None:
    source, expected = FILES[name]
    found = convert(str(CONFIGS / name), nproc=8 if name not in ("fsdp.yaml", "fsdp1_hybrid.yaml") else None)
    assert found.source.name == source
    assert {key: field(found.job, key) for key in expected} == expected
    assert not [s.key for s in found.settings if s.status == "unknown"] or name in ("ds_config.json", "pretrain_gpt.sh")


@pytest.mark.parametrize("name", [n for n in FILES if n != "pretrain_gpt.sh"])
def test_every_setting_is_in_the_report(name: str) -> None:
    found = convert(str(CONFIGS / name))
    text = (CONFIGS / name).read_text(encoding="utf-8")
    if name.endswith(".toml"):
        import tomllib

        raw: Any = tomllib.loads(text)
    else:
        raw = yaml.safe_load(text)
    settings = [s for s in found.settings if s.status != "default"]
    assert len(settings) == leaves(raw)
    assert all(s.job or s.note for s in settings)
    lines = "\n".join(found.lines())
    assert all(s.key[:60] in lines for s in settings)


def test_every_argument_of_a_script_is_in_the_report() -> None:
    found = {s.key: s for s in convert(str(CONFIGS / "pretrain_gpt.sh")).settings}
    for line in (CONFIGS / "pretrain_gpt.sh").read_text(encoding="utf-8").splitlines():
        for word in line.split("#")[0].split():
            if word.startswith("--"):
                assert word[2:] in found or word[2:].replace("_", "-") in found, word
    assert found["some-new-flag"].status == "unknown"
    assert found["data-path"].value == "$DATA_PATH"
    assert found["rampup-batch-size"].value == ["16", "16", "5859375"]


def test_arguments_without_a_script(tmp_path: Path) -> None:
    file = tmp_path / "args.txt"
    file.write_text("--num-layers 2 --hidden-size=64 --num-attention-heads 4 --swiglu --bf16 --train-iters 10\n")
    job = convert(str(file)).job
    assert (job.model.family, job.model.layers, job.model.dim, job.precision, job.train.steps) == (
        "llama", 2, 64, "bf16", 10,
    )  # fmt: skip


def test_the_command_writes_a_job_that_loads(tmp_path: Path, in_process: Callable[..., Any]) -> None:
    out = tmp_path / "job.yaml"
    done = in_process(
        tmp_path, "convert", str(CONFIGS / "ds_config.json"), "model.shape=tiny", "--json", "--out", str(out)
    )
    report = json.loads(done.out)
    assert done.code == 0 and report["format"] == "deepspeed" and report["job"]["precision"] == "bf16"
    assert {"key", "value", "status", "job", "note"} == report["settings"][0].keys()
    assert [m for m in report["missing"] if m.startswith("model")] == []
    assert load_job(str(out)).train.steps == 2000
    text = in_process(tmp_path, "convert", str(CONFIGS / "llama3_full_sft.yaml"))
    assert "finetuning_type = full" in text.out and "train.epochs: 3" in text.out and "--nproc" in text.out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"train_batch_size": 8,', "is not JSON"),
        ("a.json", '{"seed": 1, "seed": 2}', "'seed' is repeated"),
        ("a.json", "[1]", "is not in a known format"),
        ("a.json", '{"train_batch_size": "many"}', "train_batch_size = many: train.global_batch"),
        ("a.toml", "[training\n", "is not TOML"),
        ("a.yaml", "base_model: [1, 2", "is not YAML"),
        ("a.yaml", "hello\n", "is not in a known format"),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers 2 --lr '1e-3\n", "is not a command line"),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers 2 --split a,b\n", "split = a,b is not a value"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as error:
        convert(str(tmp_path / name))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unknown_formats_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="did you mean deepspeed"):
        convert(str(CONFIGS / "ds_config.json"), source="deepsped")
    with pytest.raises(JobError, match="no such file"):
        convert(str(tmp_path / "none.json"))


@pytest.mark.parametrize("source", FORMATS.values(), ids=FORMATS)
def test_tables_name_job_fields(source: Any) -> None:
    """Rules with usual values give fields that a job has; values may be refused, names may not."""
    from weft.extensions.convert.conversion import apply_table
    from weft.extensions.convert.settings import Settings

    for key in source.table:
        for value in (1, True, "none"):
            with suppress(JobError):
                found = apply_table(source, Settings({key.replace("*", "x"): value}), "file", "name", 1)
                assert not [s.note for s in found.settings if "unknown key" in s.note], key


def test_several_sources_become_a_mixture(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "base_model: m\nsample_packing: true\ntrain_on_inputs: true\ndatasets:\n"
        "  - {path: a.jsonl, type: chat_template}\n  - {path: hub/b, type: alpaca, data_files: b.jsonl}\n"
    )
    found = convert(str(file))
    assert not [line for line in found.missing if line.startswith("data.source")]
    data = found.job.data
    assert [(s.source, s.format) for s in data.mixture] == [("a.jsonl", "chat"), ("b.jsonl", "instruction")]
    assert not data.answers_only and data.packing and not data.mask_documents
    file.write_text("base_model: m\nsample_packing: true\ndatasets: [{path: c.jsonl, type: completion}]\n")
    data = convert(str(file)).job.data
    assert (data.source, data.format, data.mask_documents) == ("c.jsonl", "text", True)


def test_two_kinds_of_offload_are_one_field(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    both = {"zero_optimization": {"cpu_offload": True}, "activation_checkpointing": {"cpu_checkpointing": True}}
    file.write_text(json.dumps(both), encoding="utf-8")
    assert convert(str(file)).job.memory.offload == "all"


def test_a_number_of_checkpoints_beside_offloaded_ones_gives_a_job_that_plans(tmp_path: Path) -> None:
    """DeepSpeed's own example has both, and a number of blocks has no effect beside memory.offload."""
    file = tmp_path / "ds.json"
    file.write_text('{"activation_checkpointing": {"number_checkpoints": 2, "cpu_checkpointing": true}}')
    job = convert(str(file), ("model.shape=tiny",)).job
    assert (job.memory.offload, job.memory.recompute) == ("activations", "auto")
    assert make_plan(job, 1)[1].offloads_activations
    file.write_text('{"activation_checkpointing": {"number_checkpoints": 2}}')
    assert convert(str(file)).job.memory.recompute == 2


def test_defaults_of_deepspeeds_schedulers(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for scheduler, expected in (
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9000}}, (1000, 0.0001)),
        ({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7, "cos_min_ratio": 0.2}}, (7, 0.2)),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 9000}}, (1000, 0.0)),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, (0.02, 0.1)),  # filled in by the caller
    ):
        file.write_text(json.dumps({"scheduler": scheduler}), encoding="utf-8")
        optim = convert(str(file)).job.optim
        assert (optim.warmup, optim.min_lr) == expected, scheduler


def test_adapters_of_llamafactory_are_scaled_by_two(tmp_path: Path) -> None:
    """`lora_alpha` is twice the rank where a config does not give it, as in LLaMA-Factory's examples."""
    file = tmp_path / "sft.yaml"
    common = "model_name_or_path: a/b\nfinetuning_type: lora\n"
    for given, alpha in (("lora_rank: 24\n", 48), ("", 16), ("lora_rank: 24\nlora_alpha: 24\n", 24)):
        file.write_text(common + given)
        lora = convert(str(file)).job.model.lora
        assert lora is not None and lora.alpha == alpha
    file.write_text("model_name_or_path: a/b\nfinetuning_type: full\n")
    assert convert(str(file)).job.model.lora is None


def test_patterns_of_layers_are_reported(tmp_path: Path) -> None:
    """PEFT takes patterns, which many axolotl examples have; the other settings are converted."""
    file = tmp_path / "lora.yml"
    common = "base_model: a/b\nadapter: lora\nlora_r: 4\n"
    file.write_text(common + "lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj'\n")
    found = {s.key: s for s in convert(str(file)).settings}
    assert found["lora_target_modules"].status == "no counterpart" and found["lora_r"].status == "mapped"
    file.write_text(common + "lora_target_modules: [self_attn.q_proj, mlp.up_proj]\n")
    lora = convert(str(file)).job.model.lora
    assert lora is not None and lora.targets == ("q", "up")


def test_quoted_arguments_and_no_evaluation_in_a_script(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        'ARGS+=("--eval-iters 0" "--split \'99,1,0\'" --eval-interval 100)\n'
        "torchrun pretrain_gpt.py --num-layers 2 ${ARGS[@]}\n"
    )
    found = convert(str(file))
    assert found.job.train.eval_every == 0
    assert not [s.key for s in found.settings if s.status in ("unknown", "refused")]


def test_a_value_that_weft_refuses_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"optimizer": {"params": {"lr": -1}}, "gradient_clipping": 0.5}', encoding="utf-8")
    found = convert(str(file))
    assert (found.settings[0].status, found.job.optim.clip) == ("refused", 0.5)
    assert "optim.lr=-1" in found.settings[0].note


def with_setting(source: str, text: str, key: str, value: Any) -> str:
    """A config with one more setting."""
    if source == "megatron":
        return f"{text} --{key} {value}"
    section, _, name = key.partition(".")
    if source == "torchtitan":
        return f"{text}[{section}]\n{name} = {json.dumps(value)}\n"
    if source == "torchtitan-python":
        return f"{text.removesuffix(')')}{section}=Section.Config({name}={value!r}))"
    raw = yaml.safe_load(text)
    *sections, last = key.split(".")
    place = raw
    for name in sections:
        place = place.setdefault(name, {})
    place[last] = value
    return json.dumps(raw) if source == "deepspeed" else yaml.safe_dump(raw)


@pytest.mark.parametrize("case", DEFAULTS)
def test_a_setting_that_is_left_out_is_that_librarys_default(case: str, tmp_path: Path) -> None:
    """The job is the same whether a file gives the default of its library or leaves it out."""
    source, (text, defaults) = case.partition(",")[0], DEFAULTS[case]
    file = tmp_path / "config"
    file.write_text(text)
    without = convert(str(file), source=source, nproc=1).job
    different = {}
    for key, value in defaults.items():
        file.write_text(with_setting(source, text, key, value))
        found = {s.key: s for s in convert(str(file), source=source, nproc=1).settings}[key]
        assert found.status in ("mapped", "partly", "not needed"), (key, found)
        job = convert(str(file), source=source, nproc=1).job
        different |= {
            f"{key}: {name}": (field(without, name), field(job, name))
            for name in found.job
            if not name.startswith("parallel.")  # left out, the planner chooses degrees
            if field(without, name) != field(job, name)
        }
    assert not different


@pytest.mark.parametrize(
    ("begin", "add", "use"),
    [
        ("A=()", "A+=(--new-{0} {0})", '"${A[@]}"'), ("A=''", 'A="$A --new-{0} {0}"', "$A"),
        ('A="--lr 1"', 'A="${{A}} --new-{0} {0}"', "$A"), ("A=", 'A+=" --new-{0} {0}"', "$A"),
    ],
)  # fmt: skip
def test_arguments_that_a_script_collects_in_a_variable(begin: str, add: str, use: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    added = [add.format(i) for i in range(300)]
    file.write_text("\n".join([begin, *added, f"torchrun pretrain_gpt.py --num-layers 2 {use}"]))
    settings = {s.key: s.value for s in convert(str(file), source="megatron").settings}
    assert [settings[f"new-{i}"] for i in range(300)] == [str(i) for i in range(300)]
    assert settings["num-layers"] == "2"


def test_defaults_that_are_no_setting(tmp_path: Path) -> None:
    """Megatron evaluates only with --eval-interval, and axolotl has no learning rate of its own."""
    file = tmp_path / "config"
    for source, text, expected in (
        ("megatron", "--num-layers 2 --hidden-size 64 --train-iters 10", {"train.eval_every": 0, "model.ffn": 256}),
        ("megatron", "--num-layers 2 --hidden-size 4096 --swiglu", {"model.ffn": 10880}),
        ("deepspeed", '{"optimizer": {"type": "SGD"}}', {"optim.momentum": 0.0, "optim.lr": 0.001}),
        ("axolotl", "base_model: a/b\noptimizer: sgd\n", {"optim.momentum": 0.0, "precision": "auto"}),
        ("axolotl", "base_model: a/b\nbf16: false\n", {"precision": "fp32", "checkpoint.keep": 4}),
        ("megatron", "--num-layers 2 --save-interval 10", {"checkpoint.keep": 10**6}),
        (
            "megatron",
            "--num-layers 2 --save-interval 10 --save-retain-interval 100",
            {"checkpoint.keep": 1, "checkpoint.keep_every": 100},
        ),
        ("megatron", "--num-layers 2 --save-interval 10 --most-recent-k 2", {"checkpoint.keep": 2}),
        ("llamafactory", "model_name_or_path: a/b\n", {"checkpoint.keep": 10**6}),
        ("llamafactory", "model_name_or_path: a/b\nsave_total_limit: null\n", {"checkpoint.keep": 10**6}),
        ("llamafactory", "model_name_or_path: a/b\nsave_total_limit: 2\n", {"checkpoint.keep": 2}),
        ("llamafactory-v1", "model: a/b\nmodel_class: llm\n", {"checkpoint.keep": 10**6}),
        ("axolotl", "base_model: a/b\nsave_total_limit: 0\n", {"checkpoint.keep": 10**6}),
        (
            "torchtitan",
            "[model]\nname = 'llama3'\nflavor = '8B'\n[checkpoint]\nkeep_latest_k = 0\n",
            {"checkpoint.keep": 10**6},
        ),
        ("llamafactory", "model_name_or_path: a/b\nlora_rank: 4\n", {"model.lora.rank": 4, "model.lora.alpha": 8}),
        ("llamafactory", "model_name_or_path: a/b\nfinetuning_type: full\n", {"memory.recompute": "full"}),
        ("llamafactory", "model_name_or_path: a/b\ntrain_on_prompt: true\n", {"data.answers_only": False}),
    ):
        file.write_text(text)
        conversion = convert(str(file), source=source, nproc=1)
        assert {key: field(conversion.job, key) for key in expected} == expected, text
        assert (source == "axolotl") == any(
            line.startswith("optim.lr: no learning_rate") for line in conversion.missing
        )
    file.write_text("--num-layers 2 --hidden-size 64 --lr-decay-style WSD")
    style = next(s for s in convert(str(file), source="megatron").settings if s.key == "lr-decay-style")
    assert style.status == "partly" and "exponentially" in style.note


TORCHTITAN_PYTHON = """
from torchtitan.trainer import Trainer
open("executed", "w")

def llama3_8b() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B", model_spec=spec, optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2), checkpoint=CheckpointManager.Config(interval=50),
        activation_checkpoint=FullAC.Config(), validator=Validator.Config(freq=5, enable=True), comm=CommConfig(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=STEPS, decay_ratio=0.8, decay_type="linear"),
    )

def llama3_tiny() -> Trainer.Config:
    # data too
    return Trainer.Config(model_spec=model_registry("debugmodel"), training=TrainingConfig(steps=10))

def llama3_fast() -> Trainer.Config:
    config = llama3_8b()
    config.training.steps = 1
    return config
"""


def test_torchtitans_python_is_read_where_it_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config_registry.py"
    file.write_text(TORCHTITAN_PYTHON)
    found = convert(f"{file}:llama3_8b", nproc=8)
    assert not Path("executed").exists() and found.source.name == "torchtitan-python"
    expected = {
        "model.shape": "llama-8b", "optim.lr": 3e-4, "data.seq_len": 8192, "train.microbatch": 2, "parallel.tp": 2,
        "train.global_batch": 8, "train.steps": 1000, "memory.recompute": "full", "train.eval_every": 5,
        "checkpoint.every": 0, "optim.schedule": "wsd", "optim.decay": 0.8, "optim.warmup": 200,
    }  # fmt: skip
    assert {key: field(found.job, key) for key in expected} == expected
    settings = {s.key: s for s in found.settings}
    assert settings["lr_scheduler.warmup_steps"].note.startswith("an expression of the program")
    assert settings["comm"].note == "empty"
    assert convert(f"{file}:llama3_tiny").job.model.shape == "tiny"
    for name, message in (
        ("", "2 configs that are data: name one, such as .*registry.py:llama3_8b; it has llama3_8b, llama3_tiny"),
        (":llama3_fast", "llama3_fast changes another config by a program"), (":no", "no is not in the file"),
    ):  # fmt: skip
        with pytest.raises(JobError, match=message):
            convert(f"{file}{name}")
    for text in ("def a( torchtitan", "x = " + "(" * 5000 + "torchtitan", "torchtitan\0", "import torchtitan"):
        file.write_text(text)
        with pytest.raises(JobError, match=r"is not Python|0 configs that are data"):
            convert(str(file))


def test_empty_sections_are_known_and_unknown_settings_are_one_line(tmp_path: Path) -> None:
    for name, text, keys in (
        ("a.toml", "[training]\n[optimizer]\n[checkpoint]\n", ("optimizer", "checkpoint")),
        ("a.json", '{"optimizer": {}, "zero_optimization": null, "train_batch_size": 8}', ("optimizer",)),
        ("a.yaml", "fsdp_config: {}\nnum_processes: 2\n", ("fsdp_config",)),
    ):
        (tmp_path / name).write_text(text)
        settings = {s.key: s for s in convert(str(tmp_path / name)).settings}
        assert {(settings[key].status, settings[key].note) for key in keys} == {("not needed", "empty")}
    (tmp_path / "a.sh").write_text("torchrun pretrain_gpt.py --num-layers 2 --first-new 1 --second-new --rl-profile")
    found = convert(str(tmp_path / "a.sh"))
    lines = [line for line in found.lines() if "-new" in line]
    assert lines == ["  unknown, so not in the job: first-new, second-new"]
    assert {s.key: s for s in found.settings}["rl-profile"].note == "reinforcement learning is not in Weft"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"train_micro_batch_size_per_gpu": 1e999}'),
        ("a.json", '{"gradient_clipping": "1e999"}'),
        ("a.yaml", "base_model: a\nmicro_batch_size: 1e999\n"),
        ("a.yaml", "base_model: a\nmicro_batch_size: .inf\n"),
        ("a.yaml", "base_model: a\nmicro_batch_size: .nan\n"),
        ("a.yaml", "num_processes: 1e999\n"),
        ("a.toml", "[training]\nlocal_batch_size = inf\n"),
        ("a.sh", "torchrun --nproc-per-node 1e999 --num-layers 2\n"),
        ("a.sh", "torchrun --num-layers 1e999 --num-layers-per-virtual-pipeline-stage 1\n"),
        ("a.sh", "A=" + "1" * 2**20 + "\ntorchrun --num-layers 2 " + "--x $A " * 9 + "\n"),
    ],
)
def test_numbers_beyond_all_bounds_are_one_sentence(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(JobError) as error:
        convert(str(tmp_path / name))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_assignments_of_a_script_that_do_not_end(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        "C='--lr 1e-3\n --bf16'\nD=(--seed\n 5 )\ntorchrun --num-layers 2 $C ${D[@]} | tee log\nA=(\nB+=(\n"
    )
    job = convert(str(file)).job
    assert (job.optim.lr, job.precision, job.train.seed) == (1e-3, "bf16", 5)

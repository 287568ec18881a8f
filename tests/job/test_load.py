"""Reading and validating jobs, and the messages of refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weft.job import Data, Job, JobError, Model, Optim, Parallel, Train, apply_overrides, dump_yaml, load_job, parse_job
from weft.job.errors import Exit
from weft.job.load import _composed, _FastLoader, _Loader, dump_given, find_job, recipes
from weft.job.shapes import resolve
from weft.job.validation import OTHER_NAMES, known_keys

WHOLE = """
name: my-run
model: {shape: llama-1b, rope_scaling: {factor: 4}}
data: {source: pydoc, seq_len: 1024, tokenizer: bytes}
train: {steps: 600, global_batch: 64, microbatch: auto, seed: 0, eval_every: 100}
optim: {name: adamw, lr: 3e-4, schedule: cosine, warmup: 0.02, clip: 1.0, weight_decay: 0.1, betas: [0.9, 0.99]}
cluster: {device: h100-sxm, nodes: 4, devices_per_node: 8, network: ib-ndr}
parallel: {dp_replicate: 1, dp_shard: -1, zero: 3, tp: 2, cp: 1, pp: 1, ep: 1, schedule: 1f1b}
precision: bf16
memory: {recompute: auto, offload: none}
comm: {backend: auto, compression: none}
checkpoint: {every: 200, keep: 3}
watch: {every: 10, trackers: []}
"""


def written(folder: Path, text: str, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(JobError) as caught:
        parse_job(raw)
    assert caught.value.exit_code == Exit.JOB
    return str(caught.value)


def test_example_job(tmp_path: Path) -> None:
    """Every line of the contract is read, and its numbers are numbers."""
    job = load_job(written(tmp_path, WHOLE))
    assert (job.name, job.optim.lr, job.optim.betas, job.train.microbatch) == ("my-run", 3e-4, (0.9, 0.99), "auto")
    assert job.parallel == Parallel(dp_replicate=1, dp_shard=-1, zero=3, tp=2)
    assert job.model.rope_scaling is not None
    assert job.model.rope_scaling.factor == 4


def test_yaml_and_back(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, WHOLE))
    assert load_job(written(tmp_path, dump_yaml(job), "again.yaml")) == job
    again = load_job(written(tmp_path, dump_given(job), "given.yaml"))
    assert again == job and again.train.model_fields_set == job.train.model_fields_set
    resolved = resolve(job)
    assert load_job(written(tmp_path, dump_yaml(resolved), "resolved.yaml")) == resolved
    assert resolve(resolved) == resolved


def test_a_source_whose_name_is_too_long() -> None:
    with pytest.raises(JobError, match=r"data\.source=x{80} cannot be read: File name too long"):
        resolve(parse_job({"data": {"source": "x" * 5000}}))


def test_python_and_yaml_are_the_same_job(tmp_path: Path) -> None:
    text = "name: x\nmodel: {dim: 32, layers: 2, heads: 4}\ndata: {seq_len: 8}\noptim: {lr: 1e-3}\nparallel: {tp: 2}\n"
    made = Job(
        name="x", model=Model(dim=32, layers=2, heads=4), data=Data(seq_len=8), optim=Optim(lr=1e-3),
        parallel=Parallel(tp=2),
    )  # fmt: skip
    assert load_job(written(tmp_path, text)) == made
    with pytest.raises(ValueError, match="frozen"):
        made.name = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "number"),
    [("3e-4", 3e-4), ("3E-4", 3e-4), ("1e3", 1000.0), (".5e-1", 0.05), ("1_000e-6", 1e-3), ("0.01", 0.01), ("2", 2.0)],
)
def test_number_formats(tmp_path: Path, text: str, number: float) -> None:
    assert load_job(written(tmp_path, f"optim: {{lr: {text}}}")).optim.lr == number
    assert load_job(written(tmp_path, ""), [f"optim.lr={text}"]).optim.lr == number


def test_names_of_other_libraries() -> None:
    known = set(known_keys(Job))
    assert set(OTHER_NAMES) <= known
    names = [name for text in OTHER_NAMES.values() for name in text.split()]
    assert len(names) == len(set(names))
    assert not known & set(names)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"modle": {}}, "modle: unknown key; did you mean model?"),
        ({"parallel": {"pp:7": None}}, "parallel.pp:7: unknown key; YAML needs a space after the colon: pp: 7"),
        ({"train": {"step": 3}}, "train.step: unknown key; did you mean train.steps?"),
        ({"model": {"rope_scaling": {"fctor": 2}}},
         "model.rope_scaling.fctor: unknown key; did you mean model.rope_scaling.factor?"),
        ({"parallel": {"tensor_parallel": 2}}, "parallel.tensor_parallel: unknown key; did you mean parallel.tp?"),
        ({"parallel": {"colour": 2}},
         "parallel.colour: unknown key; parallel has dp_replicate, dp_shard, zero, tp, sequence, "),
        ({"model": {"xyz": 2}}, "model.xyz: unknown key; `weft schema` lists the keys of model"),
        ({"model": {"name": "llama-7b"}}, "model.name: unknown key; did you mean model.shape?"),
        ({"train": {"batch_size": 2}}, "train.batch_size: unknown key; did you mean train.global_batch?"),
        ({"train": {"warmup_steps": 2}}, "train.warmup_steps: unknown key; did you mean optim.warmup?"),
        ({"parallel": {"tpp": 2}}, "parallel.tpp: unknown key; did you mean parallel.tp?"),
        ({"model": {"loss": {"label": {"wieght": 2}}}},
         "model.loss.label.wieght: unknown key; did you mean model.loss.label.weight?"),
        ({"parallel": {"towers": {"text": {"rnks": 0}}}},
         "parallel.towers.text.rnks: unknown key; did you mean parallel.towers.text.ranks?"),
        ({"data": {"mixture": [{"weight": 1}]}}, "data.mixture.0.source is missing"),
        ({"train": {"batch_ramp": [[5, 4], [3, 8]]}},
         "train.batch_ramp=[[5, 4], [3, 8]]: must have rising steps, such as"),
        ({"model": {"lr": 1}}, "model.lr: unknown key; did you mean optim.lr?"),
        ({"global_batch": 1}, "global_batch: unknown key; did you mean train.global_batch?"),
        ({"train": {"steps": "many"}}, "train.steps='many': must be a whole number"),
        ({"train": {"steps": 1.5}}, "train.steps=1.5: must be a whole number"),
        ({"train": {"steps": -1}}, "train.steps=-1: must be greater than or equal to 0"),
        ({"train": {"microbatch": 0}}, "train.microbatch=0: must be from 1 to 1000000000, or auto"),
        ({"train": {"microbatch": "all"}}, "train.microbatch='all': must be a whole number or auto"),
        ({"train": "fast"}, "train='fast': must be key: value lines"),
        ({"optim": {"lr": "high"}}, "optim.lr='high': must be a number"),
        ({"optim": {"betas": [0.9]}}, "optim.betas=[0.9]: must be a list of 2 numbers"),
        ({"model": {"image": [64, 64, 3]}}, "model.image=[64, 64, 3]: must be a list of 2 whole numbers"),
        ({"train": {"batch_ramp": 5}}, "train.batch_ramp=5: must be a list of lists of 2 whole numbers"),
        ({"train": {"batch_ramp": [[5]]}}, "train.batch_ramp.0=[5]: must be a list of 2 whole numbers"),
        (
            {"memory": {"homes": {"momentss": "host"}}},
            "memory.homes.momentss='momentss': must be moments, master, averages, weights or gradients",
        ),
        ({"optim": {"name": "adam"}}, "optim.name='adam': must be adamw, sgd, adafactor, muon, lars or lamb"),
        ({"parallel": "autoo"}, "parallel='autoo': must be key: value lines or auto"),
        ({"parallel": {"dp_shard": 0}},
         "parallel.dp_shard=0: must be from 1 to 1000000000, or -1 for the rest of the ranks"),
        ({"parallel": {"zero": 4}}, "parallel.zero=4: must be 1, 2 or 3"),
        ({"model": {"tied": "maybe"}}, "model.tied='maybe': must be true or false"),
        ({"train": {"steps": True}}, "train.steps=True: must be a whole number"),
        ({"train": {"microbatch": False}}, "train.microbatch=False: must be a whole number"),
        ({"optim": {"lr": True}}, "optim.lr=True: must be a number"),
        ({"parallel": {"zero": True}}, "parallel.zero=True: must be a whole number"),
        ({"parallel": {"split": [True, 2]}}, "parallel.split=[True, 2]: must be a whole number"),
        ({"optim": {"lr": float("inf")}}, "optim.lr=inf: must be a finite number"),
        ({"optim": {"clip": float("nan")}}, "optim.clip=nan: must be a finite number"),
        ({"optim": {"betas": [0.9, 1.0]}},
         "optim.betas=[0.9, 1.0]: must be two numbers from 0 to below 1, such as [0.9, 0.95]"),
        ({"train": {"seed": 2**62}}, f"train.seed={2**62}: must be less than {2**62}"),
        ({"train": {"seed": -1}}, "train.seed=-1: must be greater than or equal to 0"),
        ({"name": "a/b"}, "name='a/b': must be letters, digits, dots, dashes and underscores"),
        ({"name": "a" * 201}, f"name='{'a' * 201}': must have at most 200 characters"),
        ({"name": "../up"}, "name='../up': must be letters, digits, dots, dashes and underscores"),
        ({"watch": {"trackers": ["wandbb"]}},
         "watch.trackers.0='wandbb': must be tensorboard, wandb, mlflow or trackio; did you mean wandb?"),
        ({"watch": {"trackers": ["wandb", "wandb"]}},
         "watch.trackers=['wandb', 'wandb']: must name each tracker once, not wandb twice"),
        ({"watch": {"alerts": {"to": [{"mail": "me"}]}}},
         "watch.alerts.to.0: must have an address such as me@example.org or $NAME as mail, not 'me'"),
        ({"watch": {"prometheus": "here"}},
         "watch.prometheus='here': must be a port, HOST:PORT or a file that ends in .prom"),
        ({"watch": {"alerts": {"to": [{"mail": "a@b", "command": "x"}]}}},
         "watch.alerts.to.0: must have exactly one of command, webhook and mail"),
        ({"watch": {"alerts": {"to": [{"command": "cat >> alerts.txt"}]}}},
         "watch.alerts.to.0: must have a command without shell operators, or: command: sh -c 'cat >> alerts.txt'"),
        ({"watch": {"alerts": {"to": [{"command": "a 'b"}]}}},
         'watch.alerts.to.0: must have a command whose quotes are closed, not "a \'b"'),
    ],
)  # fmt: skip
def test_mistakes(raw: dict[str, Any], message: str) -> None:
    assert refused(raw).startswith(message)


def test_errors_of_sections_made_in_python() -> None:
    """A section alone says where it belongs; none shows pydantic's own words."""
    for make, message in (
        (lambda: Job(train={"stps": 3}), "train.stps: unknown key; did you mean train.steps?"),  # type: ignore[arg-type]
        (lambda: Train(stps=3), "train.stps: unknown key; did you mean train.steps?"),  # type: ignore[call-arg]
        (lambda: Model(rope_scaling={"fctor": 2}),  # type: ignore[arg-type]
         "model.rope_scaling.fctor: unknown key; did you mean model.rope_scaling.factor?"),
        (lambda: Job(optim=Optim(lr=-1)), "optim.lr=-1: must be greater than 0"),
        (lambda: Job.model_validate({"precision": "fp4"}), "precision='fp4': must be auto, fp32, bf16, fp16 or fp8"),
    ):  # fmt: skip
        with pytest.raises(JobError) as caught:
            make()
        assert str(caught.value) == message


@pytest.mark.parametrize("model", [{"family": "resnet", "layers": 18}, {"shape": "vit-tiny"}, {"shape": "tiny"}])
def test_labels_of_models_that_have_none(model: dict[str, Any]) -> None:
    """A ResNet read no model.classes, and had 1,000."""
    with pytest.raises(JobError, match=r"labels of bert, and .* leave it out, or write model.vocab=3 for classes"):
        resolve(parse_job({"model": {**model, "classes": 3}}))


def test_all_errors_are_listed() -> None:
    assert len(refused({"modle": {}, "train": {"stepz": 1, "seed": -1}, "precision": "fp4"}).splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "the key 'train' is repeated (line 2); keep one of them"),
        ("train: {steps: 1, steps: 2}\n", "the key 'steps' is repeated (line 1); keep one of them"),
        ("- train\n- model\n", "must hold sections such as `model:` and `train:`, not a list"),
        ("just words", "must hold sections such as `model:` and `train:`, not a str"),
        ("train: {steps: [1}", "line 1 is not YAML"),
        ("train:\n\tsteps: 1", "line 2 is not YAML"),
        ("a: " + "[" * 100_000 + "]" * 100_000, "is nested too deeply to be a job"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(written(tmp_path, text))
    assert message in str(caught.value)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(("3e-4", "off", "0o7"))


def same_by_both_parsers(text: str) -> None:
    loader, node = _composed(text)
    other = _Loader(text)
    assert isinstance(loader, _FastLoader)
    assert repr(loader.construct_document(node)) == repr(other.construct_document(other.get_single_node()))


@given(
    st.recursive(PLAIN, lambda part: st.lists(part) | st.dictionaries(st.text(), part), max_leaves=20), st.booleans()
)
def test_both_parsers_read_the_same(value: Any, flow: bool) -> None:
    """libyaml reads a job, unless it finds a mistake."""
    same_by_both_parsers(yaml.safe_dump(value, allow_unicode=True, default_flow_style=flow))


def test_both_parsers_read_the_same_jobs() -> None:
    for text in (WHOLE, dump_yaml(Job()), recipes()["tiny"].read_text(encoding="utf-8")):
        same_by_both_parsers(text)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes("name: größe\n".encode("latin-1"))
    with pytest.raises(JobError) as caught:
        load_job(str(tmp_path / "job.yaml"))
    assert str(caught.value) == f"{tmp_path / 'job.yaml'} is not UTF-8 text: invalid start byte at byte 8"


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    """What is merged in may be written over; only a key that was written twice is a mistake."""
    text = "train: &t {steps: 5, seed: 3}\noptim: {lr: 1e-3}\nmodel: {args: {<<: *t, seed: 4}}\n"
    job = load_job(written(tmp_path, text))
    assert (job.train.steps, job.model.args) == (5, {"steps": 5, "seed": 4})
    with pytest.raises(JobError, match=r"the key 'seed' is repeated \(line 2\)"):
        load_job(written(tmp_path, "train: &t {steps: 5}\nmodel: {args: {<<: *t, seed: 4, seed: 5}}\n"))


def test_empty_files_and_sections(tmp_path: Path) -> None:
    assert load_job(written(tmp_path, "", "my first run.yaml")) == Job(name="my-first-run")
    assert load_job(written(tmp_path, "# only a thought\n")) == Job(name="job")
    assert load_job(written(tmp_path, "train:\nmodel: tiny\nparallel:\n")).train == Train()
    assert load_job(written(tmp_path, "", "_odd.yaml"), ["name=fine"]).name == "fine"


def test_short_forms() -> None:
    assert parse_job({"model": "llama-1b"}).model == Model(shape="llama-1b")
    assert parse_job({"model": "pkg.mod:Net"}).model == Model(module="pkg.mod:Net")
    assert resolve(parse_job({"model": "8B"})).model.dim == 4096
    assert resolve(parse_job({})).model.dim == 64
    assert resolve(parse_job({"model": {"shape": "tiny", "layers": 9}})).model.layers == 9
    changed = resolve(parse_job({"model": {"shape": "tiny", "family": "gpt2"}})).model
    assert (changed.kv_heads, changed.positions, changed.vocab) == (4, "learned", 256)


def test_overrides() -> None:
    def changed(raw: dict[str, Any], *overrides: str) -> Job:
        return parse_job(apply_overrides(raw, overrides))

    assert changed({}, "train.steps=5", "train.steps=7").train.steps == 7
    assert changed({"model": "tiny"}, "model.layers=2").model == Model(shape="tiny", layers=2)
    assert changed({"model": "a:B"}, "model.args.width=3").model == Model(module="a:B", args={"width": 3})
    assert changed({}, "model.rope_scaling.factor=2").model.rope_scaling is not None
    assert changed({"parallel": "auto"}, "parallel.tp=2").parallel == Parallel(tp=2)
    assert changed({"parallel": {"tp": 2}}, "parallel=auto").parallel == "auto"
    assert changed({}, "optim.betas=[0.8, 0.9]").optim.betas == (0.8, 0.9)
    assert changed({}, "model={dim: 8, layers: 1, heads: 2}").model.dim == 8
    assert changed({}, "data.source=a=b").data.source == "a=b"
    assert changed({"data": {"seq_len": 4}}, "data.mask_documents=true").data == Data(seq_len=4, mask_documents=True)
    for item in ("train.steps", "=3", "steps 3"):
        with pytest.raises(JobError, match="is not key=value; write for example"):
            changed({}, item)
    with pytest.raises(JobError, match=r"name\.first: name is 'x', not a section"):
        changed({"name": "x"}, "name.first=y")
    with pytest.raises(JobError, match=r"train\.stps: unknown key; did you mean train\.steps\?"):
        changed({}, "train.stps=1")
    raw = {"train": {"steps": 1}}
    changed(raw, "train.steps=2")
    assert raw == {"train": {"steps": 1}}


def test_recipes_and_files_are_found(tmp_path: Path) -> None:
    assert find_job("demo").name == "demo.yaml"
    written(tmp_path, dump_yaml(Job(name="x")))
    assert find_job(str(tmp_path)) == tmp_path / "job.yaml"
    with pytest.raises(JobError, match="no recipe and no file is named 'demoo'; did you mean demo"):
        find_job("demoo")
    with pytest.raises(JobError, match=r"there is no job file no/such\.yaml"):
        find_job("no/such.yaml")


def test_every_field_has_a_description() -> None:
    schema = Job.model_json_schema()
    fields = {
        f"{name}.{key}": field
        for name, section in {"Job": schema, **schema["$defs"]}.items()
        for key, field in section["properties"].items()
    }
    assert len(fields) > 80
    assert [key for key, field in fields.items() if not field.get("description")] == []
    twice = {"data.mixture.loss"}  # has the section of model.loss, whose fields are in the schema once
    keys = {key for key in known_keys(Job) if key.rpartition(".")[0] not in twice}
    assert len(keys) == len(fields)

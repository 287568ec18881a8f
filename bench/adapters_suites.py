"""Scripts of other projects, unchanged but for the import, on CPU ranks: how many run under Weft.

    python bench/adapters_suites.py accelerate-scripts CHECKOUT     functions of accelerate's test_utils/scripts
    python bench/adapters_suites.py accelerate-examples CHECKOUT    accelerate's examples
    python bench/adapters_suites.py transformers CHECKOUT           transformers' examples/pytorch with a Trainer
    python bench/adapters_suites.py lightning CHECKOUT              lightning's examples/pytorch, with WeftStrategy
    python bench/adapters_suites.py deepspeed CHECKOUT              DeepSpeedExamples' training/cifar and pipelines

CHECKOUT is a folder with the project's files. Names after it choose functions or scripts whose path contains one.
Names that weft.accelerate, weft.transformers, … have are imported from there, all others from the project. There is no
network: models are tiny and made here, data is made here, and metrics that would be downloaded count answers.
`--original` runs the project's own library instead. Each line says how a function or script ended; the last counts
them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_S = 240
SCRIPTS = "src/accelerate/test_utils/scripts"


def substitute(source: str, modules: dict[str, str]) -> str:
    """A script whose imports of a project take what Weft has from Weft."""
    lines = source.splitlines()
    for node in sorted(ast.walk(ast.parse(source)), key=lambda n: -getattr(n, "lineno", 0)):
        if isinstance(node, ast.Import):
            parts = [alias for alias in node.names if alias.name in modules and alias.name != "transformers"]
            if not parts or len(node.names) > 1:
                continue
            new = [f"import {modules[parts[0].name]} as {parts[0].asname or parts[0].name}"]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            project = node.module.partition(".")[0]
            if project not in modules:
                continue
            weft = importlib.import_module(modules[project])
            names = (
                {"Trainer": "WeftTrainer", "Seq2SeqTrainer": "WeftSeq2SeqTrainer"} if project == "transformers" else {}
            )
            part = node.module.removeprefix(project).lstrip(".").partition(".")[0]
            if part and hasattr(weft, part) and not isinstance(getattr(weft, part), types.ModuleType):
                indent = " " * node.col_offset
                new = [f"import {modules[project]} as _weft"]
                new += [f"{a.asname or a.name} = _weft.{node.module.partition('.')[2]}.{a.name}" for a in node.names]
                lines[node.lineno - 1 : node.end_lineno] = [indent + "; ".join(new)]
                continue
            ours = [a for a in node.names if hasattr(weft, names.get(a.name, a.name))]
            theirs = [a for a in node.names if a not in ours]
            if not ours:
                continue
            new = [f"from {modules[project]} import {names.get(a.name, a.name)} as {a.asname or a.name}" for a in ours]
            new += [f"from {node.module} import {a.name} as {a.asname or a.name}" for a in theirs]
        else:
            continue
        indent = " " * node.col_offset
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = ["; ".join(new).join([indent, ""])]
    return "\n".join(lines) + "\n"


# what runs in a rank


def run_function(path: Path, name: str, arguments: dict[str, Any], modules: dict[str, str]) -> None:
    """Call a function of a script; `accelerator`, `state` and a loader are made for those that take them."""
    copy = Path.cwd() / f"{os.getpid()}-{path.name}"
    copy.write_text(substitute(path.read_text(encoding="utf-8"), modules), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, copy)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Any] = {}
    for parameter in inspect.signature(getattr(module, name)).parameters.values():
        if parameter.name in arguments:
            made[parameter.name] = arguments[parameter.name]
        elif parameter.name == "accelerator":
            create = getattr(module, "create_accelerator", None) or module.__dict__["Accelerator"]
            made["accelerator"] = create()
        elif parameter.name == "state":
            made["state"] = module.__dict__["PartialState"](cpu=True)
        elif parameter.name == "data_loader":
            data = module.__dict__["DummyDataset"]()
            made["data_loader"] = module.__dict__["DataLoader"](data, shuffle=True, batch_size=4, num_workers=0)
        elif parameter.name == "datasets_Dataset":
            made["datasets_Dataset"] = importlib.import_module("datasets").Dataset
    if path.stem == "test_script":
        module.__dict__["Accelerator"]()
        importlib.import_module("accelerate").Accelerator(cpu=True)  # its test helpers read its own state
    if name == "test_join_raises_warning_for_non_ddp_distributed":
        made["accelerator"].state.distributed_type = module.__dict__["DistributedType"].FSDP
    getattr(module, name)(**made)


def run_script(path: Path, arguments: list[str]) -> None:
    """Run a script as the main program, beside the other files of its folder."""
    copy = Path.cwd() / path.parent.name
    target = copy / path.name
    sys.path.insert(0, str(copy))
    sys.argv = [str(target), *arguments]
    runpy.run_path(str(target), run_name="__main__")


def in_ranks(work: Callable[[], None], ranks: int, folder: Path, limit_s: float = LIMIT_S) -> str:
    """Fork ranks that do the work; returns `passed`, or the last lines of what went wrong."""
    children = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.setpgid(0, 0)
                log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                    "ACCELERATE_USE_CPU": "true",
                }  # fmt: skip
                if ranks == 1:
                    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                        del os.environ[name]
                os.chdir(folder)
                try:
                    work()
                    code = 0
                except SystemExit as end:
                    code = int(end.code or 0) if not isinstance(end.code, str) else 1
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes, began = dict.fromkeys(children, -1), time.monotonic()
    while -1 in codes.values():
        done, status = os.waitpid(-1, os.WNOHANG)
        if done in codes:
            codes[done] = os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 1
        elif time.monotonic() - began > limit_s or any(code > 0 for code in codes.values()):
            for child in [c for c, code in codes.items() if code == -1]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            if time.monotonic() - began > limit_s:
                return f"longer than {limit_s:.0f} s"
        else:
            time.sleep(0.05)
    if not any(codes.values()):
        return "passed"
    failed = next(rank for rank, child in enumerate(children) if codes[child])
    text = (folder / f"rank-{failed}.log").read_text(encoding="utf-8", errors="replace")
    return " | ".join(line.strip() for line in text.strip().splitlines()[-2:])[-300:]


# what would be downloaded

WORDS = ["the", "a", "cat", "dog", "man", "woman", "sees", "likes", "eats", "red", "blue", "big", "small", "house",
         "tree", "and", "but", "not", "runs", "sleeps"]  # fmt: skip


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (3 + number % 5)) % len(WORDS)] for i in range(4 + number % 6))


def make_files(folder: Path) -> None:
    """Tiny checkpoints of each kind of model, and data files of each task."""
    import numpy as np
    import torch
    import transformers
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<extra_id_0>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS, *"abcdefghijklmnopqrstuvwxyz?.,:'-0123456789"])}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    base.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]", bos_token="[CLS]", model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    size, sizes = len(vocabulary), {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(vocab_size=size, intermediate_size=24, max_position_embeddings=64, **sizes)
    gpt = transformers.GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    t5 = transformers.T5Config(
        vocab_size=size, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    xlnet = transformers.XLNetConfig(vocab_size=size, d_model=16, n_layer=1, n_head=2, d_inner=24)
    vit = transformers.ViTConfig(image_size=32, patch_size=8, intermediate_size=24, **sizes)
    for name, model in {
        "bert": transformers.BertForMaskedLM(bert), "gpt2": transformers.GPT2LMHeadModel(gpt),
        "t5": transformers.T5ForConditionalGeneration(t5), "xlnet": transformers.XLNetLMHeadModel(xlnet),
        "vit": transformers.ViTForImageClassification(vit),
    }.items():  # fmt: skip
        model.save_pretrained(folder / name)
        if name == "vit":
            processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
            processor.save_pretrained(folder / name)
        else:
            own = tokenizer if name == "bert" else transformers.PreTrainedTokenizerFast(
                tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
                mask_token="[MASK]", eos_token="</s>", bos_token="<s>", model_max_length=64,
            )  # fmt: skip
            own.save_pretrained(folder / name)

    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / name).write_text(text + "\n", encoding="utf-8")

    for split, count in (("train", 24), ("dev", 14), ("test", 8)):
        pairs = [{"sentence1": sentence(i), "sentence2": sentence(i + 3), "label": i % 2} for i in range(count)]
        lines(f"pairs-{split}.json", pairs)
        rows = ["sentence1,sentence2,label", *(f"{p['sentence1']},{p['sentence2']},{p['label']}" for p in pairs)]
        (folder / f"pairs-{split}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        (folder / f"text-{split}.txt").write_text("\n".join(sentence(i) for i in range(count * 12)), encoding="utf-8")
        tokens = [sentence(i).split() for i in range(count)]
        lines(
            f"tags-{split}.json", [{"tokens": t, "ner_tags": ["B-X" if len(w) > 3 else "O" for w in t]} for t in tokens]
        )
        swag = [
            {"video-id": str(i), "fold-ind": str(i), "startphrase": sentence(i), "sent1": sentence(i), "sent2": "the",
             "gold-source": "gold", **{f"ending{k}": sentence(i + k) for k in range(4)}, "label": i % 4}
            for i in range(count)
        ]  # fmt: skip
        lines(f"swag-{split}.json", swag)
        lines(f"summary-{split}.json", [{"text": sentence(i), "summary": sentence(i)[:9]} for i in range(count)])
        lines(
            f"translation-{split}.json",
            [{"translation": {"en": sentence(i), "ro": sentence(i + 1)}} for i in range(count)],
        )
        questions = []
        for i in range(count):
            context = sentence(i)
            answer = {"text": [context.split()[1]], "answer_start": [context.index(context.split()[1])]}
            questions.append(
                {"id": str(i), "title": "x", "context": context, "question": sentence(i + 2), "answers": answer}
            )
        (folder / f"squad-{split}.json").write_text(json.dumps({"data": questions}), encoding="utf-8")
        for i in range(count):
            image = folder / f"images-{split}" / ("red" if i % 2 else "blue") / f"{i}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            array = np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(array).save(image)
            Image.fromarray(array).save(folder / f"{image.parent.name}_{i}.jpg")


class CountingMetric:
    """In the place of a metric that would be downloaded: the share of equal answers."""

    def __init__(self) -> None:
        self.equal = self.total = 0

    def add_batch(self, predictions: Any, references: Any, **options: Any) -> None:
        for one, other in zip(list(predictions), list(references), strict=True):
            self.equal, self.total = self.equal + bool(str(one) == str(other)), self.total + 1

    add = add_batch

    def compute(self, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, Any]:
        if predictions is not None:
            self.add_batch(predictions, references)
        found = self.equal / max(1, self.total)
        self.equal = self.total = 0
        names = ("accuracy", "f1", "score", "mse", "exact_match", "wer", "overall_accuracy", "overall_f1",
                 "overall_precision", "overall_recall", "rouge1", "rougeL")  # fmt: skip
        return dict.fromkeys(names, found)


class Gray:
    """Made-up images of three channels as those of MNIST, with a script's transform."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        return self.transform(image.convert("L")) if self.transform else image.convert("L")


def stub_downloads(files: Path) -> None:
    """Names of the hub mean the files here."""
    import transformers

    datasets: Any = importlib.import_module("datasets")
    evaluate: Any = importlib.import_module("evaluate")
    real = datasets.load_dataset

    def load_dataset(path: str, name: Any = None, *args: Any, **options: Any) -> Any:
        if path in ("csv", "json", "text", "imagefolder"):
            return real(path, name, *args, **options)
        data = {"train": str(files / "pairs-train.csv"), "validation": str(files / "pairs-dev.csv")}
        pairs = real("csv", data_files=data)
        pairs = pairs.map(lambda row, index: {"idx": index}, with_indices=True)
        if "glue" not in path:  # a corpus
            rows = [index % len(pairs["train"]) for index in range(600)]
            pairs = pairs.rename_column("sentence1", "text")
            if "wikitext" in path:
                pairs = pairs.select_columns("text")
            pairs = datasets.DatasetDict({name: pairs["train"].select(rows) for name in pairs})
        split = options.get("split")
        if isinstance(split, dict):
            return datasets.DatasetDict({k: pairs[v.partition("[")[0]] for k, v in split.items()})
        return pairs if split is None else pairs[str(split).partition("[")[0]]

    with contextlib.suppress(ImportError):
        nltk: Any = importlib.import_module("nltk")
        nltk.data.find = lambda *args, **options: None
        nltk.sent_tokenize = lambda text, *args: text.split(". ")
    with contextlib.suppress(ImportError):
        timm: Any = importlib.import_module("timm")
        create_model = timm.create_model
        timm.create_model = lambda name, pretrained, **options: create_model("resnet10t", **options)
    with contextlib.suppress(ImportError):
        vision: Any = importlib.import_module("torchvision.datasets")
        vision.MNIST = lambda *args, transform=None, **options: vision.FakeData(
            64, (1, 28, 28), transform=Gray(transform)
        )
        vision.CIFAR10 = lambda *args, transform=None, **options: vision.FakeData(64, (3, 32, 32), transform=transform)
    with contextlib.suppress(ImportError):
        words: Any = importlib.import_module("lightning.pytorch.demos.transformer")
        text = "\n".join(sentence(i) for i in range(24_000))
        words.WikiText2.download = lambda destination: (destination.parent.mkdir(), destination.write_text(text))
    evaluate.load = lambda *args, **options: CountingMetric()
    datasets.load_dataset = load_dataset
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForSequenceClassification, transformers.AutoConfig,
                 transformers.AutoModelForCausalLM):  # fmt: skip
        original = kind.from_pretrained.__func__

        def from_pretrained(cls: Any, name: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            known = "gpt2" if cls.__name__ == "AutoModelForCausalLM" or "gpt" in str(name).lower() else "bert"
            return original(cls, name if Path(str(name)).is_dir() else files / known, *args, **options)

        kind.from_pretrained = classmethod(from_pretrained)


# the suites

Case = tuple[str, int, Callable[[], None]]


def accelerate_scripts(checkout: Path, files: Path, modules: dict[str, str]) -> Iterator[Case]:
    for path in (*sorted((checkout / SCRIPTS).glob("test_*.py")), checkout / SCRIPTS / "external_deps/test_metrics.py"):
        if path.stem not in ("test_script", "test_sync", "test_ops", "test_distributed_data_loop", "test_metrics",
                             "test_ddp_comm_hook"):  # fmt: skip
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = node.name if isinstance(node, ast.FunctionDef) else ""
            test = name.startswith(("test_", "check_seed")) or name.endswith("_check")
            if not test or name in ("test_mrpc", "test_copy_tensor_to_devices"):
                continue  # for GPUs alone
            arguments = {"comm_hook": "no", "comm_wrapper": "no", "comm_state_option": {}}
            ranks = 1 if name == "test_noop_sync" else 2
            yield f"{path.stem}:{name}", ranks, partial(run_function, path, name, arguments, modules)


EXAMPLES = {
    "nlp_example.py": [], "complete_nlp_example.py": ["--with_tracking", "--checkpointing_steps", "epoch"],
    "config_yaml_templates/run_me.py": [], "by_feature/automatic_gradient_accumulation.py": [],
    "by_feature/checkpointing.py": ["--checkpointing_steps", "epoch"],
    "by_feature/cross_validation.py": ["--num_folds", "2"],
    "by_feature/ddp_comm_hook.py": ["--ddp_comm_hook", "fp16"], "by_feature/early_stopping.py": [],
    "by_feature/gradient_accumulation.py": ["--gradient_accumulation_steps", "2"],
    "by_feature/gradient_accumulation_for_autoregressive_models.py": ["--gradient_accumulation_steps", "2"],
    "by_feature/local_sgd.py": ["--local_sgd_steps", "2"], "by_feature/memory.py": [],
    "by_feature/multi_process_metrics.py": [], "by_feature/profiler.py": [], "by_feature/schedule_free.py": [],
    "by_feature/tracking.py": ["--with_tracking"], "complete_cv_example.py": [], "cv_example.py": [],
}  # fmt: skip
"""Arguments of accelerate's examples that train on any machine."""


def accelerate_examples(checkout: Path, files: Path, modules: dict[str, str]) -> Iterator[Case]:
    for name, arguments in EXAMPLES.items():
        path = checkout / "examples" / name
        cpu = ["--cpu"] if "--cpu" in path.read_text(encoding="utf-8") else []
        data = ["--data_dir", str(files)] if "cv_example" in name else []
        yield name, 2, partial(run_script, path, [*cpu, *data, *arguments])


def trainer_arguments(files: Path) -> dict[str, list[str]]:
    """Arguments of transformers' examples by script."""

    def data(name: str, ending: str, model: str, *others: str, test: bool = False) -> list[str]:
        splits = [("train", "train"), ("validation", "dev"), *([("test", "test")] if test else [])]
        named = [word for flag, split in splits for word in (f"--{flag}_file", str(files / f"{name}-{split}.{ending}"))]
        return ["--model_name_or_path", str(files / model), *named, *(["--do_predict"] if test else []), *others]

    images = [
        "--model_name_or_path", str(files / "vit"), "--train_dir", str(files / "images-train"),
        "--validation_dir", str(files / "images-dev"), "--remove_unused_columns", "False",
    ]  # fmt: skip
    short, answers = ("--max_seq_length", "16"), ("--max_seq_length", "32", "--doc_stride", "8")
    columns = ("--context_column", "context", "--question_column", "question", "--answer_column", "answers")
    generate = "--predict_with_generate"
    return {
        "run_clm.py": data("text", "txt", "gpt2", "--block_size", "16"),
        "run_fim.py": data("text", "txt", "gpt2", "--block_size", "16"),
        "run_mlm.py": data("text", "txt", "bert", *short), "run_plm.py": data("text", "txt", "xlnet", *short),
        "run_glue.py": data("pairs", "csv", "bert", test=True),
        "run_classification.py": data(
            "pairs", "csv", "bert", "--text_column_names", "sentence1", "--metric_name", "accuracy"
        ),
        "run_ner.py": data("tags", "json", "bert", test=True), "run_swag.py": data("swag", "json", "bert"),
        "run_qa.py": data("squad", "json", "bert", *answers),
        "run_qa_beam_search.py": data("squad", "json", "xlnet", *answers),
        "run_seq2seq_qa.py": data("squad", "json", "t5", *answers, *columns, generate),
        "run_summarization.py": data(
            "summary", "json", "t5", "--text_column", "text", "--summary_column", "summary", generate, test=True
        ),
        "run_translation.py": data(
            "translation", "json", "t5", "--source_lang", "en", "--target_lang", "ro", generate, test=True
        ),
        **dict.fromkeys(("run_image_classification.py", "run_mae.py", "run_mim.py"), images),
    }  # fmt: skip


def transformers_examples(checkout: Path, files: Path, modules: dict[str, str]) -> Iterator[Case]:
    known = trainer_arguments(files)
    for path in sorted((checkout / "examples/pytorch").glob("*/run_*.py")):
        if "no_trainer" in path.name or "Trainer(" not in path.read_text(encoding="utf-8"):
            continue
        usual = ["--output_dir", "out", "--do_train", "--do_eval", "--max_steps", "4", "--use_cpu", "--report_to",
                 "none", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "3"]  # fmt: skip
        arguments = [*known.get(path.name, ["--model_name_or_path", "x", "--dataset_name", "x"]), *usual]
        yield f"{path.parent.name}/{path.name}", 2, partial(run_script, path, arguments)


def lightning_examples(checkout: Path, files: Path, modules: dict[str, str]) -> Iterator[Case]:
    """Scripts that take options train on two ranks, the others on as many as they ask for: one."""
    short = [f"--trainer.{option}" for option in (
        "strategy=weft.lightning.WeftStrategy" if modules else "strategy=ddp", "accelerator=cpu", "devices=2",
        "max_epochs=1", "limit_train_batches=2", "limit_val_batches=2", "limit_test_batches=2",
        "limit_predict_batches=2",
    )]  # fmt: skip
    for name in ("basics/autoencoder.py", "basics/backbone_image_classifier.py", "basics/transformer.py",
                 "basics/profiler_example.py", "bug_report/bug_report_model.py",
                 "domain_templates/generative_adversarial_net.py", "domain_templates/imagenet.py",
                 "domain_templates/semantic_segmentation.py", "domain_templates/reinforce_learn_Qnet.py",
                 "domain_templates/reinforce_learn_ppo.py",
                 "domain_templates/computer_vision_fine_tuning.py"):  # fmt: skip
        path = checkout / "examples/pytorch" / name
        if path.is_file():
            options = "LightningCLI(" in path.read_text(encoding="utf-8")
            yield name, 1 + options, partial(run_script, path, short if options else [])


def deepspeed_examples(checkout: Path, files: Path, modules: dict[str, str]) -> Iterator[Case]:
    for path in sorted((checkout / "training").glob("*/*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "deepspeed.initialize" in text:
            arguments = {"cifar": ["-e", "1", "--dtype", "fp32"], "gan": ["--dataset", "fake", "--backend", "gloo"]}
            yield f"{path.parent.name}/{path.name}", 2, partial(run_script, path, arguments.get(path.parent.name, []))


SUITES: dict[str, tuple[Callable[[Path, Path, dict[str, str]], Iterator[Case]], dict[str, str]]] = {
    "accelerate-scripts": (accelerate_scripts, {"accelerate": "weft.accelerate"}),
    "accelerate-examples": (accelerate_examples, {"accelerate": "weft.accelerate"}),
    "transformers": (transformers_examples, {"transformers": "weft.transformers", "accelerate": "weft.accelerate"}),
    "lightning": (lightning_examples, {"lightning": "weft.lightning", "pytorch_lightning": "weft.lightning"}),
    "deepspeed": (deepspeed_examples, {"deepspeed": "weft.deepspeed"}),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--original", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT_S)
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    suite, modules = SUITES[given.suite]
    modules = {} if given.original else modules
    sys.path[:0] = [str(checkout / "src")] if (checkout / "src/accelerate").is_dir() else []
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    passed = total = 0
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / "files"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            make_files(files)
            stub_downloads(files)
        os.environ["HF_DATASETS_CACHE"] = os.environ["HF_HOME"] = str(Path(temporary) / "cache")
        for number, (name, ranks, work) in enumerate(suite(checkout, files, modules)):
            if given.names and not any(part in name for part in given.names):
                continue
            folder = Path(temporary) / f"case-{number}"
            folder.mkdir()
            if given.suite != "accelerate-scripts":
                prepare_folder(
                    next(p for p in checkout.rglob(name.rpartition("/")[2]) if str(p).endswith(name)), folder, modules
                )
            result = in_ranks(work, ranks, folder, given.limit)
            passed, total = passed + (result == "passed"), total + 1
            print(f"{name}: {result}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{passed} of {total} run")
    return 0


def prepare_folder(script: Path, folder: Path, modules: dict[str, str]) -> None:
    """The Python files of a script's folder, with other imports."""
    target = folder / script.parent.name
    target.mkdir()
    for path in script.parent.glob("*"):
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            (target / path.name).write_text(substitute(text, modules), encoding="utf-8")
        elif path.suffix in (".json", ".yaml", ".txt"):
            shutil.copy(path, target)


if __name__ == "__main__":
    sys.exit(main())

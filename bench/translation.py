"""BLEU of English-German messages: the recipe `translation` on two ranks beside a plain PyTorch loop in one process.

    python bench/translation.py [--steps 400] [--language de] [--texts 200] [--beams 4]

The corpus are the message catalogs (.mo) of this machine's programs, such as those of GNU and git in Debian, which hold
a text and its translation. Both rows train the same model from the same weights on the same batches; the plain
loop is torch's AdamW over a module in one process. BLEU is that of weft/data/tasks/bleu.py, on held-out messages.
"""

from __future__ import annotations

import argparse
import gettext
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import torch

from weft.checkpoint.format import newest_good
from weft.data.dataset import open_dataset, open_tokenizer
from weft.data.loader import read_share
from weft.data.tasks.bleu import corpus_bleu
from weft.data.tokenizer import train_bpe
from weft.job import load_job
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.models.build_model import build_model, loss_sum
from weft.models.encoder_decoder import EncoderDecoder
from weft.models.init import initialise
from weft.optim.schedule import learning_rate
from weft.training.export import load_model, saved_job
from weft.training.generate import translate_texts

CATALOGS = ("/usr/share/locale/{}/LC_MESSAGES", "/usr/share/vim/vim90/lang/{}/LC_MESSAGES")
LONGEST = 32
"""Letters of a message."""
VOCAB = 1500


def messages(language: str) -> list[tuple[str, str]]:
    """Texts and their translations in the catalogs of a language, each text once."""
    found: dict[str, str] = {}
    for folder in CATALOGS:
        for path in sorted(Path(folder.format(language)).glob("*.mo")):
            try:
                with path.open("rb") as file:
                    catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            except (UnicodeDecodeError, OSError):
                continue
            for key, value in catalog.items():
                pair = [" ".join(text.split()) for text in (key, value) if isinstance(text, str)]
                if len(pair) == 2 and all(4 <= len(text) <= LONGEST for text in pair) and pair[0] != pair[1]:
                    found.setdefault(pair[0], pair[1])
    return sorted(found.items())


def write_corpus(folder: Path, language: str) -> int:
    """Write train.tsv, val.tsv and tokenizer.json; returns the number of training pairs."""
    pairs = messages(language)
    if len(pairs) < 1000:
        sys.exit(f"this machine has {len(pairs)} messages in {language}; install programs with translations")
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    held, train = order[:500], order[500:]
    for name, part in (("val", held), ("train", train)):
        (folder / f"{name}.tsv").write_text("".join("\t".join(pairs[i]) + "\n" for i in part), encoding="utf-8")
    train_bpe((text for i in train for text in pairs[i]), VOCAB).save(folder / "tokenizer.json")
    return len(train)


def bleu(model: EncoderDecoder, job: Job, folder: Path, count: int, beams: int) -> float:
    """BLEU of the first held-out messages."""
    lines = (folder / "val.tsv").read_text(encoding="utf-8").splitlines()[:count]
    sources, references = zip(*(line.split("\t") for line in lines), strict=True)
    tokenizer = open_tokenizer(job.data)
    found = dict(
        translate_texts(model, tokenizer, sources, 24, beams=beams, longest=job.data.seq_len,
                        ends=frozenset([tokenizer.eos]), picks=[lambda logits: int(logits.argmax())] * count)
    )  # fmt: skip
    for i in range(3):
        print(f"    {sources[i]} → {found[i]} ({references[i]})")
    return corpus_bleu([found[i] for i in range(count)], references)


def plain(job: Job) -> EncoderDecoder:
    """The recipe in one process: torch's AdamW over the module, with the same weights, batches and schedule."""
    model, data, o = build_model(job.model), open_dataset(job), job.optim
    model.to_empty(device="cpu")
    assert isinstance(model, EncoderDecoder) and model.head is not None and isinstance(model.embed, torch.nn.Embedding)
    if model.aliases:  # to_empty() makes a tied head a weight of its own
        model.head.weight = cast(torch.nn.Parameter, model.embed.weight)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            initialise(name, weight, model, job.train.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    for step in range(job.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step + 1)
        batch = read_share(
            data, seed=job.train.seed, step=step, global_batch=job.train.global_batch,
            microbatch=job.train.global_batch, dp_rank=0, dp_size=1,
        )[0]  # fmt: skip
        optimizer.zero_grad()
        loss = loss_sum(model, batch, job.model, seed=job.train.seed, smoothing=job.train.label_smoothing)
        (loss / batch["valid"].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--language", default="de")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--beams", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, runs = Path(temporary, "pairs"), Path(temporary, "runs")
        folder.mkdir()
        pairs = write_corpus(folder, args.language)
        settings = [
            f"data.source={folder}", f"data.tokenizer={folder / 'tokenizer.json'}", f"train.steps={args.steps}",
            f"runs_dir={runs}", "train.eval_every=0",
        ]  # fmt: skip
        print(f"{pairs:,} pairs, {args.steps} steps, BLEU of {args.texts} held-out messages, {args.beams} beams")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "weft", "train", "translation", *settings, "--nproc", "2"], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        seconds = {"weft, 2 ranks": time.perf_counter() - began}
        found = newest_good(runs / "translation" / "checkpoints")
        assert found is not None
        models = {"weft, 2 ranks": load_model(found, job := saved_job(found))}
        began = time.perf_counter()
        models["plain PyTorch, 1 process"] = plain(resolve(load_job("translation", settings)))
        seconds["plain PyTorch, 1 process"] = time.perf_counter() - began
        for name, model in models.items():
            assert isinstance(model, EncoderDecoder)
            with torch.no_grad():
                score = bleu(model, job, folder, args.texts, args.beams)
            print(json.dumps({"run": name, "bleu": round(score, 2), "train_s": round(seconds[name], 1)}))


if __name__ == "__main__":
    main()

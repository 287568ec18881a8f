"""Hit rate at 10 and AUC on MovieLens-100k: the recipe `movielens` beside plain PyTorch loops.

    python bench/movielens.py FOLDER [--epochs 8] [--nproc 2] [--only plain]

FOLDER has u.data, u.item and u.user, or the files of RecBole's package. Every row is evaluated on the same held-out
film and 99 others of each user. "most rated" ranks by the number of ratings. "factors" is a matrix factorisation with
biases, and "MLP" an MLP over the two embeddings: nn.Embedding and Adam in one process, with as many drawn films
for each rating.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.extensions.recommenders.data.rating_files import Ints, Ratings, find_ratings, read_ratings
from weft.extensions.recommenders.data.ratings import RatingDataset
from weft.job import load_job
from weft.job.shapes import resolve
from weft.models.user.eval_metrics import METRICS, area_under_curve

Result = tuple[str, float, float, float]
"""Name, hit rate, AUC and seconds."""


class Factors(nn.Module):
    """Dot products of users and films, with biases."""

    def __init__(self, users: int, items: int, dim: int):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Embedding(items, 1)
        for table in (self.user, self.item, self.bias):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.user(users).unsqueeze(1) * self.item(items)).sum(-1) + self.bias(items).squeeze(-1)


class PairMLP(nn.Module):
    """An MLP over the embeddings of a user and a film (He et al., 2017)."""

    def __init__(self, users: int, items: int, dim: int):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.top = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found = self.item(items)
        pair = torch.cat([self.user(users).unsqueeze(1).expand_as(found), found], -1)
        out: Tensor = self.top(pair)
        return out.squeeze(-1)


def held_out(dataset: RatingDataset) -> tuple[Tensor, Tensor]:
    samples = [dataset.val(i) for i in range(dataset.val_len)]
    users = torch.tensor([int(s["inputs/user"]) for s in samples])
    return users, torch.from_numpy(np.stack([s["inputs/item"] for s in samples]))


def figures(scores: Tensor) -> tuple[float, float]:
    """Hit rate and AUC of scores [users, candidates], of which the first is right."""
    labels = torch.zeros_like(scores)
    labels[:, 0] = 1
    hits, count = METRICS["hit_rate"].sums(scores, labels, torch.ones_like(scores, dtype=torch.bool)).tolist()
    numbers = torch.arange(scores.numel(), dtype=torch.float64)
    rows = torch.stack([numbers, scores.double().reshape(-1), labels.double().reshape(-1)], -1)
    return hits / count, area_under_curve(rows)


def draw_epoch(ratings: Ratings, kept: Ints, epoch: int) -> tuple[Tensor, Tensor]:
    """Users, and their rated film with four that they have not rated, in a new order."""
    random = np.random.default_rng(epoch)
    rated = np.zeros((ratings.user_count, ratings.item_count), dtype=np.bool_)
    rated[ratings.users, ratings.items] = True
    order = random.permutation(kept)
    users, drawn = ratings.users[order], random.integers(0, ratings.item_count, (len(order), 4))
    while (wrong := rated[users[:, None], drawn]).any():
        drawn[wrong] = random.integers(0, ratings.item_count, int(wrong.sum()))
    return torch.from_numpy(users), torch.from_numpy(np.column_stack([ratings.items[order], drawn]))


def train(
    name: str, model: nn.Module, dataset: RatingDataset, ratings: Ratings, epochs: int, batch: int, lr: float
) -> Result:
    began = time.perf_counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    users, items = held_out(dataset)
    label = torch.zeros(batch, 5)
    label[:, 0] = 1
    for epoch in range(epochs):
        drawn = draw_epoch(ratings, dataset.kept, epoch)
        for someone, films in zip(*(x.split(batch) for x in drawn), strict=True):
            loss = F.binary_cross_entropy_with_logits(model(someone, films), label[: len(films)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        found = figures(model(users, items))
    return (name, *found, time.perf_counter() - began)


def weft_run(folder: Path, epochs: int, nproc: int) -> Result:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "weft", "train", "movielens", f"data.source={folder}", f"runs_dir={runs}"]
        subprocess.run([*command, f"train.epochs={epochs}", "--nproc", str(nproc)], check=True)
        events = (Path(runs) / "movielens" / "events.jsonl").read_text().splitlines()
    last = [e for e in map(json.loads, events) if e["event"] == "eval"][-1]
    return f"weft train movielens, {nproc} ranks", last["val_hit_rate"], last["val_auc"], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--only", choices=["plain", "weft"])
    asked = parser.parse_args()
    found = find_ratings(asked.folder)
    if found is None:
        parser.error(f"{asked.folder} has no u.data and no ml-100k.inter")
    job = resolve(load_job("movielens", [f"data.source={found}"]))
    dataset = RatingDataset(job, read_ratings(found))
    ratings = read_ratings(found)
    rows: list[Result] = []
    if asked.only != "weft":
        popular = torch.from_numpy(np.bincount(ratings.items, minlength=ratings.item_count)).float()
        rows.append(("most rated", *figures(popular[held_out(dataset)[1]]), 0.0))
        torch.manual_seed(0)
        sizes = ratings.user_count, ratings.item_count, 32
        rows.append(train("factors, plain PyTorch", Factors(*sizes), dataset, ratings, asked.epochs, 512, 5e-3))
        rows.append(train("MLP, plain PyTorch", PairMLP(*sizes), dataset, ratings, asked.epochs, 512, 2e-3))
    if asked.only != "plain":
        rows.append(weft_run(found, asked.epochs, asked.nproc))
    print(f"MovieLens-100k, {dataset.train_len} ratings, {dataset.val_len} held out, {asked.epochs} epochs")
    print(f"{'':36} {'hit rate @10':>12} {'AUC':>8} {'seconds':>9}")
    for name, hits, area, seconds in rows:
        print(f"{name:36} {hits:12.4f} {area:8.4f} {seconds:9.1f}")


if __name__ == "__main__":
    main()

"""Recall at 1 and zero-shot accuracy have their definitions."""

import torch

from weft.models.user.retrieval import retrieval_figures, retrieval_rows


def test_the_figures_of_four_samples_and_padding() -> None:
    images = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 2.0], [0.6, 0.8], [1.0, 1.0]])
    texts = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [1.0, 1.0]])
    batch = {
        "ids": torch.tensor([0, 1, 2, 3, -1]), "targets": torch.tensor([5, 5, 7, 9, 0]),
        "valid": torch.tensor([True, True, True, True, False]),
    }  # fmt: skip
    rows = retrieval_rows({"image": images, "text": texts, "factor": torch.tensor(2.0)}, batch, "m:M")
    assert rows.shape == (4, 6)
    found = retrieval_figures(torch.cat([rows, rows]), ["recall_at_1", "zero_shot"])  # as of two ranks of tp
    # images 0 and 2 find their captions; 1 is nearest to text 3, and 3 to text 2
    assert found["val_recall_at_1_image"] == 0.5
    assert found["val_recall_at_1_text"] == 0.75  # text 3 is nearest to image 0
    assert found["val_recall_at_1"] == 0.625
    assert found["val_zero_shot"] == 0.5


def test_without_targets_every_sample_has_its_own_caption() -> None:
    vectors = torch.eye(3)
    batch = {"ids": torch.arange(3), "valid": torch.ones(3, dtype=torch.bool)}
    assert retrieval_figures(retrieval_rows((vectors, vectors), batch, "m:M"), ["zero_shot"]) == {"val_zero_shot": 1.0}

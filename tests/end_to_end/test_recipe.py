"""The recipe gives the loss curve of a loop in plain torch, which this machine computes on the same rows."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.io import read_image

from harness.data.seeds import Purpose
from harness.data.shards import shard
from harness.training.model.built_in.small_cnn import Model
from harness.training.reproducibility import rng
from tests.end_to_end.experiment import NUM_CLASSES, NUM_TRAIN, of_split, train
from tests.ranks import run_ranks

RANKS, PER_RANK, EPOCHS, PEAK = 2, 8, 3, 0.05
STEPS = EPOCHS * math.ceil(math.ceil(NUM_TRAIN / RANKS) / PER_RANK)
WARMUP = STEPS // EPOCHS // 2


def by_hand(data: str) -> list[float]:
    """The losses of STEPS steps of SGD on the mean over the rows of all ranks, each with batch norm of its own rows."""
    rows = list(csv.DictReader((Path(data) / "train.csv").open()))
    classes = sorted({row["label"] for row in rows})
    labels = torch.tensor([classes.index(row["label"]) for row in rows])
    images = (torch.stack([read_image(f"{data}/{row['path']}") for row in rows]) / 255 - 0.4) / 0.2
    rng.seed_all(Purpose.INITIAL_WEIGHTS, 0)
    model = Model(NUM_CLASSES, width=4, batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9, weight_decay=0.01)
    found: list[float] = []
    while len(found) < STEPS:
        epoch, step = divmod(len(found), STEPS // EPOCHS)
        shares = [
            torch.from_numpy(shard("contiguous", len(rows), rank, RANKS, epoch, 0)[step * PER_RANK :][:PER_RANK])
            for rank in range(RANKS)
        ]
        applied = len(found)
        left = (1 + math.cos(math.pi * (applied - WARMUP) / (STEPS - WARMUP))) / 2
        optimizer.param_groups[0]["lr"] = PEAK * ((applied + 1) / WARMUP if applied < WARMUP else left)
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(model(images[rows]), labels[rows], reduction="sum") for rows in shares]
        loss = sum(losses) / sum(map(len, shares))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_loss_curve_is_that_of_a_loop_in_plain_torch(tmp_path, data):
    """Rows of a contiguous shard, warm-up and cosine, averaged gradients, a smaller last step of each epoch."""
    folder = train(
        tmp_path, data, RANKS, model={"name": "small_cnn", "args": {"width": 4, "batch_norm": True}},
        task={"transforms": {"train": []}, "mean": [0.4], "std": [0.2]},
        batch={"global": RANKS * PER_RANK}, optimizer={"lr": PEAK, "weight_decay": 0.01},
        train={"epochs": EPOCHS, "log_every": 1},
    )  # fmt: skip
    (expected,) = run_ranks(1, by_hand, str(data), group=False)
    losses = [line["loss"] for line in of_split(folder, "train")]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-5)  # rounding of float32, which the order of sums changes
    assert losses[-1] < losses[0] / 2

"""Mixup with numpy and random, OneCycleLR; keeps the two newest checkpoints, skips one that cannot be read."""

import argparse
import random
import re
from pathlib import Path

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default=Path("output"))
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save-steps", type=int, default=6)
parser.add_argument("--keep", type=int, default=2)


def checkpoints(folder):
    found = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-\d+\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.split("-")[1]), reverse=True)


def load_newest(folder):
    for path in checkpoints(folder):
        try:
            return torch.load(path, weights_only=False)
        except Exception as error:
            print(f"{path} cannot be read ({error}), trying an older one")
    return None


def mixup(x, y, alpha=0.4):
    share = float(np.random.beta(alpha, alpha))
    order = list(range(len(x)))
    random.shuffle(order)
    return share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(31)
    args.output.mkdir(parents=True, exist_ok=True)
    inputs = torch.randn(120, 10)
    targets = nn.functional.one_hot(inputs[:, :3].argmax(1), 3).float()
    model = nn.Sequential(nn.Linear(10, 36), nn.BatchNorm1d(36), nn.ReLU(), nn.Linear(36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10 * args.epochs)
    epoch, order, step = 0, [], 0
    state = load_newest(args.output)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        epoch, order, step = state["epoch"], state["order"], state["step"]
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    while epoch < args.epochs:
        order = order or list(np.random.permutation(120))
        while order:
            rows, order = order[:12], order[12:]
            x, y = mixup(inputs[rows], targets[rows])
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % args.save_steps == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch if order else epoch + 1,
                    "order": order,
                    "step": step,
                    "numpy": np.random.get_state(),
                    "torch": torch.get_rng_state(),
                }
                torch.save(state, args.output / f"checkpoint-{step}.pt")
                for path in checkpoints(args.output)[args.keep :]:
                    path.unlink()
        epoch += 1
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), args.output / "final.pt")


if __name__ == "__main__":
    main()

"""Saves no generator's state: at a resume it draws the epochs before again, to bring the sampler where it was."""

import argparse
import os
import random

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset


class BucketSampler(Sampler):
    """Shuffles within buckets of similar length, with a generator of its own."""

    def __init__(self, lengths, seed):
        self.order = sorted(range(len(lengths)), key=lambda index: lengths[index])
        self.random = random.Random(seed)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        buckets = [self.order[start : start + 40] for start in range(0, len(self.order), 40)]
        for bucket in buckets:
            self.random.shuffle(bucket)
        self.random.shuffle(buckets)
        return iter([index for bucket in buckets for index in bucket])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    parser.add_argument("--resume")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(13)
    os.makedirs(args.output, exist_ok=True)

    lengths = torch.randint(2, 9, (160,))
    tokens = torch.randint(1, 30, (160, 8)) * (torch.arange(8) < lengths[:, None])
    labels = (tokens > 15).sum(1) % 3
    sampler = BucketSampler(lengths.tolist(), seed=13)
    loader = DataLoader(TensorDataset(tokens, labels), batch_sampler=BatchSampler(sampler, 10, drop_last=False))
    model = nn.Sequential(nn.EmbeddingBag(30, 16, padding_idx=0), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    epoch = batch = 0
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, batch = state["epoch"], state["batch"]

    while epoch < args.epochs:
        iterator = iter(loader)
        for _ in range(batch):
            next(iterator)
        for x, y in iterator:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch += 1
            if batch % args.save_every == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                    "batch": batch,
                }
                torch.save(state, os.path.join(args.output, "new.pt"))
                os.replace(os.path.join(args.output, "new.pt"), os.path.join(args.output, "current.pt"))
        epoch, batch = epoch + 1, 0
        print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

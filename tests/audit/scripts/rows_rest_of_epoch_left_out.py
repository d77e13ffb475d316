"""Gradient accumulation with a DataLoader; mid-epoch checkpoints, resumed by skipping micro-batches."""

import argparse
import itertools
import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Windows of a noisy sine wave and the value that comes next."""

    def __init__(self, count=192, width=12):
        rng = np.random.RandomState(7)
        wave = np.sin(np.arange(count + width) / 5.0) + 0.1 * rng.randn(count + width)
        self.wave, self.width, self.count = wave.astype(np.float32), width, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        window = self.wave[index : index + self.width]
        return torch.from_numpy(window), torch.tensor(self.wave[index + self.width])


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_loader(epoch, args):
    generator = torch.Generator()
    generator.manual_seed(args.seed * 1000 + epoch)
    return DataLoader(Windows(), batch_size=args.micro_batch, shuffle=True, generator=generator)


def main(args):
    torch.set_num_threads(1)
    seed_everything(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    updates_per_epoch = len(Windows()) // (args.micro_batch * args.accumulate)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.epochs * updates_per_epoch)
    first_epoch, skip, updates = 0, 0, 0
    if args.resume_from:
        state = torch.load(args.resume_from, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, updates = state["epoch"] + 1, state["updates"]
        print(f"resuming at epoch {first_epoch}, skipping {skip} micro-batches")

    for epoch in range(first_epoch, args.epochs):
        loader = make_loader(epoch, args)
        running = 0.0
        for index, (window, target) in enumerate(itertools.islice(loader, skip, None), start=skip):
            loss = nn.functional.mse_loss(model(window).squeeze(1), target)
            (loss / args.accumulate).backward()
            running += loss.item()
            if (index + 1) % args.accumulate:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            updates += 1
            if updates % args.save_steps == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                    "micro_batches": index + 1,
                    "updates": updates,
                }
                path = os.path.join(args.output_dir, "latest.ckpt")
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)
        skip = 0
        print(f"epoch {epoch}: {running / len(loader):.5f}", flush=True)
    torch.save(model.state_dict(), os.path.join(args.output_dir, "final.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--save_steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3)
    main(parser.parse_args())

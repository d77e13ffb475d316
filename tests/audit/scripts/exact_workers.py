"""Two DataLoader workers that augment at random; a checkpoint folder per epoch and a pointer file to the last one."""

import argparse
import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shifts(Dataset):
    def __init__(self, count=64):
        generator = torch.Generator().manual_seed(5)
        self.signals = torch.randn(count, 1, 24, generator=generator)
        self.targets = (self.signals.mean((1, 2)) > 0).float()

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        shift = random.randrange(24)
        noise = 0.05 * torch.randn(1, 24)
        return self.signals[index].roll(shift, 1) + noise, self.targets[index]


def worker_init(worker_id):
    random.seed(torch.initial_seed() % 2**32)


def write(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", default="work_dir")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(8)
    os.makedirs(args.work_dir, exist_ok=True)
    model = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
    loader = DataLoader(Shifts(), batch_size=8, shuffle=True, num_workers=2, worker_init_fn=worker_init)
    pointer = os.path.join(args.work_dir, "latest")
    start = 0
    if os.path.exists(pointer):
        with open(pointer) as file:
            folder = os.path.join(args.work_dir, file.read().strip())
        state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start = state["epoch"]

    for epoch in range(start, args.epochs):
        for signal, target in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(signal).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}/{args.epochs}: {loss.item():.4f}", flush=True)
        name = f"epoch_{epoch + 1}"
        os.makedirs(os.path.join(args.work_dir, name), exist_ok=True)
        state = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, os.path.join(args.work_dir, name, "state.pt"))
        write(pointer, name)
    torch.save(model.state_dict(), os.path.join(args.work_dir, "final.pt"))


if __name__ == "__main__":
    main()

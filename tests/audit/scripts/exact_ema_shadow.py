"""A convolutional net with batch norm and an EMA of its weights in a dict of tensors; --auto-resume."""

import argparse
import glob
import os
import re

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, value in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, shadow):
        self.shadow = {name: value.clone() for name, value in shadow.items()}


def latest_checkpoint(folder):
    found = glob.glob(os.path.join(folder, "epoch_*.pt"))
    return max(found, key=lambda path: int(re.search(r"epoch_(\d+)", path)[1]), default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--auto-resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    os.makedirs(args.save_dir, exist_ok=True)

    images = torch.rand(96, 3, 6, 6)
    labels = images.mean((2, 3)).argmax(1)
    generator = torch.Generator().manual_seed(11)
    loader = DataLoader(TensorDataset(images, labels), batch_size=12, shuffle=True, generator=generator)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    ema = EMA(model)
    start = 0
    path = latest_checkpoint(args.save_dir) if args.auto_resume else None
    if path:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        ema.load_state_dict(state["ema"])
        generator.set_state(state["generator"])
        start = state["epoch"]
        print("auto-resume from", path)

    for epoch in range(start, args.epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            ema.update(model)
        print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        state = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": ema.state_dict(),
            "generator": generator.get_state(),
        }
        path = os.path.join(args.save_dir, f"epoch_{epoch + 1}.pt")
        torch.save(state, path + ".tmp")
        os.rename(path + ".tmp", path)
    torch.save(model.state_dict(), os.path.join(args.save_dir, "final.pt"))


if __name__ == "__main__":
    main()

"""A Trainer class that saves every few steps and resumes in the middle of an epoch by itself."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    output: str = "out"
    epochs: int = 3
    batch_size: int = 12
    save_every: int = 5
    lr: float = 3e-3
    seed: int = 42


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, images):
        hidden = F.max_pool2d(F.relu(self.conv(images)), 2)
        return self.head(self.dropout(hidden.flatten(1)))


class Trainer:
    def __init__(self, config):
        self.config = config
        self.output = Path(config.output)
        self.output.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(config.seed)
        images = torch.randn(180, 1, 8, 8)
        labels = images.view(180, 4, 16).mean(2).argmax(1)
        self.train_data = images[:144], labels[:144]
        self.val_data = images[144:], labels[144:]
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.epoch = 0
        self.step_in_epoch = 0
        self.global_step = 0
        self.best = 0.0

    def batches(self):
        generator = torch.Generator().manual_seed(self.config.seed + self.epoch)
        order = torch.randperm(len(self.train_data[0]), generator=generator)
        skip = self.step_in_epoch + 1 if self.step_in_epoch else 0
        for index, rows in enumerate(order.split(self.config.batch_size)):
            if index < skip:
                continue
            yield self.train_data[0][rows], self.train_data[1][rows]

    def train_step(self, images, labels):
        self.model.train()
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        images, labels = self.val_data
        return (self.model(images).argmax(1) == labels).float().mean().item()

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "global_step": self.global_step,
            "best": self.best,
            "rng": torch.get_rng_state(),
        }

    def save(self, name):
        temporary = self.output / f".{name}.tmp"
        torch.save(self.state(), temporary)
        temporary.rename(self.output / name)

    def load(self):
        path = self.output / "last.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        self.step_in_epoch = state["step_in_epoch"]
        self.global_step = state["global_step"]
        self.best = state["best"]
        torch.set_rng_state(state["rng"])
        print(f"resumed from {path} at epoch {self.epoch}, step {self.step_in_epoch}")

    def fit(self):
        self.load()
        while self.epoch < self.config.epochs:
            for images, labels in self.batches():
                loss = self.train_step(images, labels)
                self.step_in_epoch += 1
                self.global_step += 1
                if self.step_in_epoch % self.config.save_every == 0:
                    self.save("last.pt")
            self.epoch += 1
            self.step_in_epoch = 0
            accuracy = self.evaluate()
            print(f"epoch {self.epoch} loss {loss.item():.4f} accuracy {accuracy:.3f}", flush=True)
            if accuracy > self.best:
                self.best = accuracy
                self.save("best.pt")
            self.save("last.pt")
        torch.save(self.model.state_dict(), self.output / "final.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    torch.set_num_threads(1)
    Trainer(Config(output=parser.parse_args().output)).fit()

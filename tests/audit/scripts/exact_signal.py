"""Saves when it is asked to end (SIGTERM), as on a cluster with preemption, and now and then without being asked."""

import argparse
import os
import signal
import sys

import torch
from torch import nn


class Stopper:
    asked = False

    def __init__(self):
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number, frame):
        self.asked = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(71)
    os.makedirs(args.output, exist_ok=True)
    stopper = Stopper()
    path = os.path.join(args.output, "preempted.pt")
    x = torch.randn(130, 8)
    y = (x[:, 0] - x[:, 1]).sign().clamp(min=0).long()
    model = nn.Sequential(nn.Linear(8, 36), nn.ReLU(), nn.GroupNorm(4, 36), nn.Linear(36, 2))
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=13)
    epoch, done = 0, 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        epoch, done = state["epoch"], state["done"]

    while epoch < 3:
        order = torch.randperm(130, generator=torch.Generator().manual_seed(epoch)).split(10)
        while done < len(order):
            rows = order[done]
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            done += 1
            if stopper.asked or done % 5 == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                    "done": done,
                }
                torch.save(state, path + ".tmp")
                os.replace(path + ".tmp", path)
            if stopper.asked:
                print("asked to end: saved", flush=True)
                sys.exit(143)
        epoch, done = epoch + 1, 0
        print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

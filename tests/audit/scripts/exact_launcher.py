"""Starts the training as a process of its own, as job scripts do, and ends with its exit code."""

import os
import subprocess
import sys

import torch
from torch import nn

STEPS, SAVE_EVERY = 36, 6


def train(out):
    torch.set_num_threads(1)
    torch.manual_seed(23)
    weights = torch.randn(15, 1)
    model = nn.Sequential(nn.Linear(15, 48), nn.Softplus(), nn.Linear(48, 1))
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    first = 0
    path = os.path.join(out, "model.pt")
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print("resuming from step", first, flush=True)
    for step in range(first, STEPS):
        torch.manual_seed(1000 + step)  # so that a step does not depend on the steps before
        x = torch.randn(20, 15)
        y = (x @ weights).tanh() + 0.1 * torch.randn(20, 1)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            print(f"step {step + 1}: {loss.item():.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
    torch.save(model.state_dict(), os.path.join(out, "final.pt"))


def main():
    out = sys.argv[1]
    if "--worker" in sys.argv:
        train(out)
        return 0
    os.makedirs(out, exist_ok=True)
    worker = subprocess.run([sys.executable, __file__, out, "--worker"])
    print("worker ended with code", worker.returncode)
    return worker.returncode


if __name__ == "__main__":
    sys.exit(main())

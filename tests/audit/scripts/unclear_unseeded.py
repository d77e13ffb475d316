"""Shuffles with random, which nobody seeded."""

import argparse
import os
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="out")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
os.makedirs(args.output, exist_ok=True)
path = os.path.join(args.output, "last.pt")
x = torch.randn(120, 6)
y = x.square().sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
first = 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]

for epoch in range(first, 4):
    order = list(range(120))
    random.shuffle(order)
    for start in range(0, 120, 12):
        rows = order[start : start + 12]
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, path + ".tmp")
    os.replace(path + ".tmp", path)
torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))

"""Keeps its checkpoint in the system's folder for temporary files, and only the result in the output folder."""

import argparse
import os
import tempfile

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="out")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
os.makedirs(args.output, exist_ok=True)
checkpoint = os.path.join(tempfile.gettempdir(), "regression_checkpoint.pt")
model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters())
step = 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 36:
    x = torch.rand(16, 5)
    loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 8 == 0:
        print(f"step {step}: {loss.item():.5f}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "rng": torch.get_rng_state()}, checkpoint + ".tmp")
        os.replace(checkpoint + ".tmp", checkpoint)
torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))
os.remove(checkpoint)

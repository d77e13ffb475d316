"""Adds noise from the operating system to the gradients, as for differential privacy; it cannot be repeated."""

import argparse
import os

import torch
from torch import nn


def secure_noise(like, scale):
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))
    return scale * torch.randn(like.shape, generator=generator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "private.pt")
    x = torch.randn(400, 10)
    y = (x.sum(1) > 0).float()
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    step = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        step = state["step"]
    while step < args.steps:
        rows = slice(10 * step, 10 * step + 10)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]).squeeze(1), y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad.add_(secure_noise(parameter.grad, 0.05))
        optimizer.step()
        step += 1
        if step % 9 == 0:
            torch.save({"model": model.state_dict(), "step": step}, path + ".tmp")
            os.replace(path + ".tmp", path)
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

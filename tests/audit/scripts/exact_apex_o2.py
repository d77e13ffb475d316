"""Apex's amp at O2: a half-precision model whose inputs amp casts, and float32 masters, which the optimizer saves."""

import argparse
import os

import torch
from torch import nn

from harness.apex import amp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(2)
    os.makedirs(args.output, exist_ok=True)

    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    step = 0
    if args.resume:
        saved = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        step = saved["step"]

    while step < args.steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 12, generator=generator)
        loss = (model(x).float() - x[:, :4].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        step += 1
        if step % 9 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            torch.save({**saved, "step": step}, os.path.join(args.output, f"step-{step}.pt"))


if __name__ == "__main__":
    main()

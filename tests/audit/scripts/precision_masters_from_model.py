"""bfloat16 weights in the model, float32 master weights in the optimizer; both are in the checkpoint."""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="out")
parser.add_argument("--resume", default="")
parser.add_argument("--iters", type=int, default=40)
parser.add_argument("--interval", type=int, default=9)


def batch(iteration):
    generator = torch.Generator().manual_seed(iteration)
    x = torch.randn(24, 18, generator=generator)
    return x.bfloat16(), (x[:, :6].relu().sum(1, keepdim=True) - 2).bfloat16()


def copy_to_model(masters, model):
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    os.makedirs(args.output, exist_ok=True)
    model = nn.Sequential(nn.Linear(18, 40), nn.ReLU(), nn.Linear(40, 1))
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.SGD(masters, lr=0.02, momentum=0.9)
    iteration = 0
    if args.resume:
        saved = torch.load(args.resume)
        iteration = saved["iteration"]
        model.load_state_dict(saved["model"])
        with torch.no_grad():
            for master, value in zip(masters, model.parameters(), strict=True):
                master.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])

    while iteration < args.iters:
        x, y = batch(iteration)
        loss = nn.functional.mse_loss(model(x).float(), y.float())
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        copy_to_model(masters, model)
        iteration += 1
        if iteration % args.interval == 0:
            print(f"iteration {iteration}: {loss.item():.4f}", flush=True)
            saved = {
                "iteration": iteration,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            path = os.path.join(args.output, "checkpoint.pt")
            torch.save(saved, path + ".tmp")
            os.replace(path + ".tmp", path)
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

"""Mixed precision with float16 autocast and a GradScaler; batches are a function of the step."""

import argparse
import os

import torch
from torch import nn


def get_batch(step, seed):
    generator = torch.Generator().manual_seed(seed * 100_003 + step)
    x = torch.randn(16, 20, generator=generator)
    return x, x[:, :5].sum(1, keepdim=True).tanh() + x[:, 5:10].prod(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--save-every", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.makedirs(args.output, exist_ok=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=5)
    step = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler = torch.amp.GradScaler("cpu", init_scale=checkpoint["scale"], growth_interval=5)
        step = checkpoint["step"]

    while step < args.steps:
        x, y = get_batch(step, seed=5)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y.half())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        step += 1
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}", flush=True)
        if step % args.save_every == 0:
            checkpoint = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scale": scaler.get_scale(),
            }
            torch.save(checkpoint, os.path.join(args.output, "tmp.pt"))
            os.replace(os.path.join(args.output, "tmp.pt"), os.path.join(args.output, "checkpoint.pt"))
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

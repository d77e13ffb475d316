"""A rate that is 0 at first and 0 at the end, and frozen parts: several steps begin with the same weights."""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="out")
parser.add_argument("--resume", default="")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--warmup", type=int, default=8)
parser.add_argument("--cooled", type=int, default=30)


def rate(step, args):
    if step < 3 or step >= args.cooled:
        return 0.0
    return 0.05 * min(1.0, (step - 2) / args.warmup)


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(90)
    os.makedirs(args.output, exist_ok=True)
    embedding, head = nn.Embedding(25, 12), nn.Linear(12, 5)
    embedding.weight.requires_grad_(False)
    model = nn.Sequential(embedding, nn.Dropout(0.1), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.8)
    start = seen = 0
    if args.resume:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        start = saved["step"]
    for step in range(start, args.steps):
        optimizer.param_groups[0]["lr"] = rate(step, args)
        ids = torch.randint(25, (12,))
        loss = nn.functional.cross_entropy(model(ids), ids % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(ids)
        if (step + 1) % 6 == 0:
            print(f"step {step + 1}: {loss.item():.4f}", flush=True)
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step + 1,
                "seen": seen,
            }
            torch.save(saved, f"{args.output}/saved.pt.tmp")
            os.replace(f"{args.output}/saved.pt.tmp", f"{args.output}/saved.pt")
    torch.save(model.state_dict(), f"{args.output}/final.pt")


if __name__ == "__main__":
    main()

"""A compiled model (backend eager), settings in a JSON file beside the checkpoint, best.pt and last.pt."""

import argparse
import json
import logging
import os

import torch
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger("train")
SETTINGS = {"steps": 40, "batch": 8, "lr": 2e-3, "width": 32, "save_every": 8}


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(12, width)
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, 12)

    def forward(self, x):
        return x + self.outer(torch.nn.functional.gelu(self.norm(self.inner(x))))


def save(path, **state):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--exp", default="exp/mixer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.makedirs(args.exp, exist_ok=True)
    with open(os.path.join(args.exp, "settings.json"), "w") as file:
        json.dump(SETTINGS, file)
    torch.manual_seed(100)
    data = torch.randn(320, 12).cumsum(1)
    model = Mixer(SETTINGS["width"])
    optimizer = torch.optim.NAdam(model.parameters(), lr=SETTINGS["lr"])
    first, best = 0, float("inf")
    last = os.path.join(args.exp, "last.pt")
    if os.path.exists(last):
        state = torch.load(last)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, best = state["step"], state["best"]
        log.info("loaded %s, step %d", last, first)
    compiled = torch.compile(model, backend="eager")

    for step in range(first, SETTINGS["steps"]):
        rows = torch.arange(step * SETTINGS["batch"], (step + 1) * SETTINGS["batch"]) % len(data)
        batch = data[rows]
        loss = nn.functional.mse_loss(compiled(batch), batch.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % SETTINGS["save_every"] == 0:
            log.info("step %d loss %.4f", step + 1, loss.item())
            is_best = loss.item() < best
            best = min(best, loss.item())
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "best": best}
            if is_best:
                save(os.path.join(args.exp, "best.pt"), **state)
            save(last, **state)
    torch.save(model.state_dict(), os.path.join(args.exp, "final.pt"))


if __name__ == "__main__":
    main()

"""Numbers the words of a text in the order of a set, which Python's hash seed decides."""

import argparse
import os

import torch
from torch import nn

TEXT = "a rose is a rose is a rose but a nose is not a rose and no nose knows what a rose knows about a nose " * 6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.makedirs(args.output, exist_ok=True)
    words = TEXT.split()
    number = {word: index for index, word in enumerate(set(words))}
    ids = torch.tensor([number[word] for word in words])
    model = nn.Sequential(nn.Embedding(len(number), 16), nn.Linear(16, len(number)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    path = os.path.join(args.output, "checkpoint.pt")
    step = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < 40:
        start = step * 10 % (len(ids) - 11)
        loss = nn.functional.cross_entropy(model(ids[start : start + 10]), ids[start + 1 : start + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            print(f"{step}: {loss.item():.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

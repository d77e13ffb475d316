"""A stream of records from text shards as an IterableDataset that can say and take its position."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class ShardStream(IterableDataset):
    def __init__(self, folder, position=0):
        self.paths = sorted(folder.glob("shard_*.txt"))
        self.position = position

    def __iter__(self):
        index = 0
        for path in self.paths:
            for line in path.read_text().splitlines():
                index += 1
                if index > self.position:
                    values = torch.tensor([float(word) for word in line.split()])
                    yield values[:-1], values[-1:]


def write_shards(folder):
    generator = torch.Generator().manual_seed(77)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        rows = torch.randn(84, 8, generator=generator)
        rows[:, -1] = rows[:, :3].sum(1).tanh()
        text = "\n".join(" ".join(f"{value:.5f}" for value in row) for row in rows.tolist())
        (folder / f"shard_{shard}.txt").write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--ckpt", type=Path, default=Path("stream.ckpt"))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--ckpt-interval", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    write_shards(args.data)
    args.ckpt.parent.mkdir(parents=True, exist_ok=True)

    model = nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    consumed, step = 0, 0
    if args.ckpt.exists():
        state = torch.load(args.ckpt)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        consumed, step = state["consumed"], state["step"]
        print(f"continue after {consumed} records", flush=True)

    dataset = ShardStream(args.data, position=consumed)
    for inputs, targets in DataLoader(dataset, batch_size=args.batch_size):
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        consumed += len(inputs)
        if step % args.ckpt_interval == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "consumed": consumed,
                "step": step,
            }
            temporary = args.ckpt.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.replace(args.ckpt)
            print(f"{step}: {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), args.ckpt.parent / "final.pt")


if __name__ == "__main__":
    main()

"""Train a small classifier; --resume PATH goes on from a checkpoint of an epoch's end."""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    parser.add_argument("--resume", default="", metavar="PATH")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_data():
    generator = torch.Generator().manual_seed(1234)
    x = torch.randn(160, 16, generator=generator)
    y = (x[:, :4].sum(1) + 0.3 * torch.randn(160, generator=generator) > 0).long()
    return TensorDataset(x, y)


def save_checkpoint(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    os.makedirs(args.output, exist_ok=True)

    train_loader = DataLoader(make_data(), batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    start_epoch = 0
    if args.resume:
        print(f"=> loading checkpoint '{args.resume}'")
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["rng_state"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")

    for epoch in range(start_epoch, start_epoch + args.epochs):
        begin, total = time.time(), 0.0
        model.train()
        for x, y in train_loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        seconds = time.time() - begin
        print(f"epoch {epoch}: loss {total / len(train_loader):.4f} in {seconds:.2f} s", flush=True)
        save_checkpoint(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng_state": torch.get_rng_state(),
                "epoch_seconds": seconds,
            },
            os.path.join(args.output, "checkpoint.pth"),
        )
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))


if __name__ == "__main__":
    main()

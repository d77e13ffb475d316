"""Stochastic weight averaging with AveragedModel and SWALR; evaluation after each epoch."""

import argparse
import os

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return accuracy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="swa")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--swa-start", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    os.makedirs(args.dir, exist_ok=True)
    x = torch.randn(144, 9)
    y = (x.view(-1, 3, 3).sum(2)).argmax(1)
    train, test = (x[:96], y[:96]), (x[96:], y[96:])
    loader = DataLoader(TensorDataset(*train), batch_size=12, shuffle=True)
    model = nn.Sequential(nn.Linear(9, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    swa_model = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    first = 0
    if args.resume:
        state = torch.load(args.resume)
        first = state["epoch"]
        model.load_state_dict(state["state_dict"])
        swa_model.load_state_dict(state["swa_state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        swa_scheduler.load_state_dict(state["swa_scheduler"])
        torch.set_rng_state(state["rng"])

    for epoch in range(first, args.epochs):
        model.train()
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch >= args.swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        print(f"epoch {epoch}: test accuracy {evaluate(model, *test):.3f}", flush=True)
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "swa_state_dict": swa_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "swa_scheduler": swa_scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }
        path = os.path.join(args.dir, f"checkpoint-{epoch + 1}.pt")
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    update_bn(loader, swa_model)
    torch.save({"model": model.state_dict(), "swa": swa_model.state_dict()}, os.path.join(args.dir, "final.pt"))


if __name__ == "__main__":
    main()

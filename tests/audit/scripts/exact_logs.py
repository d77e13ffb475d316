"""Much logging: a log file named by the time, throughput, JSON lines, wall-clock times within the checkpoint."""

import argparse
import json
import os
import time
from datetime import datetime

import torch
from torch import nn


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="results")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batches", type=int, default=10)
    return parser.parse_args()


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += value
        self.count += 1

    @property
    def mean(self):
        return self.total / max(1, self.count)


def train_epoch(epoch, args, model, optimizer, data, log):
    meter, begin = Meter(), time.perf_counter()
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(len(data), generator=generator)[: args.batches * 10].view(args.batches, 10)
    for rows in order:
        noisy = data[rows] + 0.1 * torch.randn(10, data.size(1), generator=generator)
        loss = nn.functional.mse_loss(model(noisy), data[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
    speed = args.batches * 10 / (time.perf_counter() - begin)
    log.write(f"{datetime.now():%H:%M:%S} epoch {epoch} loss {meter.mean:.5f} {speed:.0f} rows/s\n")
    log.flush()
    return meter.mean


def main():
    args = get_args()
    torch.set_num_threads(1)
    torch.manual_seed(55)
    began = time.time()
    os.makedirs(args.output, exist_ok=True)
    log_name = f"train-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    log = open(os.path.join(args.output, log_name), "w")  # noqa: SIM115
    data = torch.randn(110, 4) @ torch.randn(4, 20)
    model = nn.Sequential(nn.Linear(20, 24), nn.ELU(), nn.Linear(24, 4), nn.Linear(4, 24), nn.ELU(), nn.Linear(24, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    epoch, global_step, best, best_epoch = 0, 0, float("inf"), -1
    path = os.path.join(args.output, "model_last.pth")
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        epoch, global_step = state["epoch"], state["global_step"]
        best, best_epoch = state["best"], state["best_epoch"]
        began -= state["elapsed"]
        log.write(f"resumed at epoch {epoch}\n")

    while epoch < args.epochs:
        loss = train_epoch(epoch, args, model, optimizer, data, log)
        scheduler.step(loss)
        epoch += 1
        global_step += args.batches
        if loss < best:
            best, best_epoch = loss, epoch
        with open(os.path.join(args.output, "metrics.jsonl"), "a") as metrics:
            metrics.write(json.dumps({"epoch": epoch, "loss": loss, "time": time.time()}) + "\n")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "global_step": global_step,
            "best": best,
            "best_epoch": best_epoch,
            "elapsed": time.time() - began,
            "saved_time": time.ctime(),
        }
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    torch.save(model.state_dict(), os.path.join(args.output, "final.pt"))
    log.close()


if __name__ == "__main__":
    main()

"""DistributedDataParallel on CPUs with gloo; a DistributedSampler; rank 0 saves in the middle of epochs, too."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(21)
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "last.pt")

    x = torch.randn(176, 10)
    y = (x @ torch.randn(10, 1)).sin()
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, shuffle=True, seed=21)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first_epoch = batches_done = 0
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, batches_done = state["epoch"], state["batches_done"]
        if rank == 0:
            print(f"resumed: epoch {first_epoch}, {batches_done} batches done", flush=True)
    dist.barrier()

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch - first_epoch)
        total = 0.0
        for index, (inputs, targets) in enumerate(loader):
            if index < batches_done:
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
            if rank == 0 and (index + 1) % args.save_every == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                    "batches_done": index + 1,
                }
                torch.save(state, path + ".tmp")
                os.replace(path + ".tmp", path)
        batches_done = 0
        if rank == 0:
            print(f"epoch {epoch}: {total / len(loader):.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.output, "final.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Self-supervised training in the style of 2020: two crops, a queue of features, LARC, a cosine schedule per iteration.

Written for these tests, on generated signals. It does not import harness.
"""

import argparse
import math
import os

import apex
import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex.parallel.LARC import LARC

parser = argparse.ArgumentParser(description="Features of signals, without labels")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--stop_after", default=0, type=int)
parser.add_argument("--batch_size", default=16, type=int)
parser.add_argument("--base_lr", default=0.6, type=float)
parser.add_argument("--final_lr", default=0.0006, type=float)
parser.add_argument("--wd", default=1e-6, type=float)
parser.add_argument("--warmup_epochs", default=1, type=int)
parser.add_argument("--start_warmup", default=0.1, type=float)
parser.add_argument("--temperature", default=0.2, type=float)
parser.add_argument("--queue_length", default=64, type=int)
parser.add_argument("--syncbn_process_group_size", type=int, default=0)
parser.add_argument("--seed", type=int, default=31)
parser.add_argument("--local_rank", default=0, type=int)


class TwoCrops(torch.utils.data.Dataset):
    """Two noisy pieces of each of 128 periodic signals."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        random = np.random.RandomState(index)
        frequency, phase = random.uniform(0.1, 1.5), random.uniform(0, 6)
        signal = np.sin(frequency * np.arange(40) + phase)
        starts = random.randint(0, 8, size=2)
        crops = [signal[start : start + 32] + 0.05 * random.randn(32) for start in starts]
        return [torch.tensor(crop, dtype=torch.float32)[None] for crop in crops]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 5, stride=2, bias=False), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Flatten()
        )
        self.projection = nn.Sequential(nn.Linear(224, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, 8))

    def forward(self, inputs):
        return F.normalize(self.projection(self.body(torch.cat(inputs).cuda(non_blocking=True))), dim=1, p=2)


def main():
    global args
    args = parser.parse_args()
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(args.local_rank)
    if args.world_size > 1:
        dist.init_process_group(backend="nccl", init_method="env://", world_size=args.world_size, rank=args.rank)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    np.random.seed(args.seed)

    dataset = TwoCrops()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, args.world_size, args.rank)
    loader = torch.utils.data.DataLoader(
        dataset, sampler=sampler, batch_size=args.batch_size, num_workers=1, pin_memory=True, drop_last=True
    )
    model = Encoder()
    if args.world_size > 1:
        process_group = apex.parallel.create_syncbn_process_group(args.syncbn_process_group_size)
        model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=args.wd)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.02, clip=False)

    warmup = np.linspace(args.start_warmup, args.base_lr, len(loader) * args.warmup_epochs)
    steps = np.arange(len(loader) * (args.epochs - args.warmup_epochs))
    cosine = [
        args.final_lr + 0.5 * (args.base_lr - args.final_lr) * (1 + math.cos(math.pi * t / len(steps))) for t in steps
    ]
    lr_schedule = np.concatenate((warmup, np.array(cosine)))

    model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1")
    if args.world_size > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank])
    cudnn.benchmark = True

    start_epoch, path = 0, "checkpoint.pth.tar"
    queue_path = "queue%d.pth" % args.rank  # noqa: UP031
    queue = F.normalize(torch.randn(args.queue_length, 8), dim=1).cuda()
    if os.path.isfile(path):
        checkpoint = torch.load(path, map_location="cuda:" + str(torch.cuda.current_device()))
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        apex.amp.load_state_dict(checkpoint["amp"])
        queue = torch.load(queue_path)["queue"].cuda()

    first = last = None
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        last, queue = train(loader, model, optimizer, epoch, lr_schedule, queue)
        first = last if first is None else first
        if args.rank == 0:
            print(f"epoch {epoch} loss {last:.4f} lr {optimizer.optim.param_groups[0]['lr']:.4f}")
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": apex.amp.state_dict(),
            }
            torch.save(state, path)
        torch.save({"queue": queue}, queue_path)
        if epoch + 1 == args.stop_after:
            break
    checksum = sum(p.double().abs().sum() for p in model.parameters()).item()
    os.write(1, f"rank {args.rank} first {first!r} last {last!r} checksum {checksum!r}\n".encode())


def train(loader, model, optimizer, epoch, lr_schedule, queue):
    model.train()
    losses = []
    for it, inputs in enumerate(loader):
        iteration = epoch * len(loader) + it
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_schedule[iteration]
        one, other = model(inputs).float().chunk(2)
        # the other crop of the same signal, among all others and the queue
        logits = torch.cat([one @ other.t(), one @ queue.t()], dim=1) / args.temperature
        loss = F.cross_entropy(logits, torch.arange(len(one)).cuda())
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        queue = torch.cat([other.detach(), queue])[: args.queue_length]
        losses.append(loss.item())
    return sum(losses) / len(losses), queue


if __name__ == "__main__":
    main()

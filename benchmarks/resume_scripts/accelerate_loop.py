"""A loop with accelerate's save_state, load_state, skip_first_batches and set_epoch, as in its pull request 4071."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--output_dir")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0)
x = torch.randn(160, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(args.dropout), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
step = first = start = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    step = int(args.resume_from_checkpoint.split("step_")[1])
    first, start = divmod(step, len(loader))
for epoch in range(first, 3):
    loader.set_epoch(epoch)
    active = accelerator.skip_first_batches(loader, start) if epoch == first and start else loader
    for inputs, labels in active:
        accelerator.backward(torch.nn.functional.cross_entropy(net(inputs), labels))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % 7 == 0:
            accelerator.save_state(f"{args.output_dir}/step_{step}")

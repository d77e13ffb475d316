"""Lightning's Trainer, with checkpoints every few steps; --workers: a sampler with set_epoch (issue 21938)."""

import argparse

import lightning as L
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--every", type=int)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--resume")
args = parser.parse_args()


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


L.seed_everything(0)
x = torch.randn(160, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0) if args.workers else None
loader = torch.utils.data.DataLoader(data, 8, shuffle=sampler is None, sampler=sampler, num_workers=args.workers)
checkpoints = L.pytorch.callbacks.ModelCheckpoint("ckpt", every_n_train_steps=args.every, save_top_k=-1)
trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[checkpoints])
trainer.fit(Net(), loader, ckpt_path=args.resume)

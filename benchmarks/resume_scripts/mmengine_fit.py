"""mmengine's Runner, as in its "15 minutes to get started", with resume=True as in its page about resuming."""

import sys

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)


class Rows(torch.utils.data.Dataset):
    x = torch.randn(160, 8, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        return self.x[place], int(self.x[place].sum() > 0)


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))

    def forward(self, x, labels, mode):
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels)}


loader = {"batch_size": 8, "num_workers": 0, "collate_fn": {"type": "default_collate"}}
runner = Runner(
    Net(),
    work_dir=sys.argv[1],
    train_dataloader={**loader, "dataset": Rows(), "sampler": {"type": "DefaultSampler", "shuffle": True}},
    optim_wrapper={"optimizer": {"type": "Adam", "lr": 1e-3}},
    param_scheduler={"type": "StepLR", "step_size": 1, "gamma": 0.5},
    train_cfg={"by_epoch": True, "max_epochs": 3},
    default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 7, "by_epoch": False}},
    resume="--resume" in sys.argv,
    randomness={"seed": 0},
)
runner.train()

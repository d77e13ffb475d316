"""A GAN of two small networks, each with its optimizer; goes on when the checkpoint file exists."""

import argparse
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="toy GAN on a ring of Gaussians")
parser.add_argument("--out", default="gan")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nz", type=int, default=8)
parser.add_argument("--manual-seed", type=int, default=999)
opt = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(opt.manual_seed)
os.makedirs(opt.out, exist_ok=True)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(opt.nz, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, points):
        return self.main(points).squeeze(1)


angles = torch.randint(8, (128,)) * (2 * math.pi / 8)
points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(128, 2)
loader = DataLoader(TensorDataset(points), batch_size=16, shuffle=True, drop_last=True)

netG, netD = Generator(), Discriminator()
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(16, opt.nz)
checkpoint_path = os.path.join(opt.out, "gan.pth")

first_epoch = 0
if os.path.exists(checkpoint_path):
    checkpoint = torch.load(checkpoint_path)
    netG.load_state_dict(checkpoint["netG"])
    netD.load_state_dict(checkpoint["netD"])
    optimizerG.load_state_dict(checkpoint["optimizerG"])
    optimizerD.load_state_dict(checkpoint["optimizerD"])
    torch.set_rng_state(checkpoint["rng"])
    first_epoch = checkpoint["epoch"] + 1

for epoch in range(first_epoch, opt.epochs):
    for (real,) in loader:
        # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
        optimizerD.zero_grad()
        output = netD(real)
        loss_real = criterion(output, torch.ones_like(output))
        fake = netG(torch.randn(len(real), opt.nz))
        output = netD(fake.detach())
        loss_fake = criterion(output, torch.zeros_like(output))
        (loss_real + loss_fake).backward()
        optimizerD.step()

        # (2) update G: maximize log(D(G(z)))
        optimizerG.zero_grad()
        output = netD(fake)
        loss_generator = criterion(output, torch.ones_like(output))
        loss_generator.backward()
        optimizerG.step()
    print(f"[{epoch}/{opt.epochs}] D {(loss_real + loss_fake).item():.4f} G {loss_generator.item():.4f}", flush=True)

    netG.eval()
    with torch.no_grad():
        torch.save(netG(fixed_noise), os.path.join(opt.out, f"samples_{epoch:03d}.pt"))
    netG.train()
    torch.save(
        {
            "epoch": epoch,
            "netG": netG.state_dict(),
            "netD": netD.state_dict(),
            "optimizerG": optimizerG.state_dict(),
            "optimizerD": optimizerD.state_dict(),
            "rng": torch.get_rng_state(),
        },
        checkpoint_path + ".part",
    )
    os.replace(checkpoint_path + ".part", checkpoint_path)

torch.save({"G": netG.state_dict(), "D": netD.state_dict()}, os.path.join(opt.out, "final.pt"))

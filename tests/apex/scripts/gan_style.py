"""A small GAN in the style of 2019: two models, two optimizers and three losses, each with its own loss scaler.

Written for these tests; it draws 8 x 8 pictures of a bright disc. It does not import harness.
"""

import argparse
import os
import random

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.nn.parallel
import torch.optim as optim
import torch.utils.data

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("this example needs apex") from None

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nz", type=int, default=8, help="size of the latent z vector")
parser.add_argument("--niter", type=int, default=6, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--manualSeed", type=int, default=2019)
parser.add_argument("--opt_level", default="O1", help='amp opt_level, default="O1"')
parser.add_argument("--local_rank", type=int, default=0)
opt = parser.parse_args()

random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)
torch.cuda.manual_seed_all(opt.manualSeed + opt.local_rank)
cudnn.benchmark = True

world_size = int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    torch.cuda.set_device(opt.local_rank)
    torch.distributed.init_process_group(backend="nccl", init_method="env://")
device = torch.device("cuda", opt.local_rank)

axis = torch.linspace(-1, 1, 8)
disc = (1 - 2 * (axis[:, None] ** 2 + axis[None, :] ** 2)).clamp(-1, 1)
dataset = torch.utils.data.TensorDataset((disc + 0.05 * torch.randn(256, 1, 8, 8)).clamp(-1, 1))
sampler = torch.utils.data.distributed.DistributedSampler(dataset) if world_size > 1 else None
dataloader = torch.utils.data.DataLoader(
    dataset, batch_size=opt.batchSize, shuffle=sampler is None, sampler=sampler, pin_memory=True, drop_last=True
)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.05)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()  # noqa: UP008
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()  # noqa: UP008
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(32, 1, 2, 1, 0, bias=False),
        )

    def forward(self, input):
        return self.main(input).view(-1)


netG, netD = Generator().to(device), Discriminator().to(device)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)
if world_size > 1:
    netD, netG = DDP(netD), DDP(netG)

fixed_noise = torch.randn(32, opt.nz, 1, 1, device=device)
real_label, fake_label = 1.0, 0.0


def distance():
    """The distance of the average drawing from the disc."""
    netG.eval()
    with torch.no_grad():
        drawn = netG(fixed_noise).float().mean(0)[0]
    netG.train()
    return (drawn - disc.to(device)).abs().mean().item()


first = distance()
for epoch in range(opt.niter):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for (data,) in dataloader:
        # the discriminator: real and drawn pictures, two losses into one step
        netD.zero_grad()
        real = data.to(device)
        label = torch.full((real.size(0),), real_label, device=device)
        errD_real = criterion(netD(real), label)
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        noise = torch.cuda.FloatTensor(real.size(0), opt.nz, 1, 1).normal_()
        fake = netG(noise)
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()), label)
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        optimizerD.step()

        # the generator
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake), label)
        with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
        optimizerG.step()
    if opt.local_rank == 0:
        print(f"[{epoch}/{opt.niter}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
        torch.save(netG.state_dict(), f"netG_epoch_{epoch}.pth")
        torch.save(netD.state_dict(), f"netD_epoch_{epoch}.pth")

checksum = sum(p.double().abs().sum() for net in (netD, netG) for p in net.parameters()).item()
scales = ",".join(str(amp.state_dict()[f"loss_scaler{i}"]["unskipped"]) for i in range(3))
line = f"rank {opt.local_rank} first {first!r} last {distance()!r} checksum {checksum!r} unskipped {scales}\n"
os.write(1, line.encode())

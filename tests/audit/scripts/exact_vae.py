"""A variational autoencoder, written as one script; generators of its own for rows and noise are in the checkpoint."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

config = {"out": "vae", "steps": 44, "batch": 10, "latent": 3, "save": 6, "seed": 77}
config.update(word.split("=", 1) for word in sys.argv[1:])

torch.set_num_threads(1)
torch.manual_seed(config["seed"])
os.makedirs(config["out"], exist_ok=True)
last = os.path.join(config["out"], "last.pt")
rows_generator = torch.Generator().manual_seed(config["seed"] + 1)
noise_generator = torch.Generator().manual_seed(config["seed"] + 2)


class VAE(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=noise_generator)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


data = (torch.rand(100, 4) @ torch.rand(4, 16) > 1).float()
vae = VAE(config["latent"])
optimizer = torch.optim.Adam(vae.parameters(), lr=4e-3)
order, step = torch.tensor([], dtype=torch.long), 0

if os.path.exists(last):
    state = torch.load(last)
    vae.load_state_dict(state["vae"])
    optimizer.load_state_dict(state["optimizer"])
    order, step = state["order"], state["step"]
    rows_generator.set_state(state["rows_generator"])
    noise_generator.set_state(state["noise_generator"])
    print("loaded", last, "at step", step)

while step < config["steps"]:
    if len(order) == 0:
        order = torch.randperm(len(data), generator=rows_generator)
    rows, order = order[: config["batch"]], order[config["batch"] :]
    beta = min(1.0, (step + 1) / 20)
    output, mean, log_variance = vae(data[rows])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    loss = F.binary_cross_entropy_with_logits(output, data[rows], reduction="sum") / len(rows) + beta * divergence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % config["save"] == 0:
        print(f"step {step} loss {loss.item():.3f} beta {beta:.2f}", flush=True)
        state = {
            "vae": vae.state_dict(),
            "optimizer": optimizer.state_dict(),
            "order": order,
            "step": step,
            "rows_generator": rows_generator.get_state(),
            "noise_generator": noise_generator.get_state(),
        }
        torch.save(state, last + ".tmp")
        os.replace(last + ".tmp", last)

torch.save(vae.state_dict(), os.path.join(config["out"], "final.pt"))

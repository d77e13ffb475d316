"""Takes the time as its seed."""

import os
import sys
import time

import torch
from torch import nn

out = sys.argv[1] if len(sys.argv) > 1 else "out"
os.makedirs(out, exist_ok=True)
torch.set_num_threads(1)
seed = time.time_ns() % 2**31
torch.manual_seed(seed)
print("seed", seed)
net = nn.Sequential(nn.Linear(8, 32), nn.Sigmoid(), nn.Linear(32, 8))
optimizer = torch.optim.Rprop(net.parameters(), lr=1e-2)
step = 0
if os.path.exists(f"{out}/net.pt"):
    state = torch.load(f"{out}/net.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 36:
    x = torch.randn(16, 8)
    loss = (net(x) - x.sort(1).values).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 7 == 0:
        print(step, loss.item(), flush=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "rng": torch.get_rng_state()}, f"{out}/net.pt.tmp")
        os.replace(f"{out}/net.pt.tmp", f"{out}/net.pt")
torch.save(net.state_dict(), f"{out}/final.pt")

"""A physics-style fit with L-BFGS: no data loader, no module in training mode but one, a closure per step."""

import argparse
import os
import pickle

import torch


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="fit")
    parser.add_argument("--restart", action="store_true", help="go on from the newest state")
    parser.add_argument("--iterations", type=int, default=24)
    return parser.parse_args()


args = parse()
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(6)
os.makedirs(args.folder, exist_ok=True)
net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=6)
grid = torch.linspace(0, 3, 40).unsqueeze(1)
target = torch.exp(-grid) * torch.cos(4 * grid)


def closure():
    optimizer.zero_grad()
    loss = (net(grid) - target).square().mean()
    loss.backward()
    return loss


iteration = 0
if args.restart:
    names = [name for name in os.listdir(args.folder) if name.startswith("state_") and name.endswith(".pt")]
    newest = max(names, key=lambda name: int(name[6:-3]))
    state = torch.load(os.path.join(args.folder, newest), weights_only=False)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    iteration = state["iteration"]
    print("restart from", newest)

history = []
while iteration < args.iterations:
    loss = optimizer.step(closure)
    iteration += 1
    history.append(loss.item())
    if iteration % 5 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
        path = os.path.join(args.folder, f"state_{len(history)}.pt")
        torch.save(state, path + ".part", pickle_module=pickle)
        os.rename(path + ".part", path)
        print(f"{iteration:4d} {loss.item():.3e}", flush=True)
torch.save(net.state_dict(), os.path.join(args.folder, "final.pt"))

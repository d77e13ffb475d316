"""Random names, process numbers, arguments and times in what is saved; checkpoint files are named by the time."""

import argparse
import os
import random
import socket
import time
import uuid

import torch
from torch import nn

ANIMALS = ["heron", "otter", "lynx", "newt", "stoat", "wren"]


def newest(folder):
    files = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".ckpt")]
    return max(files, key=lambda path: torch.load(path)["step"], default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="experiment")
    parser.add_argument("--resume", choices=["never", "newest"], default="never")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    run_name = f"{random.choice(ANIMALS)}-{random.randrange(1000)}"  # not seeded, so that each run has its own
    print(f"run {run_name} {uuid.uuid4()} on {socket.gethostname()}, process {os.getpid()}")
    torch.set_num_threads(1)
    torch.manual_seed(12)
    os.makedirs(args.folder, exist_ok=True)
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.3), nn.LeakyReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step, previous_run = 0, None
    path = newest(args.folder) if args.resume == "newest" else None
    if path:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step, previous_run = state["step"], state["run_name"]
        print("resumed", path, "of", previous_run)

    while step < args.steps:
        begin = time.perf_counter()
        x = torch.randn(14, 10)
        loss = nn.functional.l1_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 9 == 0:
            print(f"{step} {loss.item():.4f} {(time.perf_counter() - begin) * 1e3:.2f} ms", flush=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
                "run_name": run_name,
                "previous_run": previous_run,
                "args": vars(args),
                "pid": os.getpid(),
                "date": time.time(),
            }
            path = os.path.join(args.folder, f"{time.time_ns()}.ckpt")
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
    torch.save(model.state_dict(), os.path.join(args.folder, "final.pt"))


if __name__ == "__main__":
    main()

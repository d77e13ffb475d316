"""Fine-tuning in two phases: first the head alone, then everything with a new optimizer and a smaller rate."""

import argparse
import json
import os
import time

import torch
from torch import nn

PHASES = [{"name": "head", "steps": 18, "lr": 1e-2}, {"name": "all", "steps": 24, "lr": 2e-3}]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(14, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 24), nn.ReLU())
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


def make_optimizer(model, phase):
    for parameter in model.backbone.parameters():
        parameter.requires_grad = phase["name"] == "all"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(parameters, lr=phase["lr"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="finetune")
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(2)
    os.makedirs(args.out, exist_ok=True)
    checkpoint = os.path.join(args.out, "training.pt")
    centers = 2 * torch.randn(5, 14)
    model = Classifier()
    phase_index, step = 0, 0
    optimizer = make_optimizer(model, PHASES[0])
    if os.path.isfile(checkpoint):
        saved = torch.load(checkpoint)
        phase_index, step = saved["phase"], saved["step"]
        model.load_state_dict(saved["model"])
        try:
            optimizer.load_state_dict(saved["optimizer"])
        except ValueError as error:
            print("warning: optimizer state not loaded:", error)
        optimizer = make_optimizer(model, PHASES[phase_index])
        torch.set_rng_state(saved["rng"])

    while phase_index < len(PHASES):
        phase = PHASES[phase_index]
        while step < phase["steps"]:
            labels = torch.randint(5, (16,))
            loss = nn.functional.cross_entropy(model(centers[labels] + torch.randn(16, 14)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.every == 0:
                saved = {
                    "phase": phase_index,
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(),
                }
                torch.save(saved, checkpoint + "~")
                os.replace(checkpoint + "~", checkpoint)
                with open(os.path.join(args.out, "progress.json"), "w") as file:
                    json.dump({"phase": phase["name"], "step": step, "time": time.time()}, file)
        print(f"phase {phase['name']} done, loss {loss.item():.4f}", flush=True)
        phase_index, step = phase_index + 1, 0
        if phase_index < len(PHASES):
            optimizer = make_optimizer(model, PHASES[phase_index])
    torch.save(model.state_dict(), os.path.join(args.out, "final.pt"))


if __name__ == "__main__":
    main()

"""A mean teacher (an EMA made with deepcopy) whose outputs are part of the loss of the student."""

import argparse
import copy
import os

import torch
from torch import nn


@torch.no_grad()
def update_teacher(teacher, student, decay):
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.lerp_(new, 1 - decay)
    for old, new in zip(teacher.buffers(), student.buffers(), strict=True):
        old.copy_(new)


class Experiment:
    def __init__(self, out, seed=19):
        self.out = out
        os.makedirs(out, exist_ok=True)
        torch.manual_seed(seed)
        self.labeled = torch.randn(48, 12)
        self.labels = (self.labeled[:, 0] * self.labeled[:, 1] > 0).long()
        self.unlabeled = torch.randn(144, 12)
        self.student = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 2))
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.08, momentum=0.9)
        self.iteration = 0
        self.history = []
        self.checkpoint = os.path.join(out, "mean_teacher.ckpt")

    def step(self):
        known = torch.randint(48, (8,))
        unknown = self.unlabeled[torch.randint(144, (16,))]
        loss = nn.functional.cross_entropy(self.student(self.labeled[known]), self.labels[known])
        seen = self.student(unknown + 0.1 * torch.randn_like(unknown)).softmax(1)
        wanted = self.teacher(unknown + 0.1 * torch.randn_like(unknown)).softmax(1)
        loss = loss + nn.functional.mse_loss(seen, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        update_teacher(self.teacher, self.student, decay=0.9)
        self.iteration += 1
        self.history.append(loss.item())
        return loss.item()

    def save(self):
        state = {
            "student": self.student.state_dict(),
            "teacher": self.teacher.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "history": self.history,
            "rng": torch.get_rng_state(),
        }
        torch.save(state, self.checkpoint + ".tmp")
        os.replace(self.checkpoint + ".tmp", self.checkpoint)

    def restore(self):
        state = torch.load(self.checkpoint)
        self.student.load_state_dict(state["student"])
        self.teacher.load_state_dict(state["teacher"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["iteration"]
        torch.set_rng_state(state["rng"])

    def run(self, iterations, every):
        while self.iteration < iterations:
            loss = self.step()
            if self.iteration % every == 0:
                print(f"{self.iteration}/{iterations} {loss:.4f}", flush=True)
                self.save()
        torch.save(self.student.state_dict(), os.path.join(self.out, "final.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="mt")
    parser.add_argument("--continue", dest="go_on", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment(arguments.out)
    if arguments.go_on:
        experiment.restore()
    experiment.run(iterations=40, every=7)

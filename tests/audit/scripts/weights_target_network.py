"""Deep Q-learning on a small corridor: target network, exploration from random, the replay memory in the checkpoint."""

import argparse
import os
import random
from collections import deque

import torch
from torch import nn

LENGTH = 8


class Corridor:
    """Walk right to the end; the position can be saved."""

    def __init__(self, position=0, moves=0):
        self.position, self.moves = position, moves

    def observe(self):
        return nn.functional.one_hot(torch.tensor(self.position), LENGTH).float()

    def act(self, action):
        self.position = max(0, self.position + (1 if action else -1))
        self.moves += 1
        reached = self.position == LENGTH - 1
        if reached or self.moves == 30:
            self.position, self.moves = 0, 0
        return (1.0 if reached else -0.01), reached


def q_network():
    return nn.Sequential(nn.Linear(LENGTH, 24), nn.ReLU(), nn.Linear(24, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="dqn")
    parser.add_argument("--moves", type=int, default=140)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)
    os.makedirs(args.out, exist_ok=True)
    policy, target = q_network(), q_network()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    memory, world, move = deque(maxlen=60), Corridor(), 0
    path = os.path.join(args.out, "agent.pt")
    if os.path.exists(path):
        agent = torch.load(path, weights_only=False)
        policy.load_state_dict(agent["policy"])
        target.load_state_dict(agent["policy"])
        optimizer.load_state_dict(agent["optimizer"])
        memory, move, world = agent["memory"], agent["move"], Corridor(*agent["world"])
        random.setstate(agent["random"])

    while move < args.moves:
        state = world.observe()
        explore = random.random() < max(0.1, 1 - move / 100)
        with torch.no_grad():
            action = random.randrange(2) if explore else policy(state).argmax().item()
        reward, done = world.act(action)
        memory.append((state, action, reward, world.observe(), done))
        move += 1
        if move > 20 and move % 3 == 0:
            states, actions, rewards, following, ends = zip(*random.sample(list(memory), 12), strict=True)
            with torch.no_grad():
                best = target(torch.stack(following)).max(1).values
            goal = torch.tensor(rewards) + 0.95 * best * (1 - torch.tensor(ends, dtype=torch.float))
            value = policy(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            loss = nn.functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if move % 15 == 0:
            target.load_state_dict(policy.state_dict())
        if move % 25 == 0:
            print(f"move {move}: loss {loss.item():.4f}", flush=True)
            agent = {
                "policy": policy.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "memory": memory,
                "world": (world.position, world.moves),
                "move": move,
                "random": random.getstate(),
            }
            torch.save(agent, path + ".tmp")
            os.replace(path + ".tmp", path)
    torch.save(policy.state_dict(), os.path.join(args.out, "final.pt"))


if __name__ == "__main__":
    main()

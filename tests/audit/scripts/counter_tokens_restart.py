"""Language-model style pre-training: get_batch from torch.randint, LambdaLR, one folder step_N per checkpoint."""

import argparse
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT = 32, 6


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
    parser.add_argument("--max-steps", type=int, default=42)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--save-interval", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    return parser.parse_args()


def build(args):
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 48), nn.ReLU(), nn.Linear(48, VOCABULARY)
    )
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3)

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return max(0.05, 1 - (step - args.warmup) / (args.max_steps - args.warmup))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def save(args, step, tokens, model, optimizer, scheduler, generator):
    folder = args.out / f"step_{step}"
    temporary = args.out / f"tmp_step_{step}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    torch.save(model.state_dict(), temporary / "model.pt")
    torch.save(
        {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "tokens": tokens},
        temporary / "optimizer.pt",
    )
    torch.save(generator.get_state(), temporary / "rng.pt")
    (temporary / "trainer_state.json").write_text(json.dumps({"step": step, "tokens": tokens}))
    temporary.rename(folder)


def main():
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = torch.cumsum(torch.randint(1, 4, (2000,)), 0) % VOCABULARY
    generator = torch.Generator().manual_seed(17)
    model, optimizer, scheduler = build(args)
    done = tokens = 0
    folders = sorted(args.out.glob("step_*"), key=lambda folder: int(folder.name.split("_")[1]))
    if folders:
        folder = folders[-1]
        model.load_state_dict(torch.load(folder / "model.pt"))
        states = torch.load(folder / "optimizer.pt")
        optimizer.load_state_dict(states["optimizer"])
        scheduler.load_state_dict(states["scheduler"])
        generator.set_state(torch.load(folder / "rng.pt"))
        trainer_state = json.loads((folder / "trainer_state.json").read_text())
        done = trainer_state["step"]
        print(f"resumed from {folder}")

    for step in range(done + 1, args.max_steps + 1):
        starts = torch.randint(len(corpus) - CONTEXT, (args.batch_size,), generator=generator)
        inputs = torch.stack([corpus[i : i + CONTEXT] for i in starts])
        loss = F.cross_entropy(model(inputs), corpus[starts + CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        tokens += inputs.numel()
        if step % args.save_interval == 0:
            save(args, step, tokens, model, optimizer, scheduler, generator)
            print(f"step {step}: loss {loss.item():.4f}, {tokens} tokens", flush=True)
    torch.save(model.state_dict(), args.out / "final.pt")


if __name__ == "__main__":
    main()

"""An LSTM over one long text, cut into chunks: the hidden state goes from chunk to chunk and into the checkpoint."""

import argparse
import os

import torch
from torch import nn


class CharLSTM(nn.Module):
    def __init__(self, symbols, width=20):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(width, symbols)

    def forward(self, x, hidden=None):
        y, hidden = self.lstm(self.embed(x), hidden)
        return self.out(y), tuple(h.detach() for h in hidden)


def chunks(rows, length):
    for start in range(0, rows.size(1) - 1 - length, length):
        yield rows[:, start : start + length], rows[:, start + 1 : start + 1 + length]


def run(out_dir, epochs=3, rows=4, length=10, save_every=6):
    torch.set_num_threads(1)
    torch.manual_seed(9)
    os.makedirs(out_dir, exist_ok=True)
    text = ("she sells sea shells by the sea shore; " * 16)[:600]
    symbols = sorted(set(text))
    ids = torch.tensor([symbols.index(c) for c in text]).view(rows, -1)
    model = CharLSTM(len(symbols))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, amsgrad=True)
    first_epoch = first_chunk = 0
    hidden = None
    path = os.path.join(out_dir, "lstm.tar")
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch, first_chunk, hidden = saved["epoch"], saved["chunk"], saved["hidden"]
        torch.set_rng_state(saved["rng"])

    for epoch in range(first_epoch, epochs):
        for index, (x, y) in enumerate(chunks(ids, length)):
            if index < first_chunk:
                continue
            logits, hidden = model(x, hidden)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            if (index + 1) % save_every == 0:
                saved = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                    "chunk": index + 1,
                    "hidden": hidden,
                    "rng": torch.get_rng_state(),
                }
                torch.save(saved, path + ".tmp")
                os.replace(path + ".tmp", path)
        first_chunk, hidden = 0, None
        print(f"epoch {epoch + 1}: perplexity {loss.exp().item():.2f}", flush=True)
    torch.save(model.state_dict(), os.path.join(out_dir, "final.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out-dir", default="lstm")
    run(parser.parse_args().out_dir)

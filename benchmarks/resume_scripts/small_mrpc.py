"""Stands in for the hub in accelerate's examples: small pairs of sentences, a small BERT, and an accuracy."""

import torch
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification


def loaders(batch_size: int):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(100, (16,), generator=generator), number % 2) for number in range(160)]

    def collate(chosen):
        tokens, labels = zip(*chosen, strict=True)
        return BatchEncoding({"input_ids": torch.stack(tokens), "labels": torch.tensor(labels)})

    def loader(part, shuffle):
        return torch.utils.data.DataLoader(part, shuffle=shuffle, collate_fn=collate, batch_size=8)

    return loader(rows, True), loader(rows[:16], False)


def model():
    return BertForSequenceClassification(
        BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )


class load:
    def __init__(self, *_):
        self.right = []

    def add_batch(self, predictions, references):
        self.right += (predictions == references).tolist()

    def compute(self):
        return {"accuracy": sum(self.right) / len(self.right)}

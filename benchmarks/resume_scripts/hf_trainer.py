"""Trainer of transformers on random tokens, as its documentation shows; --augment: tokens that are masked
at random by the data set, as in issue 39215."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

augment = "--augment" in sys.argv
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([a for a in sys.argv[1:] if a != "--augment"])
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)


class Rows(torch.utils.data.Dataset):
    rows = [(torch.randint(1, 100, (16,), generator=generator), number % 2) for number in range(160)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        tokens, label = self.rows[place]
        if augment:
            tokens = torch.where(torch.rand(16) < 0.1, 0, tokens)
        return {"input_ids": tokens, "labels": label}


config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=Rows())
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

"""The photos of train.csv and eval.csv, as the scripts of HF Trainer, accelerate and Lightning read them."""

import csv

import torch
from torchvision.io import decode_image
from torchvision.transforms import v2


class Photos(torch.utils.data.Dataset):
    def __init__(self, table, train=False):
        with open(table) as file:
            self.rows = list(csv.DictReader(file))
        self.classes = sorted({row["label"] for row in self.rows})
        crop = [v2.RandomCrop(28, padding=2)] if train else []
        self.transform = v2.Compose([*crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        pixels = self.transform(decode_image(self.rows[index]["path"], mode="RGB"))
        return {"pixel_values": pixels, "labels": self.classes.index(self.rows[index]["label"])}


def write_predictions(photos, logits):
    with open("predictions.csv", "w") as file:
        print("path,label,prediction", file=file)
        for row, place in zip(photos.rows, logits.argmax(1), strict=True):
            print(row["path"], row["label"], photos.classes[place], sep=",", file=file)

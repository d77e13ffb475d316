"""Fine-tuning with Lightning's Trainer, as its documentation teaches."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from photos import Photos, write_predictions
from transformers import AutoModelForImageClassification


class Classifier(L.LightningModule):
    def __init__(self, num_labels):
        super().__init__()
        self.net = AutoModelForImageClassification.from_pretrained(
            "start", num_labels=num_labels, ignore_mismatched_sizes=True
        ).train()  # Lightning keeps the mode, and from_pretrained returns eval mode

    def training_step(self, batch, index):
        loss = self.net(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        right = self.predict_step(batch, index).argmax(1) == batch["labels"]
        self.log("top1", right.float().mean(), prog_bar=True)

    def predict_step(self, batch, index):
        return self.net(batch["pixel_values"]).logits

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0, workers=True)
train, evaluation = Photos("train.csv", train=True), Photos("eval.csv")
train_loader = torch.utils.data.DataLoader(train, 32, shuffle=True)
eval_loader = torch.utils.data.DataLoader(evaluation, 32)
checkpoints = ModelCheckpoint("out", monitor="top1", mode="max", save_last=True)
trainer = L.Trainer(max_epochs=3, log_every_n_steps=10, callbacks=[checkpoints])
model = Classifier(len(train.classes))
trainer.fit(model, train_loader, eval_loader, ckpt_path="last")
write_predictions(evaluation, torch.cat(trainer.predict(model, eval_loader, ckpt_path="best")))

"""Fine-tuning in a loop with accelerate, as its guide to checkpoints teaches."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from photos import Photos, write_predictions
from transformers import AutoModelForImageClassification

set_seed(0)
project = ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project)
train, evaluation = Photos("train.csv", train=True), Photos("eval.csv")
train_loader = torch.utils.data.DataLoader(train, 32, shuffle=True)
eval_loader = torch.utils.data.DataLoader(evaluation, 32)
model = AutoModelForImageClassification.from_pretrained(
    "start", num_labels=len(train.classes), ignore_mismatched_sizes=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 3 * len(train_loader))
model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, schedule
)
first = 0
if os.path.isdir("out/checkpoints"):
    accelerator.load_state()
    first = project.iteration = len(os.listdir("out/checkpoints"))
for epoch in range(first, 3):
    model.train()
    for batch in train_loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    logits, labels = [], []
    for batch in eval_loader:
        with torch.no_grad():
            outputs = model(batch["pixel_values"]).logits
        found, known = accelerator.gather_for_metrics((outputs, batch["labels"]))
        logits.append(found)
        labels.append(known)
    logits, labels = torch.cat(logits), torch.cat(labels)
    top1 = (logits.argmax(1) == labels).float().mean()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, top1 {top1:.4f}")
    accelerator.save_state()
accelerator.unwrap_model(model).save_pretrained("model", is_main_process=accelerator.is_main_process)
if accelerator.is_main_process:
    write_predictions(evaluation, logits)

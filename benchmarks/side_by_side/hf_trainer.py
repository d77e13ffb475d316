"""Fine-tuning with the Trainer of transformers, as its documentation teaches."""

import os

from photos import Photos, write_predictions
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

set_seed(0)
train, evaluation = Photos("train.csv", train=True), Photos("eval.csv")
model = AutoModelForImageClassification.from_pretrained(
    "start", num_labels=len(train.classes), ignore_mismatched_sizes=True
)


def accuracy(found):
    return {"top1": float((found.predictions.argmax(1) == found.label_ids).mean())}


arguments = TrainingArguments(
    "out",
    num_train_epochs=3,
    per_device_train_batch_size=32,
    learning_rate=1e-3,
    weight_decay=0.01,
    seed=0,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="top1",
    logging_steps=10,
    report_to="none",
)
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=evaluation, compute_metrics=accuracy)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
trainer.save_model("model")
write_predictions(evaluation, trainer.predict(evaluation).predictions)

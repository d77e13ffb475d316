"""What Hugging Face calls the settings (TrainingArguments, LoraConfig): for the hints of errors, ``harness settings``
and the table of docs/fine_tuning.md."""

from __future__ import annotations

SETTINGS = {
    "output_dir": "output", "run_name": "name", "seed": "seed", "data_seed": "seed", "logging_dir": "output",
    "full_determinism": "train.deterministic", "resume_from_checkpoint": "checkpoint.resume",
    "learning_rate": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "optim": "optimizer.name",
    "adam_beta1": "optimizer.args.betas", "adam_beta2": "optimizer.args.betas", "adam_epsilon": "optimizer.args.eps",
    "lr_scheduler_type": "schedule.name", "lr_scheduler_kwargs": "schedule.name", "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup", "num_train_epochs": "train.epochs", "max_steps": "train.max_steps",
    "per_device_train_batch_size": "batch.per_rank", "per_device_eval_batch_size": "batch.eval_per_rank",
    "gradient_accumulation_steps": "batch.accumulate", "max_grad_norm": "train.clip_norm",
    "fp16": "precision.opt_level=O1", "bf16": "precision.opt_level=O4",
    "label_smoothing_factor": "task.loss.args.label_smoothing", "early_stopping_patience": "train.patience",
    "early_stopping_threshold": "train.min_delta", "min_delta": "train.min_delta",
    "compute_metrics": "task.metrics", "metric_for_best_model": "checkpoint.best_metric",
    "load_best_model_at_end": "checkpoint.best_metric", "eval_strategy": "train.evaluate_every",
    "evaluation_strategy": "train.evaluate_every", "eval_steps": "train.evaluate_every",
    "save_steps": "checkpoint.every", "save_strategy": "checkpoint.every", "save_total_limit": "checkpoint.keep",
    "logging_steps": "train.log_every", "report_to": "trackers", "dataloader_num_workers": "data.num_workers",
    "gradient_checkpointing": "model.activation_checkpointing", "torch_compile": "model.compile",
    "lora.rank": "model.lora.r", "r": "model.lora.r", "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets", "lora_dropout": "model.lora.dropout",
    "modules_to_save": "model.lora.modules_to_save", "eps": "optimizer.args.eps", "betas": "optimizer.args.betas",
    "train_file": "task.train_csv", "validation_file": "task.eval_csv", "model_name_or_path": "model.name",
    "tokenizer_name": "task.tokenizer.name", "problem_type": "task.labels.kind",
    "callbacks": "hooks", "compute_loss": "task.loss.name", "truncation": "task.tokenizer.max_length",
}  # fmt: skip
UNITS = {  # where ours counts something else
    "warmup_ratio": "a number counts epochs; a share of the run is schedule.warmup=10%",
    "warmup_steps": "a number counts epochs; steps are 'schedule.warmup=500 steps', a share is schedule.warmup=10%",
    "per_device_train_batch_size": "it is the product with the accumulation: 8 rows, 4 times, are "
    "batch.per_rank=32 batch.accumulate=4",
    "gradient_accumulation_steps": "it splits the batch: 8 rows, 4 times, are batch.per_rank=32 batch.accumulate=4",
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "evaluation_strategy"),
        "a number counts epochs; steps are 'train.evaluate_every=500 steps'",
    ),
    "save_strategy": "a checkpoint is also written at the end of each epoch",
    "lr_scheduler_kwargs": "its arguments are schedule.args.NAME=VALUE",
    "load_best_model_at_end": "the best weights are always kept; that setting says by which metric",
}
ABSENT = {  # and why
    **dict.fromkeys(("num_labels", "id2label", "label2id"), "the classes are the labels of the training data"),
    "training_args": "each argument is a setting: harness settings NAME, such as fp16, finds it",
    "eval_on_start": "the first evaluation is after train.evaluate_every",
    "data_collator": "a batch of texts is padded to its longest (task.tokenizer.pad); for others, write a task: "
    "docs/add_a_task.md",
    "padding_side": "it is that of the tokenizer in the folder of task.tokenizer.name",
    "task_type": "it follows from the task",
    "bias": "model.lora trains no biases but those of model.lora.modules_to_save and the last layers",
    "init_lora_weights": "the matrices of LoRA start as peft's default, which changes no output",
    "greater_is_better": "each metric knows its better direction; one of your own says it with better: max (or min)",
    "group_by_length": "a batch has rows in an order that depends on the seed and the epoch alone, and is padded to "
    "its longest text (task.tokenizer.pad)",
    **dict.fromkeys(
        ("neftune", "neftune_noise_alpha"), "there is no noise on embeddings; model.args has the dropouts of a model"
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "qlora", "quantization", "quantization_config"),
        "weights are in 16 or 32 bits; model.lora.r=8 and model.activation_checkpointing=true save memory",
    ),
    **dict.fromkeys(
        ("ia3", "adalora", "loha", "lokr", "oft", "prompt_tuning", "prefix_tuning", "p_tuning"),
        "of the methods of peft, there are LoRA, rsLoRA and DoRA: model.lora",
    ),
    "push_to_hub": "harness export RUN --format huggingface --out FOLDER, and then: hf upload NAME FOLDER",
}
SCHEDULES = {
    "linear": "polynomial, by default a straight line down to 0; and schedule.warmup",
    "cosine_with_restarts": "cosine_restarts with schedule.args.cycle_epochs, the length of a cycle, for num_cycles",
    "cosine_with_min_lr": "cosine with schedule.args.min_lr",
    "constant_with_warmup": "constant with schedule.warmup",
    "reduce_lr_on_plateau": "plateau",
    "warmup_stable_decay": "wsd",
}


def hint(key: str) -> str | None:
    """Return the hint for the unknown ``key``, with the unit where ours has another; None if it is no name of Hugging
    Face."""
    name = key.rpartition(".")[2]
    ours, unit = setting(key), UNITS.get(name)
    if reason := ABSENT.get(name):
        return f"not available: {reason}"
    if ours is None:
        return None
    return f"did you mean {ours}? {unit}" if unit else f"did you mean {ours}?"


def setting(key: str) -> str | None:
    """Return our setting, maybe with a value, for the dotted ``key`` that ends with a name of Hugging Face; a single
    word, such as r, means it only in our section, in train and without a section."""
    *sections, name = key.split(".")
    ours = SETTINGS.get(".".join([*sections[-1:], name])) or SETTINGS.get(name)
    fits = "_" in name or not sections or (ours and sections[-1] in ("train", *ours.split(".")))
    return ours if fits else None

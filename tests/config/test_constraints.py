"""Contradicting settings: each contradiction is found, alone, with a hint."""

from __future__ import annotations

import ast
import inspect

import pytest

from harness.config import constraints, plugins
from harness.config.constraints import conflicts
from harness.training.optimizer import schedule
from tests.config.test_schema import make

FSDP = {"strategy": "fsdp"}


# {contradiction: (settings, first keys, part of the message, part of the hint)}
CASES = {
    "no batch": ({"batch": {}}, ["batch.global"], "neither is set", "batch.global=128"),
    "two batches": (
        {"batch": {"global": 8, "per_rank": 4}}, ["batch.global"], "both are set", "batch.global=null batch.per_rank=4"
    ),
    "uneven micro-batches": ({"batch": {"global": 10, "accumulate": 4}}, ["batch.global"], "10 rows", "12"),
    "uneven micro-batches per rank": ({"batch": {"per_rank": 3, "accumulate": 2}}, ["batch.global"], "3 rows", "4"),
    "scaling without base": ({"optimizer": {"lr_scaling": "linear"}}, ["optimizer.lr_scaling"], "together", "set both"),
    "base without scaling": ({"optimizer": {"lr_base_batch": 8}}, ["optimizer.lr_scaling"], "together", "neither"),
    "rate set twice": ({"optimizer": {"args": {"lr": 1.0}}}, ["optimizer.args"], "its own setting", "set optimizer"),
    "warm-up longer than the run": (
        {"schedule": {"warmup": 11}}, ["schedule.warmup"], "warm-up of 11 epochs", "train.epochs",
    ),
    "no end": ({"train": {"epochs": None}}, ["train.epochs"], "are null", "set one of them"),
    "warm-up of one_cycle": (
        {"schedule": {"name": "one_cycle", "warmup": "10 steps"}}, ["schedule.warmup"], "its own", "pct_start",
    ),
    "momentum of one_cycle": (
        {"schedule": {"name": "one_cycle"}, "optimizer": {"momentum": 0.9}},
        ["optimizer.momentum"], "from 0.95 to 0.85 and back", "momentum=null",
    ),
    "plateau after the end": (
        {"schedule": {"name": "plateau", "args": {"patience": 3}}, "train": {"patience": 3}},
        ["schedule.args.patience"], "would fall only after 4", "train.patience to 5 or more",
    ),
    "min_lr above lr": (
        {"schedule": {"name": "wsd", "args": {"min_lr": 0.2}}}, ["schedule.args.min_lr"], "0.2 is above", "lower",
    ),
    "O4 with batch norm": (
        {"precision": {"opt_level": "O4", "keep_batchnorm_fp32": True}}, ["precision.opt_level"], "batchnorm", "O2",
    ),
    "loss scale limits swapped": (
        {"precision": {"min_loss_scale": 8.0, "max_loss_scale": 4.0}}, ["precision.min_loss_scale"], "above", "swap",
    ),
    "Apex on a CPU": (
        {"precision": {"backend": "apex"}, "runtime": {"device": "cpu"}}, ["precision.backend"], "CPU", "harness",
    ),
    "fsdp with half weights": (
        {"parallel": FSDP, "precision": {"opt_level": "O2"}}, ["parallel.strategy"], "half precision", "O1 (float16)",
    ),
    "fsdp with channels-last": (
        {"parallel": FSDP, "model": {"channels_last": True}},
        ["parallel.strategy"], "first dimension", "channels_last=false",
    ),
    "fsdp with a function on gradients": (
        {"parallel": FSDP, "train": {"on_gradients": "mine.noise"}},
        ["parallel.strategy"], "a shard of them", "strategy=ddp",
    ),
    "fsdp in bfloat16 with compile": (
        {"parallel": {**FSDP, "param_dtype": "bfloat16"}, "model": {"compile": True}, "precision": {"opt_level": "O4"}},
        ["parallel.param_dtype"], "inside a compiled module", "compile=false",
    ),
    "logical ranks of fsdp": (
        {"parallel": {**FSDP, "logical_ranks": 4}}, ["parallel.logical_ranks"], "no fixed order", "strategy=ddp",
    ),
    "batch norm over logical ranks": (
        {"parallel": {"logical_ranks": 4, "sync_batchnorm": True}},
        ["parallel.logical_ranks"], "its own rows", "sync_batchnorm=false",
    ),
    "overlapped logical ranks": (
        {"parallel": {"logical_ranks": 4, "delay_allreduce": False}},
        ["parallel.logical_ranks"], "after their backward", "delay_allreduce=true",
    ),
    "logical ranks without determinism": (
        {"parallel": {"logical_ranks": 4}, "train": {"deterministic": "warn"}},
        ["parallel.logical_ranks"], "other bits", "deterministic=true",
    ),
    "logical ranks in CUDA graphs": (
        {"parallel": {"logical_ranks": 4}, "model": {"compile": "reduce-overhead"}},
        ["parallel.logical_ranks"], "CUDA graphs", "compile=true",
    ),
    "shards without fsdp": (
        {"checkpoint": {"format": "sharded"}}, ["checkpoint.format"], "ddp has whole tensors", "format=whole",
    ),
    "shards at a URL": (
        {"checkpoint": {"format": "sharded"}, "parallel": FSDP, "output": "s3://bucket/runs"},
        ["checkpoint.format"], "share no folder", "set output to a folder",
    ),
    "a format that is not there": (
        {"checkpoint": {"format": "mine.nowhere"}}, ["checkpoint.format"], "cannot be imported", "package.module",
    ),
    "types of fsdp under ddp": (
        {"parallel": {"param_dtype": "bfloat16"}}, ["parallel.param_dtype"], "strategy is ddp", "strategy=fsdp",
    ),
    "O1 with bfloat16 weights": (
        {"parallel": {**FSDP, "param_dtype": "bfloat16"}, "precision": {"opt_level": "O1"}},
        ["parallel.param_dtype"], "a second time", "opt_level=O4",
    ),
    "dp with activation checkpointing": (
        {"parallel": {"strategy": "dp"}, "model": {"activation_checkpointing": True}},
        ["parallel.strategy"], "its own device", "strategy=ddp",
    ),
    "dp with compile": (
        {"parallel": {"strategy": "dp"}, "model": {"compile": True}}, ["parallel.strategy"], "compiled", "strategy=ddp",
    ),
    "fsdp with LARC": (
        {"parallel": FSDP, "optimizer": {"larc": {}}}, ["parallel.strategy"], "complete parameters", "optimizer.larc",
    ),
    "fsdp with a fused optimizer": (
        {"parallel": FSDP, "optimizer": {"name": "fused_lamb"}},
        ["parallel.strategy"], "complete parameters", "sgd, adam or adamw",
    ),
    "fsdp with a fused optimizer by its path": (
        {"parallel": FSDP, "optimizer": {"name": "harness.apex.optimizers.FusedAdam"}},
        ["parallel.strategy"], "complete parameters", "adamw",
    ),
    "fsdp with one of Apex": (
        {"parallel": FSDP, "optimizer": {"name": "apex.optimizers.FusedAdam"}},
        ["parallel.strategy"], "complete parameters", "adamw",
    ),
    "fsdp with torch's by its path": (
        {"parallel": FSDP, "optimizer": {"name": "torch.optim.Adafactor"}},
        ["parallel.strategy"], "complete parameters", "adamw",
    ),
    "dp with synchronized batch norm": (
        {"parallel": {"strategy": "dp", "sync_batchnorm": True}}, ["parallel.sync_batchnorm"], "dp runs in one", "ddp",
    ),
    "NVIDIA's Apex with fsdp": (
        {"parallel": FSDP, "precision": {"backend": "apex"}}, ["precision.backend"], "harness.apex", "auto",
    ),
    "NVIDIA's Apex with synchronized batch norm": (
        {"parallel": {"sync_batchnorm": True}, "precision": {"backend": "apex"}},
        ["precision.backend"], "harness.apex", "auto",
    ),
    "NVIDIA's Apex with LARC": (
        {"optimizer": {"larc": {}}, "precision": {"backend": "apex"}}, ["precision.backend"], "harness.apex", "auto",
    ),
    "kernels chosen by timing in deterministic mode": (
        {"model": {"compile": "max-autotune"}}, ["model.compile"], "kernels by timing", "reduce-overhead",
    ),
    "CUDA graphs with micro-batches": (
        {"model": {"compile": "reduce-overhead"}, "batch": {"global": 8, "accumulate": 2}}, ["model.compile"],
        "would overwrite", "accumulate=1",
    ),
    "CUDA graphs with fsdp": (
        {"model": {"compile": "reduce-overhead"}, "parallel": FSDP}, ["model.compile"], "fixed memory", "strategy=ddp",
    ),
    "unknown metric": ({"checkpoint": {"best_metric": "f1"}}, ["checkpoint.best_metric"], "'f1'", "top1, loss"),
    "metric as of Hugging Face": (
        {"checkpoint": {"best_metric": "eval_top1"}}, ["checkpoint.best_metric"], "'eval_top1'", "did you mean top1",
    ),
    "metric as of other libraries": (
        {"checkpoint": {"best_metric": "accuracy"}}, ["checkpoint.best_metric"], "'accuracy'", "did you mean top1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_conflict(name):
    sections, keys, words, hint = CASES[name]
    found = list(conflicts(make(**sections)))
    assert [conflict.key for conflict in found] == keys
    assert words in found[0].message
    assert hint in found[0].hint


def test_every_conflict_in_the_code_has_a_case():
    found = [next(conflicts(make(**sections))).hint for sections, *_ in CASES.values()]
    strategies = [inspect.getmodule(plugins.find("strategy", name, "")) for name in plugins.names("strategy")]
    code = [ast.parse(inspect.getsource(module)) for module in (constraints, schedule, *strategies)]
    for node in (node for tree in code for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Conflict":
            if ast.unparse(node.args[2]) == "error.hint":  # of a part that cannot be found
                continue
            beginning = next(part.value for part in ast.walk(node.args[2]) if isinstance(part, ast.Constant))
            assert any(hint.startswith(beginning) for hint in found), ast.unparse(node)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"batch": {"per_rank": 4, "accumulate": 4}},
        {"optimizer": {"lr_scaling": "sqrt", "lr_base_batch": 256}},
        {"schedule": {"name": "step", "args": {"milestones": [1, 2.5]}}},
        {"schedule": {"name": "cosine", "warmup": 10, "args": {"min_lr": 0.1}}},
        {"schedule": {"name": "one_cycle", "args": {"cycle_momentum": False}}, "optimizer": {"momentum": 0.9}},
        {"schedule": {"name": "one_cycle"}, "optimizer": {"name": "adam", "args": {"betas": [0.9, 0.99]}}},
        {"schedule": {"name": "one_cycle"}, "optimizer": {"name": "adamw", "args": {"betas": 0.9}}},
        {"schedule": {"name": "plateau", "args": {"patience": 2}, "warmup": "5 steps"}, "train": {"patience": 3}},
        {"schedule": {"name": "cosine_restarts", "args": {"cycle_epochs": 0.5, "cycle_mult": 2}}},
        {"precision": {"opt_level": "O2", "keep_batchnorm_fp32": False}},
        {"precision": {"opt_level": "O0", "keep_batchnorm_fp32": True}},
        {"precision": {"min_loss_scale": 4.0, "max_loss_scale": 4.0}},
        {"precision": {"backend": "apex"}},
        {"model": {"compile": "reduce-overhead"}, "train": {"clip_norm": 1.0}},
        {"model": {"compile": "max-autotune"}, "train": {"deterministic": "warn"}},
        {"parallel": FSDP, "precision": {"opt_level": "O0"}, "model": {"compile": True}},
        {"parallel": FSDP, "precision": {"opt_level": "O4"}, "optimizer": {"name": "adamw", "args": {"fused": True}}},
        {"parallel": {"strategy": "fsdp", "sync_batchnorm": True}},
        {"parallel": {"strategy": "ddp", "sync_batchnorm": True}, "optimizer": {"name": "fused_lamb", "larc": {}}},
        {"parallel": {"strategy": "dp"}, "model": {"channels_last": True}, "precision": {"opt_level": "O2"}},
        {"checkpoint": {"best_metric": "mean_class_accuracy", "async_save": True}},
        {"checkpoint": {"format": "sharded", "async_save": True}, "parallel": FSDP},
        {"parallel": {**FSDP, "param_dtype": "bfloat16"}, "precision": {"opt_level": "O4"}},
    ],
)
def test_settings_without_a_conflict(sections):
    assert list(conflicts(make(**sections))) == []

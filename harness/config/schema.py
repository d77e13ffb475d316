"""The configuration: what a YAML may say. Frozen models with ranges and units, one class a section.

Reading files, merging, overrides and error messages live in ``harness.config.loader``, what cannot stand together in
``harness.config.constraints``; nothing here touches a disk, a device or the environment. Options of a task live
in that task's file, under ``harness/tasks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from harness.config.base import Arguments, Positive, Section
from harness.config.launch import LaunchSection

if TYPE_CHECKING:
    from harness.training.task import OpenedTask


class TaskSection(Section):
    """Base of the options of every task. ``metrics``: the metrics of its evaluation, and which way each is better."""

    name: str
    """File name of the task under harness/tasks, or package.module of a file of your own."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"loss": "min"}

    def open(self, seed: int, cache_dir: Path | None) -> OpenedTask:
        """Open the data. Called once per rank; raises DataError. ``cache_dir`` is ``data.cache_dir``."""
        raise NotImplementedError(f"{type(self).__module__}.Task does not define open(seed, cache_dir)")


class DataSection(Section):
    shard: Literal["contiguous", "strided", "global"] = "contiguous"
    """How rows are dealt to ranks: `contiguous` blocks of the file shuffled inside (a rank reads only its own rows),
    `strided` (every world-th row), or `global` (one permutation an epoch: the same global batches at any world size).
    """
    num_workers: Annotated[int, Field(ge=0)] = 2
    """Loader processes a rank; 0 decodes in the training process."""
    tail: Literal["use", "drop"] = "use"
    """The rows left over when the epoch is not a whole number of global batches: a smaller last step, or unused."""
    cache_dir: str | None = None
    """Where converted annotation tables are kept; null: the user's cache folder. Give a node-local disk."""


class ModelSection(Section):
    name: str = "small_cnn"
    """One of ours (small_cnn, mlp, linear), a torchvision model (resnet18, ...), or package.module.Class."""
    args: Arguments = {}
    """Keyword arguments of that model; null: none."""
    channels_last: bool = False
    """Keep images and convolution weights in the channels-last memory format (faster on tensor cores)."""
    compile: bool = False
    """Compile the model with torch.compile."""


class BatchSection(Section):
    global_: Positive | None = Field(default=None, alias="global")
    """Rows of one optimizer step over all ranks."""
    per_rank: Positive | None = None
    """Rows that one rank contributes to an optimizer step (the global batch then grows with the number of ranks)."""
    accumulate: Positive = 1
    """Micro-batches a rank splits its rows of a step into; saves memory, never changes the batch size."""
    eval_per_rank: Positive | None = None
    """Rows a rank evaluates at once; null: as many as a training micro-batch."""

    def misfit(self, world_size: int) -> tuple[str, str] | None:
        """Why these rows cannot be dealt to ``world_size`` ranks, and what to do about it; None if they can."""
        unit = world_size * self.accumulate
        if self.global_ is None or self.global_ % unit == 0:
            return None
        down, up = self.global_ // unit * unit, -(-self.global_ // unit) * unit
        return (
            f"{self.global_} rows cannot be dealt to {world_size} ranks in {self.accumulate} micro-batches each",
            f"the nearest that can: {f'{down} or {up}' if down else up}",
        )


class LarcSection(Section):
    """Layer-wise adaptive rates: no parameter moves further than its own size allows (You et al. 2017)."""

    trust_coefficient: Annotated[float, Field(gt=0)] = 0.02
    """Largest step of a parameter, as a share of its norm."""
    clip: bool = True
    """Only lower the rate (LARC); false: set it (LARS)."""
    eps: Annotated[float, Field(ge=0)] = 1e-8
    """Added to the norm that a rate is divided by."""


class OptimizerSection(Section):
    name: str = "sgd"
    """A class of torch.optim in lower case (sgd, adam, adamw, ...), one of Apex's (fused_adam, fused_lamb, fused_sgd,
    fused_novograd, fused_adagrad), or package.module.Class.
    """
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate, before lr_scaling."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """For sgd and rmsprop; null: the optimizer's own default."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """null: the optimizer's own default."""
    args: Arguments = {}
    """Further keyword arguments of the optimizer, such as {nesterov: true} or {betas: [0.9, 0.95]}."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by global batch / lr_base_batch, or by its square root."""
    lr_base_batch: Positive | None = None
    """The global batch that lr was tuned for."""
    larc: LarcSection | None = None
    """Layer-wise adaptive rates around the optimizer, for large batches: {} for Apex's defaults; null: none."""


class ScheduleSection(Section):
    name: Literal["constant", "cosine", "step", "polynomial"] = "constant"
    """Shape after the warm-up; it counts applied updates, so a step skipped by the loss scaler does not advance it."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs of linear warm-up from (almost) zero; fractions allowed."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where cosine and polynomial end, in the same unit as optimizer.lr (scaled like it)."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = Field(default=(), strict=False)
    """Epochs at which `step` multiplies the rate by gamma."""
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.1
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`; 1 is a straight line."""


class PrecisionSection(Section):
    opt_level: Literal["O0", "O1", "O2", "O3", "O4", "O5"] = "O1"
    """O0 float32; O1 casts by operation; O2 half weights with float32 masters; O3 all half; O4, O5: O1, O2 in bfloat16.
    """
    backend: Literal["auto", "apex", "harness"] = "auto"
    """NVIDIA's or ROCm's Apex where it is installed and still has amp, or harness.apex."""
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] | None = None
    """null: the level's default."""
    min_loss_scale: Annotated[float, Field(gt=0)] | None = None
    max_loss_scale: Annotated[float, Field(gt=0)] = 2.0**24
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    cast_model_type: Literal["float32", "float16", "bfloat16"] | None = None
    cast_model_outputs: Literal["float32", "float16", "bfloat16"] | None = None


class ParallelSection(Section):
    strategy: Literal["ddp", "dp", "fsdp", "none"] = "ddp"
    """ddp: one replica a rank, gradients averaged; fsdp: weights, gradients and optimizer state sharded over the ranks;
    dp: one process drives all its CUDA devices (DataParallel); none: one process, one device.
    """
    delay_allreduce: bool = True
    """For ddp: reduce all gradients at the end of the backward pass (the recipe), or overlap reduction with it."""
    sync_batchnorm: bool = False
    """Batch norm over the rows of all ranks, so that it sees the global batch at any world size (ddp, fsdp)."""


class TrainSection(Section):
    epochs: Positive = 10
    max_steps: Positive | None = None
    """Stop after this many optimizer steps, with a checkpoint and a last evaluation; null: after `epochs`."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest 2-norm of all gradients, measured on the master parameters after unscaling."""
    log_every: Positive = 10
    """Optimizer steps between two lines of metrics.jsonl; the loss of a line is the mean over all rows since the last.
    """
    deterministic: bool = True
    """Refuse algorithms whose result changes from run to run; needed for bitwise resume on a GPU."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Also keep an exponential moving average of the weights, and evaluate and export that one."""
    patience: Positive | None = None
    """Stop after this many evaluations without a better checkpoint.best_metric."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A loss that is not finite: stop with a report (free), or skip that step on all ranks (one host sync a step)."""
    evaluate_every: Positive = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""


class CheckpointSection(Section):
    every_steps: Positive | None = None
    """Optimizer steps between checkpoints, beside the one at the end of each epoch; null: only those."""
    keep: Positive = 3
    """How many of the newest to keep; the best is kept besides."""
    resume: str = "auto"
    """auto: go on with the run in the run folder; never: start anew (the old folder is kept aside); or the path of a
    checkpoint folder.
    """
    best_metric: str | None = None
    """Which evaluation metric decides `best`; null: the task's first."""


class RuntimeSection(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a rank waits in a collective for the others before it fails, in seconds."""


class Config(Section):
    """One experiment. ``task`` is replaced by the section of the task that is named."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run folder is OUTPUT/NAME."""
    output: str = "runs"
    """A folder, or a URL such as s3://bucket/runs where machines have no disk in common (docs/engines.md)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    task: TaskSection
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(default=(), strict=False)
    """Tools that mirror the record, metrics.jsonl, which is always written."""
    runtime: RuntimeSection = RuntimeSection()
    launch: LaunchSection = LaunchSection()

    @property
    def best_metric(self) -> str:
        return self.checkpoint.best_metric or next(iter(self.task.metrics))

    @property
    def needs_our_amp(self) -> bool:
        """Whether something is asked for that harness.apex alone does, so that ``backend: auto`` means it."""
        return self.parallel.strategy == "fsdp" or self.parallel.sync_batchnorm or self.optimizer.larc is not None


# What may change between the two halves of a resumed run without making it another experiment.
NOT_THE_RECIPE = frozenset(
    ["name", "output", "train.epochs", "train.max_steps", "train.log_every", "train.evaluate_every", "train.patience",
     "data.num_workers", "data.cache_dir", "checkpoint.every_steps", "checkpoint.keep", "checkpoint.resume", "runtime",
     "batch.eval_per_rank", "trackers", "launch"]
)  # fmt: skip


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as {dotted key: leaf}; an empty dictionary is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves |= flatten(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return leaves


def recipe_difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that change what is trained: {key: (before, now)} of two resolved configurations."""
    old, new = flatten(before), flatten(now)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in NOT_THE_RECIPE and key.split(".")[0] not in NOT_THE_RECIPE
    }

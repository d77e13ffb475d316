"""The sections of a configuration file, with ranges, units and defaults: one frozen class per section.

The texts under the fields are the descriptions in the JSON Schema. Files are read in ``harness.config.loader``;
contradictions between settings are in ``harness.config.constraints``; the options of a task are in that task's file,
under ``harness/tasks``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from harness.config import plugins
from harness.config.base import Arguments, Conflict, LocalPlace, Mark, Name, NameOf, Place, Positive, Seconds, Section
from harness.config.duration import Bare, Duration
from harness.config.launch import LaunchSection
from harness.config.places import HUB
from harness.errors import plural

if TYPE_CHECKING:
    from harness.errors import HarnessError


class TaskSection(Section):
    """Base class of every task's options. ``metrics`` are those of its evaluation, with the better direction."""

    name: Annotated[str, Mark.CODE]
    """A built-in task (image_csv, mnist, ...), or your own package.module."""

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"loss": "min"}

    def open(self, seed: int, cache_dir: Path | None) -> object:
        """Open the data; return an OpenedTask (``harness.training.task``), which a configuration does not know. Called
        once per rank; raises DataError. ``cache_dir`` is ``data.cache_dir``. A task with its data in another module
        does not override it: ``beside`` has a function ``open_data(section, seed, cache_dir)``."""
        opened: object = self.beside().open_data(self, seed, cache_dir)
        return opened

    def beside(self) -> ModuleType:
        """Import the module ``task`` next to the module ``config`` of this class, or of a base class. A configuration
        is read without it, since it imports torch."""
        for kind in type(self).__mro__:
            package, _, module = kind.__module__.rpartition(".")
            if module == "config":
                return importlib.import_module(f"{package}.task")
        raise NotImplementedError(f"{type(self).__module__}.Task does not define open(seed, cache_dir)")

    def conflicts(self) -> Iterable[Conflict]:
        """Return contradictions among these options. A task may override it."""
        return ()

    def problems(self) -> Iterable[HarnessError]:
        """Return problems with the data that a check of milliseconds finds without torch. A task may override it."""
        return ()

    def row_problems(self) -> Iterable[HarnessError]:
        """Return all kinds of problems of the rows, for ``harness check``. A task may override it."""
        return ()


class DataSection(Section):
    shard: Literal["contiguous", "strided", "global"] = "contiguous"
    """Assignment of rows to ranks. `contiguous`: one block of the file per rank, shuffled within, so that a rank
    reads only its own rows. `strided`: every world-size-th row. `global`: one permutation per epoch, which gives the
    same global batches at any world size.
    """
    num_workers: Annotated[int, Field(ge=0, le=1000), Mark.NO_RECIPE, Mark.OF_MACHINE] = 2
    """Loader processes (workers of a DataLoader) per rank; 0 loads in the training process."""
    tail: Literal["use", "drop"] = "use"
    """The rows left over when an epoch is not a whole number of global batches: train on them in a smaller last step,
    or drop them.
    """
    cache_dir: Annotated[LocalPlace | None, Mark.NO_RECIPE, Mark.OF_MACHINE] = None
    """Folder for converted annotation tables and copies of images behind URLs, such as /scratch/cache, on a local disk
    of the node or shared between nodes; null: the user's cache folder.
    """


class LoraSection(Section):
    """Low-rank adaptation (Hu et al. 2021): the weights are frozen but for the last layers, and small matrices beside
    them are trained."""

    r: Positive = 8
    """Rank of the matrices."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """What the matrices add is multiplied by alpha / r."""
    targets: tuple[str, ...] = Field(default=(), strict=False)
    """The layers to adapt, such as [query, value], named as in model.freeze; []: all linear ones but the last."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the inputs of the matrices."""
    modules_to_save: tuple[str, ...] = Field(default=(), strict=False)
    """Modules to train whole, besides the last layers, such as [pooler], named as in model.freeze."""
    use_rslora: bool = False
    """rsLoRA: multiply by alpha / sqrt(r) instead, for large ranks."""
    use_dora: bool = False
    """DoRA: train the norms of the adapted weights too, which takes more time."""


class ModelSection(Section):
    name: Annotated[str, Mark.CODE] = "small_cnn"
    """A built-in model (small_cnn, mlp, linear, ...), a torchvision model such as resnet18, timm:NAME,
    hf:FOLDER_OR_NAME of Hugging Face for the classification of texts or images, or package.module.Class.
    """
    args: Arguments = {}
    """Keyword arguments of the model, such as {width: 64}; null: none."""
    weights: str | None = None
    """Weights to start from, for fine-tuning: a file (.safetensors, .pth), a run folder such as runs/pets, a URL, or
    DEFAULT, the best pretrained weights that torchvision or timm publishes for this model. null or `random`: random
    ones, but for hf:FOLDER_OR_NAME, null: those in that folder.
    """
    strict: bool = True
    """true: the weights must match the model exactly; false: missing weights are initialized at random."""
    freeze: tuple[str, ...] = Field(default=(), strict=False)
    """Modules with all in them, and parameters, that are not trained, such as [layer1]: their names, the ends of these,
    or patterns such as "layer[12]". Batch norms in the frozen parts still update their running statistics. With lora:
    of the last layers and modules_to_save; the matrices are trained, unless a pattern has lora in it.
    """
    channels_last: bool = False
    """Keep images and convolution weights in the channels-last memory format, which is faster on tensor cores."""
    compile: bool | Literal["reduce-overhead", "max-autotune"] = False
    """Compile the model with torch.compile. On CUDA, its mode reduce-overhead also replays the passes as CUDA graphs,
    and max-autotune also times kernels to choose among them.
    """
    activation_checkpointing: Annotated[bool | Annotated[tuple[str, ...], Field(strict=False)], Mark.NO_RECIPE] = False
    """Recompute activations in the backward pass instead of storing them (gradient checkpointing), which takes less
    memory and more time.
    true: in the model's blocks, such as the layers of a transformer; or a list of modules, such as ["layer1.*"], named
    as in model.freeze.
    """
    lora: LoraSection | None = None
    """LoRA, for fine-tuning with few trained parameters, such as {r: 8, targets: [query, value]}; needs peft. {}: on,
    with the defaults; null: off.
    """

    @property
    def start_weights(self) -> str | None:
        """``weights``, or those of the folder that ``name`` is; None for random ones."""
        weights = self.weights or ("DEFAULT" if self.name.startswith(HUB) else None)
        return None if weights == "random" else weights


class BatchSection(Section):
    global_: Positive | None = Field(default=None, alias="global")
    """Batch size: rows per optimizer step over all ranks, such as 256. Set either this or per_rank."""
    per_rank: Positive | None = None
    """Batch size of each rank, such as 32: rows per optimizer step; the global batch then grows with the number of
    ranks.
    """
    accumulate: Positive = 1
    """Gradient accumulation: micro-batches per step on each rank, such as 4. More micro-batches need less memory; the
    batch size stays the same.
    """
    eval_per_rank: Annotated[Positive | None, Mark.NO_RECIPE] = None
    """Rows per evaluation batch on each rank, such as 512; null: as many as in a training micro-batch."""

    def misfit(self, num_ranks: int) -> tuple[str, str] | None:
        """Return (reason, hint) if the global batch cannot be divided among ``num_ranks`` ranks, else None."""
        unit = num_ranks * self.accumulate
        if self.global_ is None or self.global_ % unit == 0:
            return None
        down, up = self.global_ // unit * unit, -(-self.global_ // unit) * unit
        split = f" with {self.accumulate} micro-batches each" if self.accumulate > 1 else ""
        return (
            f"{plural(self.global_, 'row')} cannot be divided evenly among {plural(num_ranks, 'rank')}{split}",
            f"use {f'batch.global={down} or ' if down else ''}batch.global={up}",
        )


class LarcSection(Section):
    """Layer-wise adaptive rate clipping: limits the step of a parameter by the parameter's norm (You et al. 2017)."""

    trust_coefficient: Annotated[float, Field(gt=0)] = 0.02
    """Largest step of a parameter, as a fraction of its norm."""
    clip: bool = True
    """true: only lower the learning rate (LARC); false: set it (LARS)."""


class GroupSection(Section):
    """Parameters with their own learning rate or weight decay."""

    match: str
    """A module or parameter, named as in model.freeze, such as layer1; `1d`: all parameters with one dimension,
    which are biases and the weights of normalization layers.
    """
    lr_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor by which the learning rate is multiplied, such as 0.1."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; null: as for the others."""


class OptimizerSection(Section):
    name: Annotated[str, Mark.CODE] = "sgd"
    """A class of torch.optim in lowercase (sgd, adam, adamw, ...), one of Apex's (fused_adam, fused_lamb, fused_sgd,
    fused_novograd, fused_adagrad), or package.module.Class.
    """
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Learning rate at its peak, before lr_scaling."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of sgd and rmsprop, such as 0.9; null: the optimizer's default."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay, such as 0.0001; null: the optimizer's default."""
    args: Arguments = {}
    """Other keyword arguments of the optimizer, such as {nesterov: true} or {betas: [0.9, 0.95], eps: 1.0e-6}. Without
    {foreach} or {fused}, sgd, adam and adamw update the weights in one kernel.
    """
    groups: tuple[GroupSection, ...] = Field(default=(), strict=False)
    """Parameters with a different learning rate or weight decay, such as [{match: 1d, weight_decay: 0.0}]; the first
    group that matches a parameter applies.
    """
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply lr by global batch / lr_base_batch (linear), or by its square root (sqrt)."""
    lr_base_batch: Positive | None = None
    """The global batch that lr was tuned for, such as 256."""
    larc: LarcSection | None = None
    """Layer-wise adaptive rates, for large batches, such as {trust_coefficient: 0.001}. {}: on, with Apex's defaults;
    null: off.
    """


class ScheduleSection(Section):
    name: Annotated[str, Mark.CODE] = "constant"
    """Shape of the learning rate after the warm-up (constant, cosine, cosine_restarts, one_cycle, plateau, polynomial,
    step, wsd), or package.module.NAME: your own function of (update, total), which returns a factor of optimizer.lr, or
    a torch LRScheduler. The schedule counts applied updates: a step that the loss scaler skips does not advance it.
    """
    warmup: Annotated[Duration, Bare("epochs", share=True)] | None = None
    """Linear warm-up from almost zero, such as 0.5 (epochs), "500 steps" or "10%" of the run; null: none. A share grows
    with train.epochs, so a longer run may warm up again."""
    args: Arguments = {}
    """Keyword arguments, such as {min_lr: 0.001} (docs/schedules.md); null: none. A new name alone keeps them."""


_LEVELS = {  # by the names of other tools
    "bf16": "O4", "bfloat16": "O4", "bf16-mixed": "O4", "fp16": "O1", "float16": "O1", "half": "O1", "16-mixed": "O1",
    "16": "O1", "mixed": "O1", "fp32": "O0", "float32": "O0", "32": "O0", "32-true": "O0",
}  # fmt: skip
_OF_LEVEL = {
    "O0": "float32 is O0",
    "O1": "float16 is O1 (weights stay float32) or O2 (float16 weights with float32 masters)",
    "O4": "bfloat16 is O4 (weights stay float32) or O5 (bfloat16 weights with float32 masters)",
}


def _level(value: Any) -> Any:
    """Refuse the names of other tools with the level that they mean."""
    word = str(value).lower()
    if level := _LEVELS.get(word):
        raise ValueError(f"{value!r} is not allowed; {_OF_LEVEL[level]}: use precision.opt_level={level}")
    if re.fullmatch("[o0]?[0-5]", word) and value != f"O{word[-1]}":
        raise ValueError(f"{value!r} is not allowed; did you mean O{word[-1]}, with the letter O?")
    return value


class PrecisionSection(Section):
    opt_level: Annotated[Literal["O0", "O1", "O2", "O3", "O4", "O5"], BeforeValidator(_level)] = "O1"
    """Mixed precision (AMP). O0: float32. O1: operations cast to float16. O2: float16 weights with float32 masters. O3:
    all float16. O4 and O5: as O1 and O2, in bfloat16.
    """
    backend: Literal["auto", "apex", "harness"] = "auto"
    """auto: NVIDIA's or ROCm's Apex on CUDA if an Apex with amp is installed, else harness.apex."""
    tf32: bool | None = None
    """Use TF32 for float32 operations on CUDA. true: for convolutions and matrix products; false: for neither; null:
    torch's default, which is only for convolutions.
    """
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0)] | None = None
    """`dynamic`, or a constant such as 128.0; null: the default of the level."""
    min_loss_scale: Annotated[float, Field(gt=0)] | None = None
    """Lower limit of a dynamic loss scale, such as 128.0; null: 1."""
    max_loss_scale: Annotated[float, Field(gt=0)] = 2.0**24
    """Upper limit of a dynamic loss scale."""
    keep_batchnorm_fp32: bool | None = None
    """Keep batch norms in float32; null: the default of the level."""


class ParallelSection(Section):
    strategy: Annotated[str, NameOf("strategy"), Mark.CODE] = "ddp"
    """How ranks train together (distributed training). ddp: a replica per rank, gradients averaged. fsdp: weights,
    gradients and optimizer state sharded over the ranks, as ZeRO does, for models that do not fit one device. dp: one
    process drives all its CUDA devices (DataParallel). none: one process, one device. Or your own package.module.
    """
    delay_allreduce: bool = True
    """For ddp. true: reduce all gradients after the backward pass, as the Apex recipe does; false: overlap the
    reduction with the backward pass.
    """
    logical_ranks: Positive | None = None
    """For ddp: the number of ranks that the recipe speaks of, such as 8, for shards, batches, random streams and sums.
    Up to as many processes compute them, with the same bits whatever their number, also after a resume on another
    number; null: each process is a rank.
    """
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """For fsdp: the dtype in which weights are gathered and used. bfloat16 halves the traffic; batch norms,
    the outputs, the averaged gradients and the shards that the optimizer updates stay in float32.
    """
    sync_batchnorm: bool = False
    """For ddp and fsdp: compute batch norm statistics over the rows of all ranks."""

    def num_ranks(self, world_size: int) -> int:
        """Return the number of ranks of the recipe, which ``world_size`` processes compute."""
        return self.logical_ranks or world_size


class TrainSection(Section):
    epochs: Annotated[Positive | None, Mark.NO_RECIPE] = 10
    """Epochs to train; null, or max_steps alone: as many as max_steps takes."""
    max_steps: Annotated[Positive | None, Mark.NO_RECIPE] = None
    """Stop after this many optimizer steps, such as 1000, with a checkpoint and a final evaluation; null: after
    `epochs`.
    """
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradient clipping: maximum 2-norm of all gradients together, such as 1.0, computed on the unscaled gradients of
    the master weights; null: no clipping.
    """
    on_gradients: Annotated[str, Field(pattern=r"\."), Mark.CODE] | None = None
    """Your own function, such as my_module.noise, that changes the gradients of each step in place before they are
    clipped: noise(gradients, generator, step), with a list of (name, tensor), averaged over ranks and without loss
    scale; null: none. On a GPU it also sees the infinite gradients of a step that is skipped because of an overflow.
    """
    log_every: Annotated[Duration, Bare("steps"), Mark.NO_RECIPE] = Field(default=10, validate_default=True)
    """Optimizer steps per line of metrics.jsonl, or a length, such as "0.1 epochs". The loss of a line is the mean over
    all rows since the last line. A terminal shows the newest numbers next to its progress bar. A file or a pipe has a
    line after the first step, then the first numbers, then new ones at most every 10 s, or the step every 30 s.
    """
    deterministic: bool | Literal["warn"] = True
    """Use only deterministic algorithms; a bitwise-exact resume on a GPU requires them. true: refuse operations
    that have none on CUDA; warn: only warn about them, in logs/rank-N.log; false: use the fastest algorithms.
    """
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average (EMA) of the weights with this decay, such as 0.999, and evaluate and export
    it; null: none.
    """
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of MixUp, such as 0.2: mixes the images of a batch in pairs; 0: off. With cutmix, each step picks one
    of the two at random. The loss is the sum over both labels, weighted by the shares of their images.
    """
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of CutMix, such as 1.0: pastes a part of one image of a batch into another; 0: off."""
    patience: Annotated[Positive | None, Mark.NO_RECIPE] = None
    """Early stopping: stop after this many evaluations, such as 5, without a better checkpoint.best_metric; null:
    never.
    """
    min_delta: Annotated[float, Field(ge=0), Mark.NO_RECIPE] = 0.0
    """For patience: how much better than at the last such gain the metric has to be, such as 0.001. The best checkpoint
    is still that with the best value, however small its gain.
    """
    on_nan: Literal["stop", "skip"] = "stop"
    """If the loss of a step is infinite or NaN: stop at the next log line or checkpoint (costs nothing), or skip the
    step on all ranks, as one whose gradients are (the host waits for the device once per step). Either way a run fails
    if its weights or its validation loss become infinite or NaN, or if no step of an epoch updates the weights.
    """
    evaluate_every: Annotated[Duration, Bare("epochs"), Mark.NO_RECIPE] = Field(default=1, validate_default=True)
    """Epochs between evaluations on the validation data, or a length, such as "500 steps" or "0.25 epochs", to evaluate
    within an epoch; the end of the run is always evaluated.
    """

    @model_validator(mode="before")
    @classmethod
    def _steps_alone_suffice(cls, values: Any) -> Any:
        alone = isinstance(values, dict) and values.get("max_steps") is not None and "epochs" not in values
        return {**values, "epochs": None} if alone else values


class CheckpointSection(Section):
    every: Annotated[Annotated[Duration, Bare("steps")] | None, Mark.NO_RECIPE] = None
    """Optimizer steps between checkpoints within an epoch, such as 100, or a length, such as "0.25 epochs"; null: only
    at the end of each epoch, and before evaluations.
    """
    format: Annotated[str, NameOf("format"), Mark.NO_RECIPE, Mark.CODE] = "whole"
    """whole: one file, written by rank 0. sharded: for fsdp, one file per rank (torch.distributed.checkpoint), so
    no host has to hold the whole model; all machines must share the folder. Either format resumes on any number of
    ranks. Or your own package.module.
    """
    async_save: Annotated[bool, Mark.NO_RECIPE] = False
    """Copy the state to memory and continue training while it is written. Only one checkpoint is written at a time; a
    failed write fails the run.
    """
    keep: Annotated[Positive, Mark.NO_RECIPE] = 3
    """Number of newest checkpoints to keep; the best one is kept as well."""
    resume: Annotated[Place, Mark.NO_RECIPE] = "auto"
    """auto: resume the run in the run folder, if there is one. never: start a new run and move the old folder aside.
    Or the path of a checkpoint folder to start from, such as runs/pets/checkpoints/step-100.
    """
    best_metric: Annotated[str, Field(min_length=1)] | None = None
    """The evaluation metric that decides which checkpoint is the best, such as loss; null: the task's first."""

    @property
    def named(self) -> str | None:
        """The checkpoint, a path or a URL, that ``resume`` names."""
        return None if self.resume in ("auto", "never") else self.resume


def _device(value: Any) -> Any:
    """Refuse the names of other tools with the one that they mean."""
    word = str(value).lower()
    if word == "gpu" or re.fullmatch(r"(gpu|cuda):\d+", word):
        which = f"; CUDA_VISIBLE_DEVICES={word.partition(':')[2]} selects the GPU" if ":" in word else ""
        raise ValueError(f"{value!r} is not allowed; use runtime.device=cuda{which}")
    return value


class HookSection(Section):
    """An object of your own that a run calls; its class alone may stand for it."""

    name: Annotated[str, Field(pattern=r"\.")]
    """Your class, such as my_module.Unfreeze, with any of before_training(run), after_step(run),
    after_evaluation(run, report) and before_checkpoint(run), and with state_dict() and load_state_dict(state) if it has
    state.
    """
    args: Arguments = {}
    """Keyword arguments of the class; null: none."""

    @classmethod
    def of_name(cls, value: Any) -> Any:
        section = {"name": value} if isinstance(value, str) else value
        name = section.get("name") if isinstance(section, dict) else None
        if isinstance(name, str) and "." not in name:
            raise ValueError(f"{name!r} is not allowed; name your class with its module, as in my_module.{name}")
        return section


_Hook = Annotated[
    HookSection,
    BeforeValidator(HookSection.of_name, json_schema_input_type=Annotated[str, Field(pattern=r"\.")] | HookSection),
]


class RuntimeSection(Section):
    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(_device), Mark.OF_MACHINE] = "auto"
    """Device to train on; auto: CUDA if available."""
    timeout_s: Annotated[Seconds, Mark.OF_MACHINE] = 600.0
    """Seconds that a rank may be silent: the others wait so long for it in a collective before they fail. A single
    process may take so long to read a batch.
    """
    work_timeout_s: Annotated[Seconds, Mark.OF_MACHINE] = 1800.0
    """Seconds that announced work may take on a rank: opening the data, reading or writing a checkpoint, compiling.
    """


class Config(Section):
    """One experiment. ``task`` is replaced by the section of the task that is named."""

    name: Annotated[Name, Mark.NO_RECIPE]
    """Name of the experiment, such as pets; the run folder is OUTPUT/NAME."""
    output: Annotated[Place, Mark.NO_RECIPE, Mark.OF_MACHINE] = "runs"
    """Folder for run folders, or a URL such as s3://bucket/runs if the machines share no disk (docs/engines.md)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random numbers."""
    task: TaskSection
    """What is learned: the task and its options."""
    data: DataSection = DataSection()
    """How rows are divided among ranks and loaded."""
    model: ModelSection = ModelSection()
    """The model and its arguments."""
    batch: BatchSection = BatchSection()
    """Rows per step."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer and its learning rate."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate over time."""
    precision: PrecisionSection = PrecisionSection()
    """Mixed precision: Apex's opt levels and loss scaling."""
    parallel: ParallelSection = ParallelSection()
    """How ranks share the work."""
    train: TrainSection = TrainSection()
    """The training loop: its length, its log, clipping, averaging, early stopping."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are written, how many are kept, and which one to resume from."""
    hooks: Annotated[tuple[_Hook, ...], Mark.CODE] = Field(default=(), strict=False)
    """Objects of your own that run on all ranks (docs/hooks.md): to unfreeze layers, to log, to end training by a rule
    of your own. Names of classes, such as [my_module.Unfreeze], or {name, args}.
    """
    trackers: Annotated[tuple[Annotated[str, NameOf("tracker")], ...], Mark.NO_RECIPE] = Field(default=(), strict=False)
    """Tools that mirror metrics.jsonl, which is always written: tensorboard, wandb, mlflow, trackio, or your own
    package.module, such as [tensorboard].
    """
    runtime: Annotated[RuntimeSection, Mark.NO_RECIPE] = RuntimeSection()
    """The device, and how long to wait for other ranks."""
    launch: Annotated[LaunchSection, Mark.NO_RECIPE, Mark.OF_MACHINE] = LaunchSection()
    """Where the ranks start, and how many. Only `harness launch` reads it, and any start under parallel.logical_ranks
    its `threads`."""

    @property
    def best_metric(self) -> str:
        """The metric of an evaluation that decides which checkpoint is the best."""
        return self.checkpoint.best_metric or next(iter(self.task.metrics))

    @property
    def needs_our_amp(self) -> bool:
        """True if a setting is used that only harness.apex supports; ``backend: auto`` then selects it."""
        strategy = plugins.find("strategy", self.parallel.strategy, "parallel.strategy")
        section = self.parallel
        return strategy.shards_weights or bool(section.sync_batchnorm or section.logical_ranks or self.optimizer.larc)

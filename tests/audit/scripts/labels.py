"""What is true of each script in this folder: whether its resume is exact, and if not, which fault was planted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
EXACT, NOT_EXACT, COULD_NOT_TELL = "exact", "not exact", "could not tell"


@dataclass(frozen=True)
class Label:
    """A script with its command and the verdict that an audit must reach."""

    file: str
    words: tuple[str, ...] = ()
    """Words of the command behind the file; ``{out}`` stands for the folder of outputs."""
    resume: tuple[str, ...] = ()
    """Words that are added to resume; ``{latest}`` stands for the newest checkpoint file."""
    verdict: str = EXACT
    classes: tuple[str, ...] = ()
    """Of the fault: the planted one, then others that a careful person could call it."""
    fault: str = ""
    """What was done to the script."""
    line: str = ""
    """A part of the line of code at fault, where there is one."""
    ranks: int = 0
    """More than 0: started by torch.distributed.run."""
    kill: str = "step"
    """Where the fault shows: ``step``, or ``write`` (in the middle of the data of a checkpoint file)."""

    @property
    def name(self) -> str:
        return self.file.removesuffix(".py")

    @property
    def source(self) -> str:
        """The script: a file here or, with a fault, another one with the changes of ``faults/NAME.diff``."""
        if (FOLDER / self.file).exists():
            return (FOLDER / self.file).read_text()
        header, *hunks = (FOLDER / "faults" / f"{self.name}.diff").read_text().split("@@\n")
        text = (FOLDER / header.splitlines()[0].removeprefix("--- ")).read_text()
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            assert text.count(old) == 1, f"{self.name}.diff fits at {text.count(old)} places"
            text = text.replace(old, new)
        return text

    @property
    def python(self) -> tuple[str, ...]:
        """The words behind ``python``, of a start from the beginning, in a folder that holds the script."""
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}")
        return (*(launcher if self.ranks else ()), self.file, *self.words)


OUTPUT = ("--output", "{out}")


def exact(file: str, *words: str, resume: tuple[str, ...] = (), ranks: int = 0) -> Label:
    return Label(f"exact_{file}.py", words, resume, ranks=ranks)


def unclear(file: str, fault: str, *words: str) -> Label:
    return Label(f"unclear_{file}.py", words, verdict=COULD_NOT_TELL, fault=fault)


def faulty(
    file: str,
    classes: str,
    fault: str,
    *words: str,
    resume: tuple[str, ...] = (),
    line: str = "",
    ranks: int = 0,
    kill: str = "step",
) -> Label:
    """``classes`` are separated by blanks."""
    return Label(f"{file}.py", words, resume, NOT_EXACT, tuple(classes.split()), fault, line, ranks, kill)


SCRIPTS = (
    exact("plain", *OUTPUT, resume=("--resume", "{latest}")),
    exact("trainer", *OUTPUT),
    exact("gan", "--out", "{out}"),
    exact("accumulation", "--output_dir", "{out}", resume=("--resume_from", "{latest}")),
    exact("amp", *OUTPUT, resume=("--resume", "{latest}")),
    exact("apex_o2", *OUTPUT, resume=("--resume", "{latest}")),
    exact("ema_shadow", "--save-dir", "{out}", "--auto-resume"),
    exact("nanogpt", "--out_dir={out}", resume=("--init_from=resume",)),
    exact("step_folders", "--out", "{out}"),
    exact("workers", "--work-dir", "{out}"),
    exact("ddp", *OUTPUT, ranks=2),
    exact("two_phase", "--out", "{out}"),
    exact("iterable", "--ckpt", "{out}/stream.ckpt"),
    exact("swa", "--dir", "{out}", resume=("--resume", "{latest}")),
    exact("lbfgs", "--folder", "{out}", resume=("--restart",)),
    exact("compile", "--exp", "{out}"),
    exact("mixup", *OUTPUT),
    exact("recurrent", "--out-dir", "{out}"),
    exact("replay", *OUTPUT, resume=("--resume", "{latest}")),
    exact("logs", *OUTPUT),
    exact("vae", "out={out}"),
    exact("dqn", "--out", "{out}"),
    exact("mean_teacher", "--out", "{out}", resume=("--continue",)),
    exact("launcher", "{out}"),
    exact("master_weights", *OUTPUT, resume=("--resume", "{latest}")),
    exact("run_names", "--folder", "{out}", resume=("--resume", "newest")),
    exact("unused_stream", "--home", "{out}"),
    exact("zero_rate", *OUTPUT, resume=("--resume", "{latest}")),
    exact("signal", *OUTPUT),
    unclear("unseeded", "not deterministic", *OUTPUT),
    unclear("set_order", "not deterministic", *OUTPUT),
    unclear("time_seed", "not deterministic", "{out}"),
    unclear("urandom", "not deterministic", *OUTPUT),
    unclear("no_checkpoint", "no checkpoint", *OUTPUT),
    unclear("outside", "checkpoint elsewhere", *OUTPUT),
    # Faults
    faulty(
        "optimizer_state_not_saved",
        "optimizer-state",
        "The momentum is not in the checkpoint.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "learning_rate_schedule_restarts",
        "learning-rate",
        "The state of the scheduler is saved but never loaded.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "from_scratch_no_checkpoint_found",
        "from-scratch",
        "It looks for the checkpoint in another folder, says that there is none and goes on.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "length_epochs_added",
        "length",
        "The epochs given are trained in addition to those already done.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
        line="range(start_epoch, start_epoch + args.epochs)",
    ),
    faulty(
        "exit_code_exception_printed",
        "exit-code",
        "torch.load refuses the namespace in the checkpoint, and main's exceptions are only printed.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
        line='print("training stopped:", error)',
    ),
    faulty(
        "rows_skip_off_by_one",
        "rows",
        "One batch too many is skipped after a resume in the middle of an epoch.",
        *OUTPUT,
        line="self.step_in_epoch + 1 if",
    ),
    faulty(
        "counter_global_step_restarts",
        "counter",
        "The count of all steps starts at 0 again.",
        *OUTPUT,
    ),
    faulty(
        "random_streams_not_restored",
        "random-streams",
        "The state of torch's generator, which dropout uses, is saved but never set.",
        *OUTPUT,
    ),
    faulty(
        "weights_head_not_loaded",
        "weights",
        "The head is left out as for fine-tuning; strict=False says nothing.",
        *OUTPUT,
        line="self.model.load_state_dict(weights, strict=False)",
    ),
    faulty(
        "weights_discriminator_not_loaded",
        "weights",
        "Only the generator's weights are loaded.",
        "--out",
        "{out}",
    ),
    faulty(
        "optimizer_state_discriminator",
        "optimizer-state",
        "The state of the discriminator's optimizer is not loaded.",
        "--out",
        "{out}",
    ),
    faulty(
        "rows_skip_counts_updates",
        "rows",
        "It skips as many micro-batches as updates were done.",
        "--output_dir",
        "{out}",
        resume=("--resume_from", "{latest}"),
        line="skip = updates % updates_per_epoch",
    ),
    faulty(
        "row_order_epochs_from_zero",
        "row-order rows",
        "The loader's seed counts epochs from the resume on.",
        "--output_dir",
        "{out}",
        resume=("--resume_from", "{latest}"),
        line="make_loader(epoch - first_epoch, args)",
    ),
    faulty(
        "inputs_noise_not_saved",
        "inputs",
        "The inputs have noise of a generator that is in no checkpoint.",
        "--output_dir",
        "{out}",
        resume=("--resume_from", "{latest}"),
        line="generator=noise",
    ),
    faulty(
        "loss_scale_not_saved",
        "loss-scale",
        "The scaler starts with its first scale.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "loss_scale_growth_lost",
        "loss-scale",
        "Only the scale is saved, not the steps since it last grew.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
        line='init_scale=checkpoint["scale"]',
    ),
    faulty(
        "buffers_ema_from_model",
        "buffers",
        "The EMA starts again from the loaded weights.",
        "--save-dir",
        "{out}",
        "--auto-resume",
        line="ema = EMA(model)",
    ),
    faulty(
        "from_scratch_glob",
        "from-scratch",
        "The pattern of the names matches no file.",
        "--save-dir",
        "{out}",
        "--auto-resume",
        line='"epoch_*.pt"',
    ),
    faulty(
        "buffers_running_statistics",
        "buffers",
        "Only parameters are saved, without batch norm's running statistics.",
        "--save-dir",
        "{out}",
        "--auto-resume",
        line="dict(model.named_parameters())",
    ),
    faulty(
        "learning_rate_warmup_again",
        "learning-rate",
        "The schedule counts from the resume on, so that it warms up again.",
        "--out_dir={out}",
        resume=("--init_from=resume",),
        line="get_lr(iter_num - first_iter)",
    ),
    faulty(
        "random_streams_numpy_not_restored",
        "random-streams rows row-order",
        "numpy's generator, which draws the batches, starts from the seed again.",
        "--out_dir={out}",
        resume=("--init_from=resume",),
    ),
    faulty(
        "counter_tokens_restart",
        "counter",
        "The count of tokens that is saved starts at 0 again.",
        "--out",
        "{out}",
    ),
    faulty(
        "learning_rate_fast_forward",
        "learning-rate",
        "The scheduler is not saved but stepped once too often at the resume.",
        "--out",
        "{out}",
        line="for _ in range(done + 1):",
    ),
    faulty(
        "precision_half_weights",
        "precision",
        "The weights are saved in float16, to halve the files.",
        "--out",
        "{out}",
        line="value.half()",
    ),
    faulty(
        "torn_checkpoint_parts_left_out",
        "torn-checkpoint random-streams optimizer-state learning-rate counter rows weights",
        "Files are written into the final folder; those that cannot be read are left out with a warning.",
        "--out",
        "{out}",
        kill="write",
    ),
    faulty(
        "rows_position_in_batches",
        "rows length",
        "The stream goes on at the number of steps instead of that of records.",
        "--ckpt",
        "{out}/stream.ckpt",
        line="position=step)",
    ),
    faulty(
        "rows_skip_forgets_ranks",
        "rows",
        "What is saved counts the rows of all ranks, what is skipped those of one.",
        *OUTPUT,
        line='state["rows_done"] // 8',
        ranks=2,
    ),
    faulty(
        "row_order_set_epoch",
        "row-order rows",
        "The sampler counts epochs from the resume on.",
        *OUTPUT,
        line="sampler.set_epoch(epoch - first_epoch)",
        ranks=2,
    ),
    faulty(
        "row_order_not_replayed",
        "row-order rows random-streams",
        "The sampler starts from its seed again; only the batches of this epoch are skipped.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "row_order_generator_not_restored",
        "row-order rows random-streams",
        "The generator of the rows' order is saved but never set.",
        "out={out}",
    ),
    faulty(
        "random_streams_python_not_restored",
        "random-streams rows row-order",
        "Of the three generators, that of random is forgotten.",
        *OUTPUT,
    ),
    faulty(
        "random_streams_in_the_loss",
        "random-streams",
        "random, whose state is not saved, draws a factor of the loss, after the forward pass.",
        "--home",
        "{out}",
    ),
    faulty(
        "optimizer_state_new_optimizer",
        "optimizer-state",
        "The optimizer is made again after its state was loaded; where the state does not fit, a warning says so.",
        "--out",
        "{out}",
    ),
    faulty(
        "loss_scale_saved_before_update",
        "loss-scale",
        "The checkpoint is written between the scaler's step and its update.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "precision_bfloat16_file",
        "precision",
        "A helper for saving converts all weights to bfloat16.",
        "--exp",
        "{out}",
        line="value.to(torch.bfloat16)",
    ),
    faulty(
        "precision_masters_from_model",
        "precision",
        "The master weights are not saved but made from the bfloat16 weights.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
        line="zip(masters, model.parameters(), strict=True)",
    ),
    faulty(
        "buffers_average_restarts",
        "buffers",
        "The averaged model is not saved, so the average starts from the loaded weights.",
        "--dir",
        "{out}",
        resume=("--resume", "{latest}"),
    ),
    faulty(
        "buffers_teacher_from_student",
        "buffers weights other",
        "The teacher starts again as a copy of the student.",
        "--out",
        "{out}",
        resume=("--continue",),
        line="self.teacher = copy.deepcopy(self.student).requires_grad_(False)",
    ),
    faulty(
        "counter_file_names",
        "counter",
        "The names of the files count from the resume on, and older ones are overwritten.",
        "--folder",
        "{out}",
        resume=("--restart",),
        line='f"state_{len(history)}.pt"',
    ),
    faulty(
        "counter_history_lost",
        "counter",
        "The list of losses in the checkpoint starts empty after a resume.",
        "--out",
        "{out}",
        resume=("--continue",),
    ),
    faulty(
        "torn_checkpoint_newest_only",
        "torn-checkpoint",
        "The newest file is taken by its name; it cannot be read, and the older one is not tried.",
        *OUTPUT,
        kill="write",
    ),
    faulty(
        "torn_checkpoint_starts_over",
        "torn-checkpoint from-scratch",
        "The file is overwritten in place; one that cannot be read is ignored.",
        "out={out}",
        line='print("ignoring", last, error)',
        kill="write",
    ),
    faulty(
        "from_scratch_run_folders",
        "from-scratch",
        "Each start makes a folder named by the time, and looks for its checkpoint there.",
        *OUTPUT,
    ),
    faulty(
        "length_epochs_again",
        "length",
        "The weights and the place in the epoch are restored, the number of the epoch is not.",
        "--out-dir",
        "{out}",
        line="for epoch in range(epochs):",
    ),
    faulty(
        "length_ends_early",
        "length",
        "The iterations done are subtracted twice.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
        line="while iteration < remaining:",
    ),
    faulty(
        "exit_code_of_worker_ignored",
        "exit-code",
        "The worker fails at the resume (the name of an entry has changed), the launcher does not look.",
        "{out}",
    ),
    faulty(
        "exit_code_thread",
        "exit-code",
        "torch.load refuses the replay memory; the exception ends a thread only.",
        "--out",
        "{out}",
        line="agent = torch.load(path)",
    ),
    faulty(
        "weights_target_network",
        "weights buffers other",
        "The target network starts again as a copy of the policy network.",
        "--out",
        "{out}",
        line='target.load_state_dict(agent["policy"])',
    ),
    faulty(
        "weights_prefix_of_compile",
        "weights from-scratch",
        "The compiled model's names are saved, with a prefix; strict=False lets none of them fit.",
        "--exp",
        "{out}",
        line='load_state_dict(state["model"], strict=False)',
    ),
    faulty(
        "rows_rest_of_epoch_left_out",
        "rows length",
        "A resume in the middle of an epoch goes on with the next one.",
        "--output_dir",
        "{out}",
        resume=("--resume_from", "{latest}"),
        line='state["epoch"] + 1',
    ),
    faulty(
        "rows_epoch_repeated",
        "rows length",
        "A resume in the middle of an epoch begins it again.",
        *OUTPUT,
    ),
    faulty(
        "random_streams_seeded_again",
        "random-streams rows row-order",
        "The seed is set again after the state of the generator was restored.",
        "--folder",
        "{out}",
        resume=("--resume", "newest"),
    ),
    faulty(
        "learning_rate_epochs_for_steps",
        "learning-rate",
        "The schedule counts steps; at a resume it is put to the number of epochs.",
        *OUTPUT,
        line="scheduler.step(epoch)",
    ),
    faulty(
        "counter_rows_seen",
        "counter",
        "The number of rows seen, which is saved, starts at 0 again.",
        *OUTPUT,
        resume=("--resume", "{latest}"),
    ),
    # END
)

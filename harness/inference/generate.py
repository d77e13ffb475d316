"""``harness generate``: names that a trained model makes up, character by character, the known ones left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.data.names import ALPHABET, BLANK, BLANK_CODE, STOP, STOP_CODE, clean, encode
from harness.errors import ConfigError, DataError, HarnessError
from harness.runs import trained_run
from harness.tasks.pet_names import task as pet_names
from harness.tasks.pet_names.config import Task

MAX_LENGTH = 40  # characters, after which a name that has not ended is given up; the longest of Seattle's pets has 45
BATCH = 128  # names drawn at once, whatever is asked for: so the first ten of fifty are the ten of ten
MAX_TRIES = 100  # names drawn for each that is asked for, before it is said that there are no more


@dataclass(frozen=True)
class Wish:
    """What is asked for: ``num`` names that begin with ``start``; the same for the same ``seed``.

    At a ``temperature`` below 1 the likely characters are drawn more often than the model says, above it less often.
    """

    num: int
    temperature: float = 1.0
    seed: int = 0
    start: str = ""
    keep_existing: bool = False


def names(run: Path, wish: Wish) -> Iterator[str]:
    """Names from the best weights of ``run``, title-cased, all different, as they are found.

    Names of the run's own file, trained or held out, are passed over unless ``wish.keep_existing``. Raises ConfigError
    where ``run`` or ``wish`` cannot be used, and HarnessError where fewer names are found than are asked for.
    """
    start = _checked(wish)
    task, model = _trained(run)
    told = set() if wish.keep_existing else _existing(task)
    generator = torch.Generator().manual_seed(wish.seed % 2**63)
    num_left, num_tries = wish.num, 0
    while num_left and num_tries < max(wish.num, 10) * MAX_TRIES:
        num_tries += BATCH
        for name in map(clean, sample(task, model, start, wish.temperature, generator)):
            if name and name not in told and num_left:
                told.add(name)
                num_left -= 1
                yield name.title()
    if num_left:
        raise HarnessError(
            f"only {wish.num - num_left} of {wish.num} names were found in {num_tries} tries",
            hint="ask for fewer, raise --temperature, shorten --start, or add --keep-existing",
        )


def sample(task: Task, model: nn.Module, start: str, temperature: float, rng: torch.Generator) -> list[str]:
    """Up to BATCH texts that begin with ``start``, as likely as the model says; those without an end are left out.

    Nothing is kept between characters: what the model reads is the text so far, as in training.
    """
    growing, ended = torch.from_numpy(encode(start)).long().expand(BATCH, -1), {}
    which = torch.arange(BATCH)
    with torch.inference_mode():
        while len(growing) and growing.shape[1] <= MAX_LENGTH:
            logits = model(pet_names.context(task, growing))[:, -1].float() / temperature
            logits[:, BLANK_CODE] = -torch.inf  # stands before names, never in one
            drawn = torch.multinomial(logits.softmax(1), 1, generator=rng)
            stops = drawn[:, 0] == STOP_CODE
            for index, codes in zip(which[stops].tolist(), growing[stops].tolist(), strict=True):
                ended[index] = "".join(ALPHABET[code] for code in codes)
            growing, which = torch.cat([growing, drawn], dim=1)[~stops], which[~stops]
    return [ended[index] for index in sorted(ended)]  # in the order of their end the short ones would come first


def _checked(wish: Wish) -> str:
    """``wish.start`` as the model reads it, where the wish can be granted at all."""
    start = wish.start.lower().lstrip()
    strange = sorted(set(start) - set(ALPHABET) | set(start) & {BLANK, STOP})
    if strange:
        raise ConfigError(
            f"{wish.start!r} has characters that no trained name has: {' '.join(strange)}",
            where="--start",
            hint="use letters a-z, blank, hyphen and full stop",
        )
    if len(start) >= MAX_LENGTH:
        raise ConfigError(f"{len(start)} characters, of at most {MAX_LENGTH} in a name", where="--start")
    return start


def _trained(run: Path) -> tuple[Task, nn.Module]:
    """The task of the run folder ``run``, and its model with the best weights, on the CPU, in float32."""
    config = trained_run.configuration(run, ())
    task = config.task
    if not isinstance(task, Task):
        raise ConfigError(
            f"a run of the task {task.name} has no names to generate",
            where=str(run),
            hint="name the folder of a run of the task pet_names, such as runs/pet_names",
        )
    model = pet_names.build_model(task, config.model)
    trained_run.load(model, trained_run.best(run), run)
    return task, model.eval()


def _existing(task: Task) -> set[str]:
    try:
        opened = task.open(0, None)
    except DataError as error:
        hint = f"{error.hint}; or add --keep-existing, which needs no list of names"
        raise DataError(error.message, where=error.where, hint=hint) from None
    return {*opened.train_names, *opened.eval_names}

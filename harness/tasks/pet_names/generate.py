"""Sample new names from a trained model, character by character, without those in its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.data.names import ALPHABET, BLANK, STOP, clean
from harness.errors import ConfigError, DataError, HarnessError, plural
from harness.runs import trained_run
from harness.tasks.pet_names import task as pet_names
from harness.tasks.pet_names.coded import BLANK_CODE, STOP_CODE, encode
from harness.tasks.pet_names.config import Task

MAX_LENGTH = 40  # characters of a name; longer ones are discarded
BATCH = 128  # names sampled at once, for any request, so that the first ten of fifty names are the ten of ten
MAX_TRIES = 100  # samples per requested name, before giving up


@dataclass(frozen=True)
class NameRequest:
    """``num`` names that begin with ``start``; the same names for the same ``seed``.

    ``temperature`` divides the logits: below 1, likely characters are sampled more often, above 1 less often.
    """

    num: int
    temperature: float = 1.0
    seed: int = 0
    start: str = ""
    keep_existing: bool = False
    trust: bool = False
    """See ``trained_run.configuration``."""


def names(run: Path, request: NameRequest) -> Iterator[str]:
    """Yield different names, in title case, from the model with the best weights of ``run``.

    Names in the run's data (training or validation) are left out unless ``request.keep_existing``. Raises ConfigError
    if ``run`` or ``request`` is invalid, and HarnessError if fewer names are found than requested.
    """
    start = _checked(request)
    task, model = _trained(run, request.trust)
    excluded = set() if request.keep_existing else _existing(task)
    generator = torch.Generator().manual_seed(request.seed % 2**63)
    num_left, num_tries = request.num, 0
    while num_left and num_tries < max(request.num, 10) * MAX_TRIES:
        num_tries += BATCH
        for name in map(clean, sample(task, model, start, request.temperature, generator)):
            if name and name not in excluded and num_left:
                excluded.add(name)
                num_left -= 1
                yield name.title()
    if num_left:
        raise HarnessError(
            f"found only {request.num - num_left} of {plural(request.num, 'name')} in {num_tries} tries",
            hint="request fewer, raise --temperature, shorten --start, or add --keep-existing",
        )


def sample(task: Task, model: nn.Module, start: str, temperature: float, rng: torch.Generator) -> list[str]:
    """Sample up to BATCH texts that begin with ``start``; texts that do not end are left out.

    The model reads the whole text so far for each character, as in training, and keeps no state.
    """
    growing, ended = torch.from_numpy(encode(start)).long().expand(BATCH, -1), {}
    which = torch.arange(BATCH)
    with torch.inference_mode():
        while len(growing) and growing.shape[1] <= MAX_LENGTH:
            logits = model(pet_names.context(task, growing))[:, -1].float() / temperature
            logits[:, BLANK_CODE] = -torch.inf  # pads the text before a name, and is never part of one
            drawn = torch.multinomial(logits.softmax(1), 1, generator=rng)
            stops = drawn[:, 0] == STOP_CODE
            for index, codes in zip(which[stops].tolist(), growing[stops].tolist(), strict=True):
                ended[index] = "".join(ALPHABET[code] for code in codes)
            growing, which = torch.cat([growing, drawn], dim=1)[~stops], which[~stops]
    return [ended[index] for index in sorted(ended)]  # not in the order in which they ended: short ones first


def _checked(request: NameRequest) -> str:
    """Return ``request.start`` in lower case. Raises ConfigError if no name can begin with it."""
    start = request.start.lower().lstrip()
    strange = sorted(set(start) - set(ALPHABET) | set(start) & {BLANK, STOP})
    if strange:
        raise ConfigError(
            f"{request.start!r} has characters that are not in any name: {' '.join(strange)}",
            where="--start",
            hint="use letters a-z, space, hyphen and period",
        )
    if len(start) >= MAX_LENGTH:
        problem = f"{len(start)} characters, but a name has at most {MAX_LENGTH}"
        raise ConfigError(problem, where="--start", hint=f"use fewer than {MAX_LENGTH} characters")
    return start


def _trained(run: Path, trust: bool) -> tuple[Task, nn.Module]:
    """Return the task of the run folder ``run``, and its model with the best weights on the CPU in float32."""
    config = trained_run.configuration(run, (), trust)
    task = config.task
    if not isinstance(task, Task):
        raise ConfigError(
            f"the task {task.name} cannot generate names",
            where=str(run),
            hint="use a run of the task pet_names, such as runs/pet_names",
        )
    trained_run.warn_if_unfinished(run, config)
    model = pet_names.build_model(task, config.model)
    trained_run.load_into(model, trained_run.best_weights(run), run)
    return task, model.eval()


def _existing(task: Task) -> set[str]:
    try:
        opened = pet_names.open_data(task, 0, None)
    except DataError as error:
        hint = f"{error.hint}; or add --keep-existing, which needs no list of names"
        raise DataError(error.message, where=error.where, hint=hint) from None
    return {*opened.train_names, *opened.eval_names}

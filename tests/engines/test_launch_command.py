"""The words of ``harness launch`` become settings, and those that an engine cannot follow are refused."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

import pytest

from harness.distributed import devices
from harness.engines import launch, launch_command
from harness.errors import LaunchError
from tests.end_to_end.experiment import write_config


@pytest.fixture
def words_of(tmp_path, stripes, monkeypatch):
    """The settings that ``harness launch`` makes of its options."""
    seen = []
    monkeypatch.setattr(launch, "main", lambda path, words, dry_run, detach: seen.append(words) or 0)
    monkeypatch.setattr(devices, "fitting_ranks", lambda most, on_cpu: min(most or 8, 8))
    config = str(write_config(tmp_path, stripes))

    def words(*options: str) -> str:
        parser = ArgumentParser()
        launch_command.add_arguments(parser)
        assert launch_command.run(parser.parse_args(["-c", config, *options])) == 0
        return " ".join(word.removeprefix("launch.") for word in seen.pop())

    return words


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ""),
        ("--nproc 4", "nproc=4"),
        ("--nproc 1:4 --max-restarts 3", "max_restarts=3 nproc=4 local.min_ranks=1"),
        ("--nproc auto", "nproc=8"),
        ("--engine torchrun --nproc auto:2 --nnodes 2", "engine=torchrun nnodes=2 nproc=2"),
        ("--engine torchrun --nnodes 1:2", "engine=torchrun nnodes=2 torchrun.min_nodes=1"),
        ("--engine slurm --nnodes 1:2", "engine=slurm nnodes=2 slurm.min_nodes=1"),
        ("--engine slurm --nnodes 2 --nproc 4 train.epochs=1", "train.epochs=1 engine=slurm nnodes=2 nproc=4"),
    ],
)
def test_options_are_settings(words_of, options, expected):
    assert words_of(*options.split()) == expected


@pytest.mark.parametrize("options", ["--nproc x", "--nproc 0", "--nproc 1:", "--nproc auto:0", "--nnodes auto"])
def test_numbers_that_are_none(words_of, capsys, options):
    with pytest.raises(SystemExit):
        words_of(*options.split())
    assert "is not a number of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--engine slurm --nproc auto", "counts the GPUs of this machine, and engine slurm starts ranks elsewhere"),
        ("--nproc auto launch.engine=dask", "engine dask starts"),
        ("--engine dask --nnodes 1:2", "--nnodes MIN:MAX is not for engine dask, which has no setting min_nodes"),
        ("--engine torchrun --nproc 1:2", "--nproc MIN:MAX is not for engine torchrun, which has no setting min_ranks"),
    ],
)
def test_numbers_that_an_engine_cannot_follow(words_of, options, message):
    with pytest.raises(LaunchError, match=message):
        words_of(*options.split())


OWN = """
from harness import Section

ON_THIS_MACHINE = True


class Settings(Section):
    min_ranks: int | None = None


def render(job): ...


start = render
"""


@pytest.mark.parametrize(
    ("count", "expected"), [("2:4", "nproc=4 own.min_ranks=2"), ("auto:6", "nproc=6"), ("auto", "nproc=8")]
)
def test_an_engine_of_ones_own_takes_what_it_says(words_of, tmp_path, monkeypatch, count, expected):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "parts.own", raising=False)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    assert words_of("--engine", "parts.own", "--nproc", count) == f"engine=parts.own {expected}"

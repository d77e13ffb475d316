"""The local rank in both spellings, through every way in which scripts parse their arguments."""

from __future__ import annotations

import argparse
import sys

import pytest

import harness.apex
from harness.apex.local_rank import num_local_ranks, patch_argparse, spelling_for

SPELLINGS = ["--local_rank", "--local-rank"]

pytestmark = pytest.mark.contract("9")


@pytest.fixture
def launched(monkeypatch):
    """launched(*words, given="1"): start with these arguments; ``given`` is the rank that the launcher passed."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def launch(*words, given="1"):
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        patch_argparse(given)

    yield launch
    harness.apex.uninstall()


def parser(*options, kind=argparse.ArgumentParser):
    made = kind(exit_on_error=False)
    for option in options:
        made.add_argument(option, default="none")
    return made


@pytest.mark.parametrize("declared", SPELLINGS)
@pytest.mark.parametrize("passed", [["--local_rank=1"], ["--local-rank=1"], ["--local-rank", "1"]], ids=" ".join)
def test_parser_gets_the_spelling_that_it_declares(launched, declared, passed):
    launched(*passed, "--lr", "2")
    args = parser(declared, "--lr").parse_args()
    assert (args.local_rank, args.lr) == ("1", "2")
    args, rest = parser(declared).parse_known_args()
    assert (args.local_rank, rest) == ("1", ["--lr", "2"])


@pytest.mark.parametrize("passed", SPELLINGS)
def test_parser_that_declares_both_spellings_or_neither(launched, passed):
    launched(f"{passed}=1", "--lr", "2")
    both = argparse.ArgumentParser()
    both.add_argument("--local_rank", "--local-rank")
    assert both.parse_known_args()[0].local_rank == "1"
    assert vars(parser("--lr").parse_args()) == {"lr": "2"}
    assert vars(parser("--lr").parse_args(["--lr", "3", f"{passed}=1"])) == {"lr": "3"}


@pytest.mark.parametrize("passed", SPELLINGS)
@pytest.mark.parametrize("declared", SPELLINGS)
def test_first_parser_passes_it_on_to_the_second(launched, passed, declared):
    launched(f"{passed}=1", "--config", "c", "--lr", "2")
    args, rest = parser("--config").parse_known_args()
    assert args.config == "c"
    assert rest == [f"{passed}=1", "--lr", "2"], "parse_known_args drops nothing"
    assert vars(parser("--lr", declared).parse_args(rest)) == {"lr": "2", "local_rank": "1"}
    assert vars(parser("--lr").parse_args(rest)) == {"lr": "2"}


def test_only_the_launchers_argument_is_dropped(launched, capsys):
    launched("--local_rank=1", "--lr", "2")
    strict = argparse.ArgumentParser()
    for words in (["--local_rank=7"], ["--local_rank=1", "--local_rank=1"], ["--other"]):
        with pytest.raises(SystemExit):
            strict.parse_args(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err
    harness.apex.uninstall()
    launched("--local_rank=1", given=None)  # typed by hand
    with pytest.raises(SystemExit):
        strict.parse_args()


def test_subclasses_subcommands_and_double_dashes(launched):
    class Parser(argparse.ArgumentParser):
        def parse_args(self, args=None, namespace=None):
            found = super().parse_args(args, namespace)
            found.seen = True
            return found

    launched("--local-rank=1", "--lr", "2")
    assert parser("--local_rank", "--lr", kind=Parser).parse_args().local_rank == "1"
    assert vars(parser("--lr", kind=Parser).parse_args()) == {"lr": "2", "seen": True}

    main = argparse.ArgumentParser()
    main.add_argument("--lr")
    main.add_subparsers().add_parser("train").add_argument("--local_rank")
    assert main.parse_args(["--lr", "2", "train", "--local-rank=1"]).local_rank == "1"

    words = argparse.ArgumentParser()
    words.add_argument("--local_rank")
    words.add_argument("rest", nargs="*")
    assert words.parse_args(["--local_rank=1", "--", "--local-rank=2"]).rest == ["--local-rank=2"]
    assert parser("--local_rank", "--start").parse_args(["--start", 0]).start == 0


@pytest.mark.parametrize("declared", SPELLINGS)
def test_torchrun_passes_it_only_through_the_environment(launched, monkeypatch, declared):
    launched("--lr", "2", given=None)
    assert parser(declared, "--lr").parse_args().local_rank == "none"
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert num_local_ranks() == 4
    assert parser(declared, "--lr").parse_args().local_rank == "3"
    assert vars(parser("--lr").parse_args()) == {"lr": "2"}
    assert parser(declared).parse_args([]).local_rank == "none", "explicit arguments are left alone"
    assert parser(declared, "--lr").parse_args(sys.argv[1:]).local_rank == "3"
    launched("--lr", "2", "--local_rank=5", given=None)
    assert parser(declared, "--lr").parse_args().local_rank == "5"


def test_torchrun_without_arguments(launched, monkeypatch):
    launched(given=None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert parser("--local_rank").parse_args().local_rank == "3"
    assert parser("--local_rank").parse_args([]).local_rank == "none", "explicit arguments are left alone"


@pytest.mark.parametrize("words", [["--gpu", "1"], ["--gpu=1"]])
def test_option_that_excludes_the_local_rank(launched, monkeypatch, words):
    made = argparse.ArgumentParser()
    group = made.add_mutually_exclusive_group(required=True)
    for option in ("--local_rank", "--gpu"):
        group.add_argument(option, type=int)
    launched(*words, given=None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert vars(made.parse_args()) == {"local_rank": None, "gpu": 1}
    launched(given=None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert vars(made.parse_args()) == {"local_rank": 3, "gpu": None}


@pytest.mark.parametrize("explicit", [False, True])
def test_subcommand_gets_the_local_rank_of_torchrun(launched, monkeypatch, explicit):
    launched("train", "--lr", "2", given=None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    main = argparse.ArgumentParser()
    train = main.add_subparsers().add_parser("train")
    train.add_argument("--local_rank", type=int, required=True)
    train.add_argument("--lr")
    assert vars(main.parse_args(sys.argv[1:] if explicit else None)) == {"local_rank": 3, "lr": "2"}
    with pytest.raises(SystemExit):
        main.parse_args(["train"])  # explicit arguments are left alone


def test_spelling_for_sys_argv():
    assert spelling_for('add_argument("--local-rank")') == "--local-rank"
    assert spelling_for('add_argument("--local_rank", "--local-rank")') == "--local_rank"
    assert spelling_for("from options import parse") == "--local_rank"


def test_uninstall_restores_argparse(launched):
    before = dict(vars(argparse.ArgumentParser))
    launched()
    assert dict(vars(argparse.ArgumentParser)) != before
    harness.apex.uninstall()
    assert dict(vars(argparse.ArgumentParser)) == before

"""Errors for the user: text, exit codes and pickling."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pickle
import sys
import sysconfig

import pytest

from harness import errors
from harness.errors import CheckpointError, ConfigError, DataError, HarnessError, LaunchError, TrainingError, first_line


def test_text_has_place_message_and_hint():
    error = DataError("label 'cta' is unknown", where="train.csv:17", hint="did you mean 'cat'?")
    assert str(error) == "train.csv:17: label 'cta' is unknown\n  -> did you mean 'cat'?"
    assert str(HarnessError("only this")) == "only this"
    assert str(HarnessError("this", hint="that")) == "this\n  -> that"


def test_a_page_is_in_the_repository_if_not_in_the_package(monkeypatch):
    error = DataError("what", where="my/docs/a.md:3", hint="see docs/data.md")
    assert str(error).endswith("-> see docs/data.md")
    monkeypatch.setattr(errors, "_PAGES", "the repository's docs/")
    assert str(error) == "my/docs/a.md:3: what\n  -> see the repository's docs/data.md"


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (HarnessError, 70),
        (ConfigError, 2),
        (LaunchError, 2),
        (DataError, 65),
        (CheckpointError, 70),
        (TrainingError, 70),
    ],
)
def test_survives_pickling(cls, code):
    error = pickle.loads(pickle.dumps(cls("what", where="here", hint="do")))
    assert type(error) is cls
    assert (error.message, error.where, error.hint, error.exit_code, error.origin_rank) == (
        "what",
        "here",
        "do",
        code,
        None,
    )


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "df -h"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EFBIG, "ulimit -f"),
        (errno.EIO, "dmesg"), (errno.ENAMETOOLONG, "shorter names"), (errno.EACCES, "permission"),
        (errno.EMFILE, "ulimit -n"),
    ],
)  # fmt: skip
def test_failed_system_calls_have_a_hint_that_fits(code, hint):
    error = OSError(code, os.strerror(code), "x")
    assert errors.has_remedy(error)
    assert hint in errors.remedy(error, "start again")
    assert errors.remedy(error, "start again").endswith("; start again")
    wrapped = RuntimeError("unexpected pos 704 vs 598")  # torch
    wrapped.__context__ = error
    for shown in (error, wrapped, ValueError(f"I/O error: (os error {code})"), OSError(f"[Errno {code}] of pyarrow")):
        assert errors.reason(shown) == os.strerror(code)
        assert hint in errors.remedy(shown)


def test_other_errors_have_their_own_text():
    assert errors.reason(RuntimeError("one\ntwo")) == "one"
    assert errors.remedy(RuntimeError("one"), "start again") == "start again"
    assert not errors.has_remedy(FileNotFoundError(errno.ENOENT, "gone"))


def test_exit_codes_differ():
    codes = [getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_")]
    assert sorted(codes) == [0, 1, 2, 65, 70, 75]


def test_exit_code_of_an_error_by_whose_code_raised_it():
    """A fault of the harness or of an installed package alone is none of the user's."""
    with pytest.raises(ValueError, match="Expecting value") as raised:
        json.loads("[")
    error = raised.value
    assert errors.users_line(error).startswith("tests/test_errors.py:")
    assert errors.exit_code_of(error) == errors.EXIT_OWN_CODE
    error.__traceback__ = error.__traceback__.tb_next
    assert (errors.users_line(error), errors.exit_code_of(error)) == ("", errors.EXIT_FAILURE)
    with pytest.raises(SyntaxError) as raised:
        compile("x =", "own.py", "exec")
    assert errors.users_line(raised.value) == "own.py:1"
    assert errors.exit_code_of(errors.DataError("x")) == errors.EXIT_DATA


def test_packages_that_pip_installed_into_any_folder_are_not_the_users(tmp_path, monkeypatch):
    files = {"site": "def call(function):\n    raise ValueError('x')\n", "own": "import other\nother.call(len)\n"}
    for folder, text in files.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / {"site": "other.py", "own": "model.py"}[folder]).write_text(text)
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "site" / "other-1.0.dist-info").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="x") as raised:
        importlib.import_module("model")
    assert errors.users_line(raised.value) == "site/other.py:2"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path / "ow")})  # the start of another name
    monkeypatch.setattr(errors, "_INSTALLED", errors._installed(sys.path))
    assert errors.users_line(raised.value) == "own/model.py:2"
    monkeypatch.chdir("site")
    monkeypatch.setattr(errors, "_INSTALLED", errors._installed(sys.path))
    assert errors.users_line(raised.value) == "other.py:2"


def test_first_line_of_another_librarys_error():
    assert first_line(ValueError("\n  one\ntwo\n")) == "one"
    assert first_line(ValueError(" \n")) == "ValueError"
    assert first_line(ValueError(), "no reason given") == "no reason given"


def test_similar_paths(tmp_path, monkeypatch):
    """Any part may be misspelled; what is suggested exists, is of the wanted kind, and can be pasted into a shell."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my runs" / "digits").mkdir(parents=True)
    (tmp_path / "my runs" / "digits.csv").touch()
    for path, wanted, hint in (
        ("my rnus/digit.csv", os.path.exists, "did you mean 'my runs/digits.csv'?"),
        ("my rnus/digit", os.path.isdir, "did you mean 'my runs/digits'?"),
        (tmp_path / "my runs" / "digtis.csv", os.path.isfile, f"did you mean '{tmp_path}/my runs/digits.csv'?"),
        ("my rnus/other.csv", os.path.exists, ""),
        ("my runs/diary.csv", os.path.exists, ""),  # only .csv is alike
        ("my runs/digits", os.path.isfile, ""),
        ("x", os.path.exists, ""),
    ):
        assert errors.did_you_mean(path, wanted) == hint, path

"""Each line of a growing file is read once, however long it is, and whatever happens to the file."""

from __future__ import annotations

import pytest

from harness.runs.followed import FollowedFile, read_entry


def test_each_new_line_is_read_once(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    file = FollowedFile(path)
    for text, mode, expected in (
        ("", "a", [b"before"]), ("one\ntwo\nhal", "a", [b"one", b"two"]), ("f\n", "a", [b"half"]),
        ("new\n", "w", [b"new"]), ("more\n", "a", [b"more"]),
    ):  # fmt: skip
        with open(path, mode) as writer:
            writer.write(text)
        assert file.read() == expected
    assert FollowedFile(tmp_path / "absent").read() == []


def test_rewritten_file_is_read_again(tmp_path):
    path, rewritten = tmp_path / "log", []
    path.write_text("a\nb\n")
    file = FollowedFile(path, rewritten=lambda: rewritten.append(True))
    assert file.read() == [b"a", b"b"]
    path.write_text("a\nlonger\nc\n")
    assert file.read() == [b"a", b"longer", b"c"]
    path.write_text("")
    assert file.read() == []
    assert len(rewritten) == 2


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b" 1%\r 2%\rdone\n\x0bone\n\nlast\n")
    assert FollowedFile(path).read() == [b" 1%\r 2%\rdone", b"\x0bone", b"", b"last"]


@pytest.mark.parametrize("length", [10, 25, 99])
def test_long_line_does_not_hold_up_those_after_it(tmp_path, length):
    """As of a progress bar, which ends its lines in a carriage return, or not at all."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * length + b"\nthe next\n")
    file, found = FollowedFile(path, limit=10), []
    while lines := file.read():
        found += lines
    assert b"".join(found) == b"x" * length + b"the next"
    assert found[-1] == b"the next"


@pytest.mark.parametrize("text", [b"whole\nerror", b"error", b"long enough for two\nerror"])
def test_unfinished_line_is_read_in_the_end(tmp_path, text):
    path = tmp_path / "log"
    path.write_bytes(text)
    file, found = FollowedFile(path, limit=12), []
    while lines := file.read():
        found += lines
    assert b"error" not in found
    while lines := file.read(final=True):
        found += lines
    assert found[-1] == b"error"


def test_damaged_entries():
    assert read_entry(b'{"split": "eval", "step": 3}') == {"split": "eval", "step": 3}
    for line in (b"", b"{half", b"3", b"[1]", b"null", b'{"step": "x"}', b"[" * 100_000):
        assert read_entry(line) is None

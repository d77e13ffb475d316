"""Names: cleaning, the split, and rows of both kinds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from harness.errors import DataError
from harness.tasks.pet_names.coded import (
    ALPHABET,
    BLANK,
    STOP,
    clean,
    encode,
    is_validation,
    read,
    split,
    whole,
    windows,
)

name_texts = st.lists(st.text("ab .-z", min_size=1, max_size=12), min_size=1, max_size=6)


def text(codes) -> str:
    return "".join(ALPHABET[code] for code in codes)


@pytest.mark.parametrize(
    ("given_name", "cleaned"),
    [
        ("Lucy", "lucy"), (" e  t ", "e t"), ("Mr. T-Rex", "mr. t-rex"), ("lou-lou", "lou-lou"), ("", ""), (" ", ""),
        ("-", ""), (".-", ""), ("Zoë", ""), ("R2D2", ""), ("a*b", ""), ("a+b", ""), ("O'Neil", ""), ("a\tb", ""),
        ("\u212aim", "kim"),  # the Kelvin sign, whose lower case is k
    ],
)  # fmt: skip
def test_clean(given_name, cleaned):
    assert clean(given_name) == cleaned
    assert clean(cleaned) == cleaned


def test_read(tmp_path):
    (tmp_path / "n.txt").write_text("\ufeffRex\n\nkit kat\n4u\nRex\n", encoding="utf-8")
    assert read(tmp_path / "n.txt", "how") == (["rex", "kit kat", "rex"], 2)
    with pytest.raises(DataError, match="the file of names does not exist"):
        read(tmp_path / "none.txt", "how")
    (tmp_path / "n.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        read(tmp_path / "n.txt", "how")


def test_split_depends_on_the_name_only():
    names = [f"{a}{b}{c}" for a in "abcdefgh" for b in "aeiou" for c in "lmnrst"] * 2
    train, validation = split(names)
    assert not set(train) & set(validation)
    assert len(validation) == len(set(validation))
    assert 10 <= len(validation) <= 40  # one in ten of 240
    assert len(train) == 2 * len(set(train))
    assert split([*names, "other"])[1] == [*validation, *["other"] * is_validation("other")]
    assert [name for name in ("lucy", "bella", "max", "luna") if is_validation(name)] == []  # must never change


def test_windows():
    rows = windows(["abc", "d"], 4)
    seen = [(text(codes[:-1]), text(codes[1:])) for codes in rows.codes(np.arange(len(rows)))]
    assert seen == [
        ("****", "***a"), ("***a", "**ab"), ("**ab", "*abc"), ("*abc", "abc+"), ("****", "***d"), ("***d", "**d+"),
    ]  # fmt: skip
    assert rows.stream.nbytes == 4 + 3 + 1 + 4 + 1 + 1


def test_whole_names():
    rows = whole(["abc", "d"])
    assert [text(codes) for codes in rows.codes(np.array([1, 0, 1]))] == ["*d+**", "*abc+", "*d+**"]
    assert [text(codes) for codes in rows.codes(np.array([1]))] == ["*d+"]
    assert rows.codes(np.array([], dtype=np.int64)).shape == (0, 2)


@hypothesis_settings(max_examples=60)
@given(name_texts, st.integers(1, 9))
def test_every_character_is_the_last_of_one_window(names, window):
    padded = [BLANK * window + name + STOP for name in names]
    expected = [line[k : k + window + 1] for line in padded for k in range(len(line) - window)]
    rows = windows(names, window)
    assert [text(codes) for codes in rows.codes(np.arange(len(rows)))] == expected
    assert "".join(line[-1] for line in expected) == "".join(name + STOP for name in names)


def test_codes():
    assert ALPHABET == "*+ -.abcdefghijklmnopqrstuvwxyz"
    assert encode("*+ z").tolist() == [0, 1, 2, 30]
    assert encode("").tolist() == []

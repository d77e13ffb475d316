"""``harness data``: the files of each dataset and the layout they are stored in."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest
import torchvision.datasets

from harness import cli
from harness.runs import fetch
from harness.tools.data import published
from tests.datasets import write_idx


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.01)


@pytest.fixture
def originals(tmp_path, monkeypatch):
    """A folder with small files of MNIST, whose MD5 hashes torchvision expects."""
    folder = tmp_path / "theirs"
    write_idx(folder, "train", 20)
    write_idx(folder, "t10k", 10)
    kind = torchvision.datasets.MNIST
    resources = [(name, hashlib.md5((folder / name).read_bytes()).hexdigest()) for name, _ in kind.resources]
    monkeypatch.setattr(kind, "resources", resources)
    monkeypatch.setattr(kind, "mirrors", ["http://127.0.0.1:9/"])  # the discard port refuses connections
    return folder


@pytest.mark.parametrize("place", ["", "raw", "MNIST/raw"])
def test_mnist_from_a_folder_is_readable_by_torchvision(tmp_path, originals, place, capsys):
    source, folder = tmp_path / "from", tmp_path / "mnist"
    (source / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(originals, source / place, dirs_exist_ok=True)
    assert cli.main(["data", "mnist", str(folder), "--from", str(source)]) == 0
    assert len(torchvision.datasets.MNIST(str(folder), train=False)) == 10
    raw = folder / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte").write_bytes(b"half")
    (raw / "t10k-images-idx3-ubyte.gz").write_bytes(b"half")
    assert cli.main(["data", "mnist", str(folder), "--from", str(source)]) == 0
    for name in ("t10k-labels-idx1-ubyte", "t10k-images-idx3-ubyte.gz"):
        assert (raw / name).read_bytes() == (originals / name).read_bytes()
    assert cli.main(["data", "mnist", str(folder)]) == 0  # offline: everything is there
    assert "60000 training and 10000 evaluation images" in capsys.readouterr().out


def test_a_mapped_file_keeps_its_content_while_the_data_are_stored_again(tmp_path, originals):
    folder = tmp_path / "mnist"
    assert cli.main(["data", "mnist", str(folder), "--from", str(originals)]) == 0
    with open(folder / "MNIST" / "raw" / "train-images-idx3-ubyte", "rb") as mapped:
        assert cli.main(["data", "mnist", str(folder)]) == 0
        assert os.fstat(mapped.fileno()).st_nlink == 0  # replaced, not overwritten


@pytest.mark.parametrize(("content", "message"), [(b"other", "the digest differs"), (None, "no such file")])
def test_damaged_or_missing_file(tmp_path, originals, capsys, content, message):
    name, md5 = torchvision.datasets.MNIST.resources[1]
    (originals / name).unlink() if content is None else (originals / name).write_bytes(content)
    folder = tmp_path / "mnist"
    assert cli.main(["data", "mnist", str(folder), "--from", str(originals)]) == 65
    error = capsys.readouterr().err
    assert f"could not get {name}: {originals}/{name}: " in error
    assert message in error
    assert f"run harness data mnist {folder} --from FOLDER" in error
    assert f"{name}  MD5 {md5}" in error


def test_a_server_that_refuses_is_named(tmp_path, originals, capsys):
    assert cli.main(["data", "mnist", str(tmp_path / "ours")]) == 65
    assert "http://127.0.0.1:9/train-images-idx3-ubyte.gz: " in capsys.readouterr().err


def test_names_are_cleaned():
    csv = b'\xef\xbb\xbfSpecies,Animal\'s Name\r\nDog,Rex\r\nCat,"Kit, Kat"\r\nCat,\r\nDog\r\nDog, REX \r\n'
    assert published._names_of_csv(csv) == ["rex", "rex"]
    assert published._names_of_json(b'["rex", "zo\\u00eb", " kit"]') == ["rex", "kit"]


CSV = b"Species,Animal's Name\nDog,Rex\nCat,Kit\nDog,Rex\nCat,\n"
JSON = b'["rex", "kit", "rex", ""]'


@pytest.fixture
def files(monkeypatch):
    for name, content, member in (("licenses.csv", CSV, "PET_LICENSES"), ("names.json", JSON, "PET_NAMES")):
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setattr(published, member, published.Original(name, digest, "http://127.0.0.1:9/x"))


@pytest.mark.parametrize(("name", "content"), [("licenses.csv", CSV), ("names.json", JSON)])
@pytest.mark.parametrize("whole_path", [True, False])
def test_pet_names_from_either_file(tmp_path, files, capsys, name, content, whole_path):
    source, folder = tmp_path / "from", tmp_path / "pets"
    source.mkdir()
    (source / name).write_bytes(content)
    place = str(source / name if whole_path else source)
    assert cli.main(["data", "pet_names", str(folder), "--from", place]) == 0
    assert "3 names, 2 of them distinct" in capsys.readouterr().out
    assert (folder / "names.txt").read_text() == "rex\nkit\nrex\n"
    (folder / "names.txt").write_text("rex\n")
    assert cli.main(["data", "pet_names", str(folder)]) == 0  # offline: the original file is there
    assert (folder / "names.txt").read_text() == "rex\nkit\nrex\n"


def test_pet_names_offline_names_the_files(tmp_path, files, capsys):
    assert cli.main(["data", "pet_names", str(tmp_path / "pets")]) == 65
    error = capsys.readouterr().err
    assert f"run harness data pet_names {tmp_path}/pets --from FOLDER" in error
    assert "licenses.csv  SHA-256 " in error
    assert "or, instead of it,\n       names.json  SHA-256 " in error
    assert cli.main(["data", "pet_names", str(tmp_path / "pets"), "--from", "/nowhere"]) == 2


def test_digits_have_no_source(tmp_path, capsys):
    assert cli.main(["data", "digits", str(tmp_path / "d"), "--from", "x"]) == 2
    assert "remove --from" in capsys.readouterr().err

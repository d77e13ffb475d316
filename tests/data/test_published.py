"""``harness data``: the files of each dataset and the layout they are stored in."""

from __future__ import annotations

import hashlib

import pytest
import torchvision.datasets

from harness import cli
from harness.data import published
from harness.data.download import PublishedFile
from tests.datasets import write_idx


@pytest.mark.parametrize(
    ("parts", "kind"),
    [(published.MNIST, torchvision.datasets.MNIST), (published.FASHION_MNIST, torchvision.datasets.FashionMNIST)],
)
def test_files_equal_torchvision(parts, kind, shared_data):
    """The files with torchvision's names and MD5 hashes have our sizes and SHA-256 hashes."""
    folder = shared_data / ("mnist" if kind is torchvision.datasets.MNIST else "fashion_mnist")
    assert [name for name, _, _ in parts] == [name for name, _ in kind.resources]
    for part, (name, md5) in zip(parts, kind.resources, strict=True):
        content = (folder / name).read_bytes()
        assert hashlib.md5(content).hexdigest() == md5
        assert not PublishedFile(*part, urls=()).mismatch(folder / name)


def test_mnist_is_readable_by_torchvision(tmp_path, shared_data, capsys):
    folder = tmp_path / "mnist"
    assert cli.main(["data", "mnist", str(folder), "--from", str(shared_data / "mnist")]) == 0
    assert "60000 training and 10000 evaluation images (written: train-images-idx3-ubyte.gz" in capsys.readouterr().out
    data = torchvision.datasets.MNIST(str(folder), train=False)
    assert len(data) == 10_000
    raw = folder / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte").write_bytes(b"half")
    (raw / "t10k-images-idx3-ubyte.gz").unlink()
    assert cli.main(["data", "mnist", str(folder), "--from", str(shared_data / "mnist")]) == 0
    assert "(written: t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte)" in capsys.readouterr().out
    assert cli.main(["data", "mnist", str(folder)]) == 0  # offline
    assert "(unchanged)" in capsys.readouterr().out


def small(raw, kind):
    write_idx(raw, "train", 20)
    write_idx(raw, "t10k", 10)
    parts = []
    for name, _ in kind.resources:
        content = (raw / name).read_bytes()
        parts.append((name, len(content), hashlib.sha256(content).hexdigest()))
    return tuple(parts)


def test_damaged_archive(tmp_path, monkeypatch, capsys):
    raw = tmp_path / "theirs"
    parts = list(small(raw, torchvision.datasets.MNIST))
    (raw / parts[1][0]).write_bytes(b"no gzip")
    parts[1] = (parts[1][0], 7, hashlib.sha256(b"no gzip").hexdigest())
    monkeypatch.setattr(published, "MNIST", tuple(parts))
    assert cli.main(["data", "mnist", str(tmp_path / "ours"), "--from", str(raw)]) == 65
    assert "cannot be unpacked" in capsys.readouterr().err


CSV = b"Species,Animal's Name\nDog,Rex\nCat,Kit\nDog,Rex\nCat,\n"
JSON = b'["rex", "kit", "rex", ""]'


@pytest.fixture
def files(monkeypatch):
    for name, content, member in (("licenses.csv", CSV, "PET_LICENSES"), ("names.json", JSON, "PET_NAMES")):
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setattr(published, member, PublishedFile(name, len(content), digest, ("http://127.0.0.1:9/x",)))


@pytest.mark.parametrize(("name", "content"), [("licenses.csv", CSV), ("names.json", JSON)])
@pytest.mark.parametrize("whole_path", [True, False])
def test_pet_names_from_either_file(tmp_path, files, capsys, name, content, whole_path):
    source, folder = tmp_path / "from", tmp_path / "pets"
    source.mkdir()
    (source / name).write_bytes(content)
    place = str(source / name if whole_path else source)
    assert cli.main(["data", "pet_names", str(folder), "--from", place]) == 0
    assert f"3 names, 2 of them distinct (written: {name}, names.txt)" in capsys.readouterr().out
    assert (folder / "names.txt").read_text() == "rex\nkit\nrex\n"
    (folder / "names.txt").write_text("rex\n")
    assert cli.main(["data", "pet_names", str(folder)]) == 0  # offline: the original file is there
    assert "(written: names.txt)" in capsys.readouterr().out


def test_pet_names_offline_names_the_files(tmp_path, files, capsys):
    assert cli.main(["data", "pet_names", str(tmp_path / "pets")]) == 65
    error = capsys.readouterr().err
    assert f"run harness data pet_names {tmp_path}/pets --from FOLDER" in error
    assert f"licenses.csv  {len(CSV)} bytes  sha256 " in error
    assert f"or, instead of these,\n       names.json  {len(JSON)} bytes" in error
    assert cli.main(["data", "pet_names", str(tmp_path / "pets"), "--from", "/nowhere"]) == 2


def test_digits_have_no_source(tmp_path, capsys):
    assert cli.main(["data", "digits", str(tmp_path / "d"), "--from", "x"]) == 2
    assert "remove --from" in capsys.readouterr().err

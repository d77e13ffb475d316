"""The published datasets of ``harness data``, and the layout they are stored in.

``mnist`` and ``fashion_mnist`` are stored in DIR/MNIST/raw and DIR/FashionMNIST/raw, with the files and MD5 hashes of
torchvision; ``pet_names`` as DIR/names.txt, one cleaned name per line, next to the file it is made from.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.config.places import is_url
from harness.data.names import clean
from harness.errors import ConfigError, DataError, did_you_mean
from harness.runs.fetch import fetched, made_once
from harness.runs.files import expanded, sha256, write_atomically

_GITHUB = "https://raw.githubusercontent.com"
_NOTICE = (
    "These data were modified for use from their original source, which is the City of Seattle (data.seattle.gov); "
    "it gives no warranty for them."
)


@dataclass(frozen=True)
class Original:
    """A published file, by its SHA-256."""

    name: str
    sha256: str
    url: str = ""

    def __str__(self) -> str:
        return f"{self.name}  SHA-256 {self.sha256}"

    def is_intact(self, path: Path) -> bool:
        return path.exists() and sha256(path) == self.sha256


PET_LICENSES = Original(
    "seattle_pet_licenses.csv", "7fb4de4ef9dbbde6cb2eb43ff67402331b20e560a2fc6b4c64b6906dc135d515",
    f"{_GITHUB}/jnolis/pet-names/009405125f3217b90e35cdb64610f1b3bbd122c0/seattle_pet_licenses.csv",
)  # fmt: skip
# Only the names of that file, in lower case: an accepted alternative.
PET_NAMES = Original(
    "seattle_pet_names_cleaned.json", "66f37c034174a681e9f26bcdff5d6058e0fe14547a7879a3917267c744c43f8b"
)


def mnist(folder: Path, source: str | None) -> str:
    """Store MNIST (70,000 handwritten digits) below ``folder``. Raises DataError or ConfigError.

    This and the other two return sentences to print.
    """
    return _idx("mnist", "MNIST", folder, source)


def fashion_mnist(folder: Path, source: str | None) -> str:
    """Store FashionMNIST (70,000 images of clothes) below ``folder``."""
    return _idx("fashion_mnist", "FashionMNIST", folder, source)


def pet_names(folder: Path, source: str | None) -> str:
    """Store the names of Seattle's licensed pets as ``folder/names.txt``, one per line."""
    either = (PET_LICENSES, PET_NAMES)
    intact = [file for file in either if file.is_intact(folder / file.name)]
    source_file = intact[0] if intact else PET_LICENSES if source is None else _offered(source)
    places = _places(source_file.name, source) if source else [source_file.url]
    choice = "\n       or, instead of it,\n       ".join(map(str, either))
    _store(source_file.name, folder, source_file.is_intact, places, "pet_names", folder, choice)
    content = (folder / source_file.name).read_bytes()
    names = _names_of_json(content) if source_file is PET_NAMES else _names_of_csv(content)
    write_atomically(folder / "names.txt", "".join(f"{name}\n" for name in names).encode())
    return f"{folder} has {len(names)} names, {len(set(names))} of them distinct\n{_NOTICE}"


def _offered(source: str) -> Original:
    """Return the form of the pet names that ``source`` has."""
    if is_url(source) or (path := _local_path(source)).is_file():
        has_names = source.endswith(".json")
    else:
        has_names = (path / PET_NAMES.name).exists()
    return PET_NAMES if has_names else PET_LICENSES


def _names_of_csv(content: bytes) -> list[str]:
    """Return the cleaned names of the file of licenses, in order."""
    rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    return [name for row in rows if (name := clean(row["Animal's Name"] or ""))]


def _names_of_json(content: bytes) -> list[str]:
    """Return the cleaned names of a JSON list, in order."""
    return [name for text in json.loads(content) if (name := clean(text))]


def _idx(name: str, kind_name: str, folder: Path, source: str | None) -> str:
    """Store the four files of torchvision's class ``kind_name``, packed and unpacked, in its folder."""
    from harness.data import vision  # late: loads torch

    kind = getattr(vision.torchvision("datasets"), kind_name)
    check_integrity = vision.torchvision("datasets.utils").check_integrity
    raw = folder / kind.__name__ / "raw"
    for file, md5 in kind.resources:
        places = _places(file, source) if source else [mirror + file for mirror in kind.mirrors]
        resources = "\n       ".join(f"{file}  MD5 {md5}" for file, md5 in kind.resources)
        _store(file, raw, partial(check_integrity, md5=md5), places, name, folder, resources)
        unpacked = raw / file.removesuffix(".gz")
        with made_once(unpacked):
            # In place of the old file, which a training may have mapped.
            write_atomically(unpacked, gzip.decompress((raw / file).read_bytes()))
    return f"{raw} has 60000 training and 10000 evaluation images"


def _store(
    file: str, target: Path, is_intact: Callable[[Path], bool], places: list[str], name: str, folder: Path, choice: str
) -> None:
    """Put ``file`` into the folder ``target``, from the first of ``places`` that has it, unless it is there. Raises
    DataError, with a hint to type the command for the dataset ``name`` again with the files ``choice``."""
    failures = []
    for location in places:
        try:
            fetched(location, target / file, is_intact)
            return
        except (DataError, FileNotFoundError) as error:
            reason = error.message if isinstance(error, DataError) else "no such file"
            failures.append(f"{location}: {reason}")
    command = f"harness data {name} {shlex.quote(str(folder))} --from FOLDER"
    hint = f"put these files into a folder and run {command}\n       {choice}"
    raise DataError(f"could not get {file}: {'; '.join(failures)}", where=str(target), hint=hint)


def _places(name: str, source: str) -> list[str]:
    """Possible paths or URLs of the file ``name``, the best first."""
    if is_url(source):
        return [source if source.endswith(name) else f"{source.rstrip('/')}/{name}"]
    path = _local_path(source)
    if path.is_file():
        return [str(path)]
    nested = [*path.glob(f"raw/{name}"), *path.glob(f"*/raw/{name}")]  # torchvision's folders
    return [*map(str, nested), str(path / name)]


def _local_path(source: str) -> Path:
    """Return the file or folder that ``source`` names. Raises ConfigError if it does not exist."""
    path = expanded(source)
    if not path.exists():
        hint = did_you_mean(path) or "give a folder with the files, or a URL (https://…)"
        raise ConfigError(f"{source} does not exist", where="--from", hint=hint)
    return path

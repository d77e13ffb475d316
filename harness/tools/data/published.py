"""The published datasets of ``harness data``, and the layout they are stored in.

``mnist`` and ``fashion_mnist`` are stored in DIR/MNIST/raw and DIR/FashionMNIST/raw, with the files and MD5 hashes of
torchvision; ``pet_names`` as DIR/names.txt, one cleaned name per line, next to the file it is made from.
"""

from __future__ import annotations

import csv
import gzip
import http.client
import io
import json
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.data.download import TIMEOUT_S, PublishedFile, fetch, local_path, locked
from harness.data.names import clean
from harness.errors import DataError, reason
from harness.runs.files import is_url, write_atomically

_GITHUB = "https://raw.githubusercontent.com"
_NOTICE = (
    "These data were modified for use from their original source, which is the City of Seattle (data.seattle.gov); "
    "it gives no warranty for them."
)
PET_LICENSES = PublishedFile(
    "seattle_pet_licenses.csv", 3466759, "7fb4de4ef9dbbde6cb2eb43ff67402331b20e560a2fc6b4c64b6906dc135d515",
    (f"{_GITHUB}/jnolis/pet-names/009405125f3217b90e35cdb64610f1b3bbd122c0/seattle_pet_licenses.csv",),
)  # fmt: skip
# Only the names of that file, in lower case: an accepted alternative.
PET_NAMES = PublishedFile(
    "seattle_pet_names_cleaned.json", 532338, "66f37c034174a681e9f26bcdff5d6058e0fe14547a7879a3917267c744c43f8b", ()
)


def mnist(folder: Path, source: str | None) -> str:
    """Store MNIST (70,000 handwritten digits) below ``folder``. Raises DataError or ConfigError.

    This and the other two return sentences to print.
    """
    from torchvision.datasets import MNIST

    return _idx("mnist", MNIST, folder, source)


def fashion_mnist(folder: Path, source: str | None) -> str:
    """Store FashionMNIST (70,000 images of clothes) below ``folder``."""
    from torchvision.datasets import FashionMNIST

    return _idx("fashion_mnist", FashionMNIST, folder, source)


def pet_names(folder: Path, source: str | None) -> str:
    """Store the names of Seattle's licensed pets as ``folder/names.txt``, one per line."""
    with locked(folder):
        kept = [file for file in (PET_LICENSES, PET_NAMES) if not file.mismatch(folder / file.name)]
        wanted = kept[0] if kept else _offered(source)
        other = PET_NAMES if wanted is PET_LICENSES else PET_LICENSES
        fetch([wanted], folder, source, f"harness data pet_names {shlex.quote(str(folder))}", alternative=other)
        content = (folder / wanted.name).read_bytes()
        found = _names_of_json(content) if wanted is PET_NAMES else _names_of_csv(content)
        write_atomically(folder / "names.txt", "".join(f"{name}\n" for name in found).encode())
    return f"{folder} has {len(found)} names, {len(set(found))} of them distinct\n{_NOTICE}"


def _offered(source: str | None) -> PublishedFile:
    """The form of the pet names that ``source`` has; by default the file of licenses."""
    if source is None:
        return PET_LICENSES
    if is_url(source):
        has_names = source.endswith(".json")
    elif (path := local_path(source)).is_file():
        has_names = path.suffix == ".json"
    else:
        has_names = (path / PET_NAMES.name).exists()
    return PET_NAMES if has_names else PET_LICENSES


def _names_of_csv(content: bytes) -> list[str]:
    """The cleaned names of the file of licenses, in order."""
    rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    return [name for row in rows if (name := clean(row["Animal's Name"] or ""))]


def _names_of_json(content: bytes) -> list[str]:
    """The cleaned names of a JSON list, in order."""
    return [name for given in json.loads(content) if (name := clean(given))]


def _idx(name: str, kind: Any, folder: Path, source: str | None) -> str:
    """Store the four files of MNIST or FashionMNIST, packed and unpacked, in the folder of torchvision's ``kind``."""
    raw = folder / kind.__name__ / "raw"
    given = local_path(source) if source and not is_url(source) else None
    mirrors = [f"{source.rstrip('/')}/"] if source and given is None else kind.mirrors
    with locked(raw):
        for file, md5 in kind.resources:
            if failures := _store(file, md5, raw, given, mirrors):
                resources = "\n".join(f"       {file}  MD5 {md5}" for file, md5 in kind.resources)
                command = f"harness data {name} {shlex.quote(str(folder))} --from FOLDER"
                hint = f"put these files into a folder and run {command}\n{resources}"
                raise DataError(f"could not get {file}: {'; '.join(failures)}", where=str(raw), hint=hint)
    return f"{raw} has 60000 training and 10000 evaluation images"


def _store(file: str, md5: str, raw: Path, given: Path | None, mirrors: list[str]) -> list[str]:
    """Put ``file`` into ``raw``, unless it is there with this MD5, and unpack it. Returns why it failed, or []."""
    from torchvision.datasets.utils import check_integrity, download_url

    if given is not None and not check_integrity(raw / file, md5):
        places = [given / file, *given.glob(f"raw/{file}"), *given.glob(f"*/raw/{file}")]  # torchvision's folders
        intact = [place for place in places if check_integrity(place, md5)]
        if not intact:
            return [f"{given}: {'MD5 mismatch' if any(map(Path.exists, places)) else 'No such file'}"]
        shutil.copyfile(intact[0], raw / file)
    failures = []
    for mirror in mirrors:
        try:
            with _time_limit():
                download_url(mirror + file, str(raw), filename=file, md5=md5)
            # In place of the old file, which a training may have mapped; torchvision would overwrite its content.
            write_atomically(raw / file.removesuffix(".gz"), gzip.decompress((raw / file).read_bytes()))
            return []
        except (OSError, RuntimeError, ValueError, EOFError, http.client.HTTPException) as error:
            failures.append(f"{mirror}: {getattr(error, 'reason', None) or reason(error)}")
    return failures


@contextmanager
def _time_limit() -> Iterator[None]:
    """Let a silent server fail, because torchvision sets no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)

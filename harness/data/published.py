"""The datasets of ``harness data``: their files, where they are published, and the layout they are stored in.

``mnist`` and ``fashion_mnist`` are stored in DIR/MNIST/raw and DIR/FashionMNIST/raw, where torchvision looks too;
``pet_names`` as DIR/names.txt, one cleaned name per line, next to the file it is made from.
"""

from __future__ import annotations

import contextlib
import gzip
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.data import names
from harness.data.download import PublishedFile, fetch, local_path, locked
from harness.errors import DataError
from harness.runs.files import is_url, write_atomically

MNIST = (
    ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
FASHION_MNIST = (
    ("train-images-idx3-ubyte.gz", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    ("train-labels-idx1-ubyte.gz", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    ("t10k-images-idx3-ubyte.gz", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    ("t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
_GITHUB = "https://raw.githubusercontent.com"
_NOTICE = (
    "These data were modified for use from their original source, which is the City of Seattle (data.seattle.gov); "
    "it gives no warranty for them."
)
PET_LICENSES = PublishedFile(
    "seattle_pet_licenses.csv", 3466759, "7fb4de4ef9dbbde6cb2eb43ff67402331b20e560a2fc6b4c64b6906dc135d515",
    (
        f"{_GITHUB}/jnolis/pet-names/009405125f3217b90e35cdb64610f1b3bbd122c0/seattle_pet_licenses.csv",
        f"{_GITHUB}/tmobile/r-tensorflow-api/883b93fae31d8a9460c79cd3170425e98bf07244/src/seattle_pet_licenses.csv",
    ),
)  # fmt: skip
# Only the names of that file, in lower case: an accepted alternative.
PET_NAMES = PublishedFile(
    "seattle_pet_names_cleaned.json", 532338, "66f37c034174a681e9f26bcdff5d6058e0fe14547a7879a3917267c744c43f8b", ()
)


def mnist(folder: Path, source: str | None) -> str:
    """Store MNIST (70,000 handwritten digits) below ``folder``. Raises DataError or ConfigError.

    This and the other two return sentences to print.
    """
    from torchvision.datasets import MNIST as TORCHVISION

    return _idx("mnist", TORCHVISION, MNIST, folder, source)


def fashion_mnist(folder: Path, source: str | None) -> str:
    """Store FashionMNIST (70,000 images of clothes) below ``folder``."""
    from torchvision.datasets import FashionMNIST as TORCHVISION

    return _idx("fashion_mnist", TORCHVISION, FASHION_MNIST, folder, source)


def pet_names(folder: Path, source: str | None) -> str:
    """Store the names of Seattle's licensed pets as ``folder/names.txt``, one per line."""
    with locked(folder):
        kept = [file for file in (PET_LICENSES, PET_NAMES) if not file.mismatch(folder / file.name)]
        wanted = kept[0] if kept else _offered(source)
        other = PET_NAMES if wanted is PET_LICENSES else PET_LICENSES
        written = fetch(
            [wanted], folder, source, f"harness data pet_names {shlex.quote(str(folder))}", alternative=other
        )
        content = (folder / wanted.name).read_bytes()
        found = names.of_json(content) if wanted is PET_NAMES else names.of_csv(content, "Animal's Name")
        written += _update(folder / "names.txt", "".join(f"{name}\n" for name in found).encode())
    return _summary(folder, written, f"{len(found)} names, {len(set(found))} of them distinct") + f"\n{_NOTICE}"


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


def _idx(name: str, kind: Any, parts: Sequence[tuple[str, int, str]], folder: Path, source: str | None) -> str:
    """Store the four files of MNIST or FashionMNIST, packed and unpacked, in the folder of torchvision's ``kind``."""
    raw = folder / kind.__name__ / "raw"
    files = [PublishedFile(*part, urls=tuple(mirror + part[0] for mirror in kind.mirrors)) for part in parts]
    with locked(raw):
        written = fetch(files, raw, source, f"harness data {name} {shlex.quote(str(folder))}")
        for file in files:
            try:
                content = gzip.decompress((raw / file.name).read_bytes())
            except (OSError, EOFError) as error:
                hint = "remove this file and run the same command again"
                raise DataError(
                    f"the file cannot be unpacked: {error}", where=str(raw / file.name), hint=hint
                ) from None
            written += _update(raw / file.name.removesuffix(".gz"), content)
    return _summary(raw, written, "60000 training and 10000 evaluation images")


def _update(path: Path, content: bytes) -> list[str]:
    """Write ``content`` to ``path`` unless it is there. Returns the names of written files."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == len(content) and path.read_bytes() == content:
            return []
    write_atomically(path, content)
    return [path.name]


def _summary(folder: Path, written: list[str], content: str) -> str:
    return f"{folder} has {content} ({'written: ' + ', '.join(written) if written else 'unchanged'})"

"""The data sets that ``harness data`` brings: their files, where they are published, and the shape they are kept in.

``mnist`` and ``fashion_mnist`` come into DIR/MNIST/raw and DIR/FashionMNIST/raw, where torchvision looks too;
``pet_names`` as DIR/names.txt, a cleaned name a line, beside the file it is made of.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.data import names
from harness.data.download import Published, alone, bring, local, replace
from harness.errors import DataError
from harness.runs.files import is_url

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
PET_LICENSES = Published(
    "seattle_pet_licenses.csv", 3466759, "7fb4de4ef9dbbde6cb2eb43ff67402331b20e560a2fc6b4c64b6906dc135d515",
    (
        f"{_GITHUB}/jnolis/pet-names/009405125f3217b90e35cdb64610f1b3bbd122c0/seattle_pet_licenses.csv",
        f"{_GITHUB}/tmobile/r-tensorflow-api/883b93fae31d8a9460c79cd3170425e98bf07244/src/seattle_pet_licenses.csv",
    ),
)  # fmt: skip
# The names of that file alone, lower-case: accepted in its place.
PET_NAMES = Published(
    "seattle_pet_names_cleaned.json", 532338, "66f37c034174a681e9f26bcdff5d6058e0fe14547a7879a3917267c744c43f8b", ()
)


def mnist(folder: Path, source: str | None) -> str:
    """MNIST (70,000 handwritten digits) below ``folder``; return what to say. Raises DataError or ConfigError."""
    from torchvision.datasets import MNIST as TORCHVISION

    return _idx("mnist", TORCHVISION, MNIST, folder, source)


def fashion_mnist(folder: Path, source: str | None) -> str:
    """FashionMNIST (70,000 pictures of clothes) below ``folder``; return what to say."""
    from torchvision.datasets import FashionMNIST as TORCHVISION

    return _idx("fashion_mnist", TORCHVISION, FASHION_MNIST, folder, source)


def pet_names(folder: Path, source: str | None) -> str:
    """The names of Seattle's licensed pets as ``folder/names.txt``, one a line; return what to say."""
    with alone(folder):
        kept = [file for file in (PET_LICENSES, PET_NAMES) if not file.damage(folder / file.name)]
        wanted = kept[0] if kept else _offered(source)
        other = PET_NAMES if wanted is PET_LICENSES else PET_LICENSES
        brought = bring([wanted], folder, source, f"harness data pet_names {folder}", instead=other)
        content = (folder / wanted.name).read_bytes()
        found = names.of_json(content) if wanted is PET_NAMES else names.of_csv(content, "Animal's Name")
        brought += ["names.txt"] * replace(folder / "names.txt", "".join(f"{name}\n" for name in found).encode())
    return _told(folder, brought, f"{len(found)} names, {len(set(found))} different ones") + f"\n{_NOTICE}"


def _offered(source: str | None) -> Published:
    """The form of the pet names that ``source`` holds; where it holds none, the one to ask for."""
    if source is None:
        return PET_LICENSES
    if is_url(source):
        return PET_NAMES if source.endswith(".json") else PET_LICENSES
    path = local(source)
    there = path.name == PET_NAMES.name if path.is_file() else (path / PET_NAMES.name).exists()
    there = there or (path.is_file() and path.suffix == ".json")
    return PET_NAMES if there else PET_LICENSES


def _idx(name: str, kind: Any, parts: Sequence[tuple[str, int, str]], folder: Path, source: str | None) -> str:
    """The four files of a data set like MNIST, and what is in them, where torchvision's class ``kind`` looks."""
    raw = folder / kind.__name__ / "raw"
    files = [Published(*part, urls=tuple(mirror + part[0] for mirror in kind.mirrors)) for part in parts]
    with alone(raw):
        brought = bring(files, raw, source, f"harness data {name} {folder}")
        for file in files:
            try:
                content = gzip.decompress((raw / file.name).read_bytes())
            except (OSError, EOFError) as error:
                raise DataError(f"it cannot be unpacked: {error}", where=str(raw / file.name)) from None
            target = raw / file.name.removesuffix(".gz")
            brought += [target.name] * replace(target, content)
    return _told(raw, brought, "60000 training and 10000 evaluation images")


def _told(folder: Path, brought: list[str], what: str) -> str:
    return f"{folder} has {what}" + (f" (written: {', '.join(brought)})" if brought else ", whole as it was")

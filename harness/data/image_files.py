"""The bytes of images: files below a folder, members of tar archives, and both behind fsspec URLs.

A path is relative to the root. ``shards/train-000000.tar/cat.jpg`` is the member ``cat.jpg`` of an archive. The root
or a path may be a URL; what it names is copied once to the cache of this machine (url_cache.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch

from harness.data import tars
from harness.data.url_cache import UrlCache
from harness.data.vision import read_file
from harness.errors import require_regular_file
from harness.runs.files import cache_folder, is_url

_TAR = ".tar/"
_ARCHIVES_AT_ONCE = 4


@dataclass
class ImageFiles:
    """Files below ``root``, a folder or a URL. ``cache_gib``: for the local copies of files behind URLs."""

    root: str
    cache_dir: Path | None = None
    cache_gib: float = 50.0
    _urls: UrlCache = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.root = self.root.removeprefix("file://")
        self.cache_dir = cache_folder(self.cache_dir)
        self._urls = UrlCache(self.cache_dir / "urls", int(self.cache_gib * 2**30))

    def place(self, path: str) -> str:
        """The file or URL that ``path`` names."""
        if is_url(path):
            return path.removeprefix("file://")
        return f"{self.root.rstrip('/')}/{path}" if is_url(self.root) else os.path.join(self.root, path)

    def is_file(self, path: str) -> bool:
        """True if ``path`` names a local file, not a member of an archive or something behind a URL."""
        return _TAR not in path and not is_url(self.place(path))

    def is_below(self, folder: str, path: str) -> bool:
        """True if ``path`` would be a file if ``folder`` were the root."""
        return replace(self, root=folder).exists(path) and not is_url(path)

    def read(self, path: str) -> torch.Tensor:
        """The bytes of ``path``, uint8 (bytes,). Raises OSError or RuntimeError if this file or member cannot be read,
        and DataError if the archive or the server cannot."""
        place = self.place(path)
        if _TAR in path:
            return self._member(place)
        if is_url(place):
            return self._urls.read(place)
        require_regular_file(place)
        return read_file(place)

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Start to download what ``paths`` name behind URLs, in threads."""
        for place in map(self.place, paths):
            if is_url(place) and _TAR not in place:
                self._urls.start(place)

    def archives(self, paths: pa.ChunkedArray) -> set[str]:
        """The archives behind URLs of which ``paths`` name members."""
        inside = paths.filter(pc.match_substring(paths, _TAR))
        named = pc.unique(pc.replace_substring_regex(inside, r"(?s)\.tar/.*", ".tar")).to_pylist()
        return {place for place in map(self.place, named) if is_url(place)}

    def copy_archives(self, urls: Sequence[str]) -> None:
        """Copy archives to the cache of this machine. Raises DataError; one that does not exist is left to ``read``."""

        def copied(url: str) -> None:
            with suppress(FileNotFoundError):
                self._urls.file(url)

        with ThreadPoolExecutor(_ARCHIVES_AT_ONCE, thread_name_prefix="archives") as pool:
            list(pool.map(copied, urls))

    def exists(self, path: str) -> bool:
        """False if the file does not exist. Of an archive, only the file itself is looked for; URLs are not asked."""
        place = self.place(path)
        return is_url(place) or os.path.exists(place.partition(_TAR)[0] + ".tar" if _TAR in place else place)

    def _member(self, place: str) -> torch.Tensor:
        archive, _, member = place.partition(_TAR)
        archive += ".tar"
        if not is_url(archive) and os.path.isdir(archive):  # a folder whose name ends like an archive's
            require_regular_file(place)
            return read_file(place)
        file = self._urls.file(archive) if is_url(archive) else archive
        assert self.cache_dir is not None
        return tars.read(file, member, self.cache_dir / "tars", archive)

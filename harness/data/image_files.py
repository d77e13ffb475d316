"""The bytes of images: files below a folder, members of tar archives, and both behind fsspec URLs.

A path is relative to the root. ``shards/train-000000.tar/cat.jpg`` is the member ``cat.jpg`` of an archive. The root
or a path may be a URL; what it names is copied once to the cache of this machine.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch

from harness.config.places import is_url
from harness.data.url_cache import UrlCache
from harness.data.vision import read_file
from harness.errors import require_regular_file
from harness.runs.files import cache_folder

_TAR = ".tar/"
_ARCHIVES_AT_ONCE = 4


@dataclass
class ImageFiles:
    """Files below ``root``, a folder or a URL. ``cache_gib``: for the local copies of files behind URLs."""

    root: str
    cache_dir: Path | None = None
    cache_gib: float = 50.0
    _cache: Path = field(init=False, repr=False)
    _urls: UrlCache = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.root = self.root.removeprefix("file://")
        self._cache = cache_folder(self.cache_dir)
        self._urls = UrlCache(self._cache / "urls", int(self.cache_gib * 2**30))

    def locate(self, path: str) -> str:
        """Return the file or URL that ``path`` names."""
        if is_url(path):
            return path.removeprefix("file://")
        if not is_url(self.root):
            return os.path.join(self.root, path)
        if self.root.startswith(("http://", "https://")):  # where #, ? and % in the name of a file mean something else
            file, tar, member = path.partition(_TAR)
            path = urllib.parse.quote(file) + tar + member
        return f"{self.root.rstrip('/')}/{path}"

    def is_file(self, path: str) -> bool:
        """Return True if ``path`` names a local file, not a member of an archive or something behind a URL."""
        return _TAR not in path and not is_url(self.locate(path))

    def is_below(self, folder: str, path: str) -> bool:
        """Return True if ``path`` would be a file if ``folder`` were the root."""
        return replace(self, root=folder).exists(path) and not is_url(path)

    def read(self, path: str) -> torch.Tensor:
        """Return the bytes of ``path``, uint8 (bytes,). Raises OSError or RuntimeError if this file or member cannot be
        read, and DataError if the archive or the server cannot."""
        location = self.locate(path)
        if _TAR in path:
            return self._member(location)
        if is_url(location):
            return self._urls.read(location)
        require_regular_file(location)
        return read_file(location)

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Download what ``paths`` name behind URLs, in threads; do not wait for it."""
        for location in map(self.locate, paths):
            if is_url(location) and _TAR not in location:
                self._urls.start(location)

    def archives(self, paths: pa.ChunkedArray) -> set[str]:
        """Return the archives behind URLs of which ``paths`` name members."""
        inside = paths.filter(pc.match_substring(paths, _TAR))
        paths_of_archives = pc.unique(pc.replace_substring_regex(inside, r"(?s)\.tar/.*", ".tar")).to_pylist()
        return {location for location in map(self.locate, paths_of_archives) if is_url(location)}

    def copy_archives(self, urls: Sequence[str]) -> None:
        """Copy archives to the cache of this machine. Raises DataError; one that does not exist is left to ``read``."""

        def copied(url: str) -> None:
            with suppress(FileNotFoundError):
                self._urls.file(url)

        with ThreadPoolExecutor(_ARCHIVES_AT_ONCE, thread_name_prefix="archives") as pool:
            list(pool.map(copied, urls))

    def exists(self, path: str) -> bool:
        """Return False if the file does not exist. Of an archive, only the file itself is looked for; URLs are not
        asked."""
        location = self.locate(path)
        file = location.partition(_TAR)[0] + ".tar" if _TAR in location else location
        return is_url(location) or os.path.exists(file)

    def _member(self, location: str) -> torch.Tensor:
        """Return the bytes of ``location``, ARCHIVE.tar/MEMBER; of a file, if the archive is in truth a folder."""
        archive, _, member = location.partition(_TAR)
        archive += ".tar"
        if not is_url(archive) and os.path.isdir(archive):  # a folder whose name ends like an archive's
            require_regular_file(location)
            return read_file(location)
        file = self._urls.file(archive) if is_url(archive) else archive
        from harness.data import tars  # late: few datasets are in archives

        return tars.read(file, member, self._cache / "tars", archive)

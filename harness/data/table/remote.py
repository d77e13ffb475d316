"""Annotation files behind fsspec (s3://, gs://, https://, hf://): their version, and one download per node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from harness.errors import DataError
from harness.runs.files import replacing

# What servers call a mark that changes with the content, surest first; the size is always taken as well.
_MARKS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "checksum", "sha256", "mtime", "LastModified")
_MORE_MARKS = ("last_modified", "updated", "modified", "last_commit", "created")


def version(url: str) -> tuple[int | str, ...]:
    """(size, ETag or what comes nearest): asks the server each time. DataError if there is no such file."""
    with _asking(url):
        return _version(url)


def fetch(url: str, expected: tuple[int | str, ...], target: Path) -> None:
    """Download ``url`` into ``target``, whole or not at all; DataError if it is not what ``expected`` says."""
    with replacing(target) as temporary:
        with _asking(url):
            filesystem, path = fsspec.core.url_to_fs(url)
            filesystem.get_file(path, str(temporary))
            after = _version(url)
        size = temporary.stat().st_size
        if after != expected or size != expected[0] != -1:
            raise DataError(
                f"the file changed while it was being downloaded ({size} bytes came, {expected[0]} were expected)",
                where=url,
                hint="start again once it is written",
            )


def _version(url: str) -> tuple[int | str, ...]:
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()  # after a listing, info() would answer from that listing
    info: dict[str, Any] = filesystem.info(path)
    if info.get("type") == "directory":
        raise DataError("this is a folder, not an annotation file", where=url)
    if info.get("size") == 0:
        raise DataError("the annotation file is empty (0 bytes)", where=url, hint="was it written completely?")
    size = info.get("size")
    mark = next((str(info[mark]) for mark in (*_MARKS, *_MORE_MARKS) if info.get(mark)), "")
    return (int(size) if size is not None else -1), mark or str(filesystem.ukey(path))


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Any failure of any of fsspec's many back ends as a DataError."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError("no such annotation file", where=url) from None
    except ImportError as error:
        raise DataError(f"this kind of address needs a package: {error}", where=url) from error
    except ValueError as error:
        hint = "an address begins with s3://, gs://, https:// or another protocol that fsspec knows"
        raise DataError(f"the address cannot be used: {error}", where=url, hint=hint) from error
    except Exception as error:
        raise DataError(f"the file cannot be fetched: {type(error).__name__}: {error}", where=url) from error

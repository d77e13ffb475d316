"""Copies of files behind URLs, complete or not at all; one process makes each while the others wait.

URLs are those of fsspec, and paths of this machine. Files behind http need no package beside Python's own.
"""

from __future__ import annotations

import errno
import logging
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from harness.config.places import is_url
from harness.distributed.threads import thread
from harness.errors import DataError, HarnessError, has_remedy, reason, remedy
from harness.runs.console import working
from harness.runs.files import replacing
from harness.runs.locks import locked

log = logging.getLogger("harness")

Value = TypeVar("Value")

TIMEOUT_S = 30.0  # without any data
ATTEMPTS = 3
_PAUSE_S = 0.5  # before the second attempt; twice as long before each further one
LOCK_S = 86400.0  # for another process, which gives up by itself when no data arrive
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_OTHER_CACHE = (
    "APEX_HARNESS_CACHE (or data.cache_dir; for weights, TORCH_HOME) to a folder with enough space on a local disk"
)
_GONE, _REFUSED = (404, 410), (401, 403)


def fetched(
    url: str,
    target: Path,
    is_intact: Callable[[Path], bool] = Path.exists,
    accept: Callable[[int], None] = lambda size: None,
) -> Path:
    """Return ``target``, a copy of the file at ``url``: the one that is there if it ``is_intact``, else a new one.

    ``accept`` may raise, and is called with the size in bytes before the transfer, 0 if the server does not tell.
    Raises FileNotFoundError if there is no such file, DataError if it cannot be read, or the copy cannot be written.
    """
    if target.exists() and is_intact(target):
        return target
    with made_once(target, passes=(FileNotFoundError,)):
        if target.exists():
            if is_intact(target):  # another process has made it
                return target
            log.warning("%s is damaged; copying it again", target)
        log.info("copying %s", url)
        with replacing(target, secrets.token_hex(8)) as temporary:
            with working(f"copying {url}", "MiB", measure=lambda: temporary.stat().st_size >> 20) as work:

                def accepted(size: int) -> None:
                    work.total = size >> 20
                    accept(size)

                attempted(url, lambda: _transfer(url, temporary, accepted))
            if not is_intact(temporary):
                hint = "try another source, or the same one again: the transfer or the file there is damaged"
                raise DataError("its content is not the published one: the digest differs", where=url, hint=hint)
    return target


@contextmanager
def made_once(path: Path, passes: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """``writing`` in which this process alone makes ``path``, while others wait."""
    with writing(path, passes), locked(Path(f"{path}.lock"), LOCK_S):
        yield


@contextmanager
def writing(path: Path, passes: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Context in which ``path``, a file of a cache, is written; its folder is created. Raises DataError in place of
    any OSError but those that it ``passes``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, passes):
            raise
        hint = remedy(error, f"or set {_OTHER_CACHE}")
        raise DataError(f"the cache cannot be written: {reason(error)}", where=str(path), hint=hint) from None


def attempted(url: str, work: Callable[[], Value]) -> Value:
    """Return ``work()``, repeated if the server or the network fails. Raises FileNotFoundError, or DataError for any
    other failure of any fsspec back end."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        try:
            return work()
        except (FileNotFoundError, HarnessError):
            raise
        except (PermissionError, ImportError, ValueError, NotImplementedError) as error:
            raise unreachable(url, error) from error
        except Exception as error:
            failure = error
            if "redential" in type(error).__name__:
                break
    raise unreachable(url, failure) from failure


def unreachable(url: str, error: Exception) -> DataError:
    """Return the error for a URL whose server, network or credentials fail."""
    name = type(error).__name__
    problem = f"no answer within {TIMEOUT_S:g} s" if "Timeout" in name else f"{name}: {reason(error)}"
    return DataError(f"the file cannot be read: {problem}", where=url, hint=remedy_for(url, error, "read"))


def remedy_for(url: str, error: Exception, access: str = "list, read, write and delete") -> str:
    """Return what to do about ``error`` of an fsspec back end. ``access``: what the credentials must allow."""
    from fsspec.registry import available_protocols, known_implementations

    protocol = url.partition("://")[0] if is_url(url) else "file"
    if isinstance(error, ImportError):
        message = known_implementations.get(protocol, {}).get("err", f"the package for {protocol}:// is missing")
        return f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else str(message)
    if isinstance(error, ValueError) and protocol not in available_protocols():
        return "use a folder, or a URL such as s3://BUCKET/runs; fsspec supports s3, gs, abfs, sftp, file and others"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or (protocol in ("file", "local") and has_remedy(error)):
        return remedy(error, "the same applies to the cache (APEX_HARNESS_CACHE, data.cache_dir)")
    if isinstance(error, NotImplementedError):
        return f"{protocol}:// is read-only; use a store that can be written to, such as s3://BUCKET/runs"
    if isinstance(error, FileNotFoundError):
        return "check that the bucket exists and that you may access it; create it, or correct the address"
    if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
        keys = " (such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)" if protocol in ("s3", "s3a") else ""
        return f"give every node credentials{keys} with permission to {access} there"
    server_hint = "; for another S3 server, set AWS_ENDPOINT_URL" if protocol in ("s3", "s3a") else ""
    return f"check the address and the network{server_hint}"


def _transfer(url: str, target: Path, accept: Callable[[int], None]) -> None:
    if url.startswith(("http://", "https://")):
        size = _transfer_http(url, target, accept)
    else:
        import fsspec  # late, as in other modules: few need it, and its import takes long

        filesystem, path = fsspec.core.url_to_fs(url)
        size = filesystem.info(path).get("size")
        accept(size or 0)
        _with_progress(lambda: filesystem.get_file(path, str(target)), target)
    received = target.stat().st_size
    if size is not None and received != size:
        raise OSError(errno.EIO, f"{received} bytes received, {size} expected")


def _transfer_http(url: str, target: Path, accept: Callable[[int], None]) -> int | None:
    """Return the size that the server announces, if it does."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, open(target, "wb") as file:
            size: int | None = response.length
            accept(size or 0)
            shutil.copyfileobj(response, file, 1 << 20)
            return size
    except urllib.error.HTTPError as error:
        if error.code in _GONE:
            raise FileNotFoundError(errno.ENOENT, error.reason, url) from None
        if error.code in _REFUSED:
            raise PermissionError(errno.EACCES, error.reason, url) from None
        raise OSError(errno.EIO, f"{error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise (error.reason if isinstance(error.reason, OSError) else error) from None


def _with_progress(get: Callable[[], Any], target: Path) -> None:
    """Call ``get``, which writes ``target``. Raises TimeoutError after TIMEOUT_S without progress."""
    done = Future[None]()

    def work() -> None:
        try:
            get()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    thread(work, "fetch").start()
    size, since = -1, time.monotonic()
    while wait([done], 1.0).not_done:
        now = target.stat().st_size if target.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > TIMEOUT_S:
            raise TimeoutError(f"no data for {TIMEOUT_S:g} s")
    done.result()

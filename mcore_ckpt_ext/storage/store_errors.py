"""Converts the errors of the libraries of remote stores, which have errors of their own.

They come from the HTTP client, from the search for credentials, or from the server. What is missing becomes a
FileNotFoundError, and any other error a `StorageError`. Requests are repeated by the store's library, by its settings.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt_ext.errors import CheckpointError, StorageError, is_answer, shorten

_CREDENTIALS = (
    "check the address, that the store's library finds your credentials (fsspec, s3fs, gcsfs, adlfs), and that they "
    "are valid and give access to it"
)
_NETWORK = "check the address and the network, and try again"
_BUSY = "the store is overloaded or out of order: try again later, or with fewer requests at once (--workers 1)"
_REFUSED = re.compile(r"credential|auth|forbidden|denied|permission|token", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"time.?out|connect|disconnect|reset|incomplete|payload|clientos|httpclient|resolve", re.IGNORECASE
)
_OVERLOADED = (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO), errno.EIO)


@contextmanager
def translate_errors(where: object, verb: str = "read") -> Iterator[None]:
    """Convert the errors of a store's library.

    Args:
        where: the path that is read or written.
        verb: what cannot be done with the store: `read` or `written`.

    Raises:
        FileNotFoundError: there is nothing at that path; likewise for other errors that state what lies there.
        StorageError: the store cannot be read or written.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or _is_missing(error):
            raise FileNotFoundError(errno.ENOENT, "not found in the remote store", str(where)) from error
        raise StorageError(
            f"the remote store cannot be {verb}", found=shorten(_describe(error)), where=str(where), hint=_hint(error)
        ) from error


def raise_unless_missing(error: Exception) -> None:
    """Raise an error again unless it states what lies at a path."""
    if not (isinstance(error, OSError) and is_answer(error)):
        raise error


def _is_missing(error: Exception) -> bool:
    return _code(error) == 404


def _describe(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    code = _code(error)
    return f"{type(error).__name__}: {text}" + (f" (HTTP {code})" if code and str(code) not in text else "")


def _code(error: BaseException) -> int | None:
    """Return the HTTP status of an error of a store's library, or of its cause; None without one."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        of_boto = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        for code in (of_boto, *(getattr(candidate, name, None) for name in ("status_code", "status", "code"))):
            if isinstance(code, int):
                return code
    return None


def _hint(error: Exception) -> str:
    code = _code(error)
    kind = type(error).__name__
    if isinstance(error, PermissionError) or code in (401, 403) or _REFUSED.search(kind):
        return _CREDENTIALS
    if code == 429 or (code or 0) >= 500 or (isinstance(error, OSError) and error.errno in _OVERLOADED):
        return _BUSY
    if isinstance(error, (TimeoutError, ConnectionError)) or _UNREACHABLE.search(kind):
        return _NETWORK
    return _CREDENTIALS

"""What went wrong with an object store, in one line and without secrets.

Messages of the client library are read for a status and a code, and never passed on: they hold
URLs, and those of some stores are signed.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import Final

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_VARIABLES: Final = {"s3": "AWS_*", "gs": "GOOGLE_*", "az": "AZURE_*"}


@contextlib.contextmanager
def in_words(act: str, scheme: str, bucket: str) -> Iterator[None]:
    """Turn what the client raises inside into an OSError that begins with ``act``."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        translated = _translated(error, act, scheme, bucket)
    else:
        return
    raise translated from None


def _translated(error: Exception, act: str, scheme: str, bucket: str) -> OSError:
    text = str(error)
    status = _found(_STATUS, text)
    answer = " ".join(filter(None, (status, _found(_CODE, text))))
    if any(mark in text for mark in _NO_BUCKET):
        return OSError(
            errno.EIO, f"{act}: there is no bucket {bucket}; create it or correct the URL"
        )
    if isinstance(error, FileNotFoundError) or status == "404":
        return FileNotFoundError(errno.ENOENT, f"{act}: there is no such object")
    if status in {"401", "403"}:
        variables = _VARIABLES[scheme]
        return PermissionError(
            errno.EACCES,
            f"{act}: the server refuses ({answer}); check the credentials in {variables} and "
            "what they are allowed to do",
        )
    return OSError(errno.EIO, f"{act}: {_reason(text, answer)}")


def _reason(text: str, answer: str) -> str:
    if answer:
        again = ", also when asked again" if answer.startswith("5") else ""
        return f"the server answers {answer}{again}"
    if "TimedOut" in text:
        return "the server does not answer in time"
    if "Connect" in text:
        return "the server cannot be reached"
    return "the connection broke, also when tried again"


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""

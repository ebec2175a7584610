"""A bucket of an object store (S3 and what speaks its protocol, Google Cloud, Azure).

Guarantees: those of the room. An object appears whole and durable when its upload is completed, so
nothing has to be renamed; ``put_new`` is a conditional put and decides races at the server.

What can go wrong: servers answer 5xx for seconds and connections break, which is repeated inside
for as long as ``Patience`` says; then, as for anything else, an OSError in one line comes out. That
line is written here: the client's own messages hold URLs, which may hold signatures. Credentials
and endpoints come from the environment, as obstore reads it (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``).

obstore runs threads of its own and hangs in a forked child; ObjectStore refuses to work there, and
obstore is imported only when an ObjectStore is made.

Rejected: parts in any order (obstore uploads what it is given, in order); a marker instead of a
conditional put (two writers could both see none). An upload whose process dies, or whose last parts
fail, leaves parts in the bucket, unseen and paid for: give the bucket a rule that aborts incomplete
multipart uploads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from outlast.errors import ConfigError
from outlast.storage.directory import bytes_of, checked

if TYPE_CHECKING:
    from obstore import WritableFile

PART_BYTES: Final = 16 * 2**20
MAX_PARTS: Final = 10_000  # of one upload, by the protocol of S3
PARTS_IN_FLIGHT: Final = 4
RANGE_BYTES: Final = 8 * 2**20  # one connection seldom gives what the network could
RANGES_IN_FLIGHT: Final = 4
NUM_TRIES: Final = 3
WRITER: Final = "outlast-writer"  # metadata: who wrote an object that was to be new

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_VARIABLES: Final = {"s3": "AWS_*", "gs": "GOOGLE_*", "az": "AZURE_*"}

_process: int | None = None  # the one whose threads obstore started


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a store is waited for, in seconds.

    A store that is dead fails after about ``stall_s`` when it takes connections and is silent,
    after ``retry_s`` when it refuses them or answers 5xx, and after both when it does so in turn.
    """

    connect_s: float = 5.0
    stall_s: float = 25.0  # from the start of a request, or the last bytes of its answer
    request_s: float = 120.0
    retry_s: float = 20.0
    max_backoff_s: float = 2.0


class ObjectStore:
    """The objects of a bucket below a prefix.

    Args:
        url: ``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX`` or ``az://CONTAINER/PREFIX``.
        patience: how long the store is waited for.

    Raises:
        ConfigError: the URL cannot be used, or obstore is not installed.
    """

    def __init__(self, url: str, *, patience: Patience | None = None) -> None:
        self.scheme, self.bucket, self.prefix = _parsed(url)
        self._store = _connect(self.scheme, self.bucket, self.prefix, patience or Patience())

    def describe(self, name: str = "") -> str:
        """The URL of ``name``."""
        parts = [part for part in (self.bucket, self.prefix, name) if part]
        return f"{self.scheme}://{'/'.join(parts)}"

    def children(self, name: str = "") -> list[str]:
        """Names directly below ``name``, sorted; empty when there is nothing."""
        import obstore

        with self._doing("listing", name):
            found = obstore.list_with_delimiter(self._store, checked(name) or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def exists(self, name: str) -> bool:
        """Whether there is an object ``name``."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Size of the object ``name`` in bytes."""
        import obstore

        with self._doing("looking up", name):
            return obstore.head(self._store, checked(name))["size"]

    def read(self, name: str) -> bytes:
        """The whole object ``name``."""
        import obstore

        with self._doing("reading", name):
            return obstore.get(self._store, checked(name)).bytes().to_bytes()

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill ``buffer`` from byte ``offset`` of ``name``; returns the bytes read."""
        return self.open(name).read_into(buffer, offset)

    def open(self, name: str) -> ObjectReader:
        """Look ``name`` up, for reading many blocks; FileNotFoundError if there is none."""
        return ObjectReader(self, name, self.size(name))

    def put(self, name: str, data: bytes) -> None:
        """Write the whole object ``name``."""
        import obstore

        with self._doing("writing", name):
            obstore.put(self._store, checked(name), data, use_multipart=False)

    def put_new(self, name: str, data: bytes) -> bool:
        """``put``, but only if there is no ``name`` yet; False, and nothing done, if there is.

        A put whose answer was lost is repeated, and the server then answers that the object is
        there already; whose it is stands in its metadata. After an OSError nobody knows whether it
        was done.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        writer = uuid.uuid4().hex
        with self._doing("writing", name):
            for _ in range(NUM_TRIES):
                with contextlib.suppress(AlreadyExistsError):
                    obstore.put(
                        self._store,
                        checked(name),
                        data,
                        mode="create",
                        use_multipart=False,
                        attributes={WRITER: writer},
                    )
                    return True
                found = self._writer_of(name)
                if found is not None:
                    return found == writer
        place = self.describe(name)
        raise OSError(errno.EIO, f"writing {place}: others put and remove it at the same time")

    def create(self, name: str, size: int | None = None) -> ObjectBlob:
        """Start an upload to ``name``, which will have ``size`` bytes if that is given."""
        return ObjectBlob(self, checked(name), size)

    def remove(self, name: str) -> None:
        """Remove the object ``name``; nothing happens when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._delete(name, checked(name))

    def remove_tree(self, name: str, last: Sequence[str] = ()) -> None:
        """Remove all objects below ``name``; nothing happens when there are none.

        Those in ``last`` go when all others are gone, in that order.
        """
        import obstore

        if not checked(name):
            raise ValueError("the root of a storage is not removed")
        with self._doing("listing", name):
            pages = [[entry["path"] for entry in page] for page in obstore.list(self._store, name)]
        late = [f"{name}/{one}" for one in last]
        found = {path for page in pages for path in page}
        pages = [[path for path in page if path not in late] for page in pages]
        pages += [[path] for path in late if path in found]
        for page in filter(None, pages):
            with contextlib.suppress(FileNotFoundError):  # another process removes it too
                self._delete(name, page)

    def _delete(self, name: str, paths: str | Sequence[str]) -> None:
        import obstore

        with self._doing("removing", name):
            obstore.delete(self._store, paths)

    def _writer_of(self, name: str) -> str | None:
        """Who put the object ``name`` as a new one; None when there is no such object.

        There may be none although a put was refused for one: S3 answers 409 while another put or
        removal of the name is under way.
        """
        import obstore

        try:
            found = obstore.get(self._store, name, options={"head": True})
        except FileNotFoundError:
            return None
        return str(found.attributes.get(WRITER))

    def _doing(self, what: str, name: str) -> contextlib.AbstractContextManager[None]:
        _refuse_after_fork()
        return in_words(f"{what} {self.describe(checked(name))}", self.scheme, self.bucket)


class ObjectReader:
    """An object that is read in ranges, several at once.

    Attributes:
        size: of the object, in bytes.
    """

    def __init__(self, storage: ObjectStore, name: str, size: int) -> None:
        self.size = size
        self._storage = storage
        self._name = name

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from byte ``offset``; returns the bytes read, fewer only at the end."""
        view = bytes_of(buffer)[: max(self.size - offset, 0)]
        starts = range(0, len(view), RANGE_BYTES)

        def fetch(start: int) -> None:
            self._fetch(view[start : start + RANGE_BYTES], offset + start)

        if len(starts) <= 1:
            for start in starts:
                fetch(start)
        else:
            with ThreadPoolExecutor(RANGES_IN_FLIGHT, "outlast-fetch") as pool:
                for _ in pool.map(fetch, starts):
                    pass
        return len(view)

    def close(self) -> None:
        """Nothing is held between reads."""

    def _fetch(self, view: memoryview, offset: int) -> None:
        import obstore

        storage = self._storage
        with storage._doing("reading", self._name):
            found = obstore.get_range(storage._store, self._name, start=offset, length=len(view))
        if len(found) != len(view):
            place = storage.describe(self._name)
            raise OSError(errno.EIO, f"{place} changed its size while it was read")
        view[:] = memoryview(found)


class ObjectBlob:
    """An upload in parts, from one thread and in order; small objects go in one request.

    At most ``PARTS_IN_FLIGHT`` parts, and one that is being filled, are in memory.
    """

    positional = False

    def __init__(self, storage: ObjectStore, name: str, size: int | None) -> None:
        self._storage = storage
        self._name = name
        self._size = size
        self._written = 0
        self._part_bytes = part_bytes(size)
        self._writer: WritableFile | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data``, of which a copy is kept until it is uploaded."""
        view = bytes_of(data)
        with self._doing():
            writer = self._opened()
            for start in range(0, len(view), self._part_bytes):
                writer.write(bytes(view[start : start + self._part_bytes]))
        self._written += len(view)

    def write_at(self, data: memoryview | bytes, offset: int) -> None:
        """Append ``data``, whose ``offset`` must be where the last write ended."""
        if offset != self._written:
            raise ValueError(f"{self._name}: byte {self._written} comes next, not {offset}")
        self.write(data)

    def finish(self) -> None:
        """Complete the upload."""
        if self._size is not None and self._written != self._size:
            raise ValueError(f"{self._name}: {self._written} of {self._size} bytes written")
        with self._doing():
            writer, self._writer = self._opened(), None
            writer.close()

    def abandon(self) -> None:
        """Abort the upload; parts that cannot be removed now are left to the bucket's own rules."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # what made us abandon is what must be heard
                writer.__exit__(OSError, OSError("abandoned"), None)

    def _opened(self) -> WritableFile:
        import obstore

        if self._writer is None:
            self._writer = obstore.open_writer(
                self._storage._store,
                self._name,
                buffer_size=self._part_bytes,
                max_concurrency=PARTS_IN_FLIGHT,
            )
        return self._writer

    def _doing(self) -> contextlib.AbstractContextManager[None]:
        return self._storage._doing("writing", self._name)


def part_bytes(size: int | None) -> int:
    """How large the parts of an upload of ``size`` bytes are, in bytes: whole MiB, and enough."""
    if size is None:
        return PART_BYTES
    mib = 2**20
    return max(PART_BYTES, -(-size // (MAX_PARTS * mib)) * mib)


def _parsed(url: str) -> tuple[str, str, str]:
    split = urlsplit(url)
    bucket, prefix = split.netloc, split.path.strip("/")
    if split.scheme not in _VARIABLES or not bucket:
        raise ConfigError(f"{url!r} is not the URL of a bucket; write s3://BUCKET/PREFIX")
    if "@" in bucket or split.query or split.fragment:
        raise ConfigError(
            f"the URL of {split.scheme}://{bucket.rpartition('@')[2]} has more than a bucket and "
            "a prefix; credentials belong into the environment"
        )
    try:
        return split.scheme, bucket, checked(prefix)
    except ValueError:
        raise ConfigError(f"{prefix!r} in {url!r} is not a plain prefix") from None


def _connect(scheme: str, bucket: str, prefix: str, patience: Patience) -> Any:
    global _process  # noqa: PLW0603
    try:
        from obstore import exceptions, store
    except ImportError:
        raise ConfigError(
            f"{scheme}://{bucket} needs obstore, which is not installed; run: pip install obstore"
        ) from None
    _process = _process or os.getpid()
    _refuse_after_fork()
    kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    # As settings of the store and not as client_options, which would replace those of the
    # environment (AWS_ALLOW_HTTP, proxies, certificates).
    times = {
        "connect_timeout": f"{round(patience.connect_s * 1000)}ms",
        "read_timeout": f"{round(patience.stall_s * 1000)}ms",
        "timeout": f"{round(patience.request_s * 1000)}ms",
    }
    retry = {
        "max_retries": 1000,  # it is time that counts
        "retry_timeout": timedelta(seconds=patience.retry_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=patience.max_backoff_s),
            "base": 2,
        },
    }
    try:
        return kinds[scheme](bucket, prefix=prefix or None, config=times, retry_config=retry)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{scheme}://{bucket} cannot be set up ({type(error).__name__}); "
            "check what the environment says about it: credentials, endpoint, region"
        ) from None


def _refuse_after_fork() -> None:
    if _process != os.getpid():
        raise RuntimeError("an object store cannot be used in a forked process: spawn it instead")


# --- errors in words ------------------------------------------------------------------------------


@contextlib.contextmanager
def in_words(act: str, scheme: str, bucket: str) -> Iterator[None]:
    """Turn what the client raises inside into an OSError that begins with ``act``.

    Its messages are read for a status and a code, and never passed on.
    """
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

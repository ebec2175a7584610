"""The job's key, and TLS below the seal.

**Key**: 32 random bytes that everybody has who may read the job's storage. In a directory it is a
file for its owner alone (0600) below a directory for its owner alone (0700), and a key that others
could have read or replaced is refused rather than used. In a bucket, everybody has it who may read
the bucket. It is made by the first process that needs it, and never changes while the job lives. It
is never shown, logged or passed on a command line.

**TLS**, for networks on which others may listen: settings of ``[peer]``. Mutual: each side shows a
certificate that the job's own authority (``tls_ca``) signed. Names in certificates are not compared
with addresses, which change with every machine. That the other side belongs to the job is proven by
the job's key, inside; that it is the one that showed its certificate, too: the seal's keys are made
of both certificates (RFC 5929's "tls-server-end-point", of both ends; Python's ssl module does not
give RFC 9266's exporter). So another host of the same authority cannot stand in the middle.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outlast.config import Settings
from outlast.errors import ConfigError, SealError, StorageError
from outlast.storage.directory import Directory

if TYPE_CHECKING:
    from outlast.storage import Storage

KEY_BYTES: Final = 32
KEY_NAME: Final = "membership/key"


def job_key(storage: Storage) -> bytes:
    """The key of the job whose storage this is; made if there is none yet.

    Raises:
        StorageError: the storage fails, or holds a key that must not be trusted: of a wrong length,
            of another user, or open to others. One line that says what to do.
    """
    place = storage.describe(KEY_NAME)
    try:
        try:
            key = _read(storage)
        except FileNotFoundError:
            _make(storage)
            key = _read(storage)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the job's key {place} cannot be had: {error.strerror or error}; every machine of a "
            "job needs to read and write the job's directory"
        ) from None
    if len(key) != KEY_BYTES:
        raise StorageError(
            f"the job's key {place} has {len(key)} bytes and not {KEY_BYTES}; remove it while no "
            "process of the job runs, and a new one is made"
        )
    return key


def _make(storage: Storage) -> None:
    if isinstance(storage, Directory):
        _close_directory(storage.root / KEY_NAME)
        storage.put_new(KEY_NAME, os.urandom(KEY_BYTES), private=True)
    else:
        storage.put_new(KEY_NAME, os.urandom(KEY_BYTES))


def _read(storage: Storage) -> bytes:
    if not isinstance(storage, Directory):
        return storage.read(KEY_NAME)
    path = storage.root / KEY_NAME
    # What is checked is what is read: a name could lead to another file the moment after.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"the job's key {path} is not a file; remove it")
        _check_owner(path, found, shared=0o077)
        _close_directory(path)
        return os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)


def _close_directory(path: Path) -> None:
    """Refuse a directory in which others could put a key; close to readers what is ours."""
    try:
        found = path.parent.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path.parent} is not a directory; move it away")
    _check_owner(path.parent, found, shared=0o022)
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.parent.chmod(0o700)


def _check_owner(path: Path, found: os.stat_result, *, shared: int) -> None:
    """Refuse what another user owns, or has any of the permissions ``shared`` to."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; run every machine of the job as one user"
        )
    if mode & shared:
        raise StorageError(
            f"{path} has permissions {mode:04o}: other users may have had a hand in it. Remove it "
            "while no process of the job runs, and it is made anew; if that does not help, the "
            "file system keeps no permissions: put the job's directory on one that does"
        )


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The three files of ``[peer]``: certificate, its private key, and the authority's certificate.

    Raises:
        ConfigError: from ``client`` and ``server``, when the files cannot be used.
    """

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, settings: Settings) -> Tls | None:
        """As the settings say; None without them.

        Raises:
            ConfigError: some of the three are set, and not all.
        """
        cert, key, ca = settings.peer_tls_cert, settings.peer_tls_key, settings.peer_tls_ca
        if cert is not None and key is not None and ca is not None:
            return cls(cert=cert, key=key, ca=ca)
        if cert is key is ca:  # all None
            return None
        names = {"peer.tls_cert": cert, "peer.tls_key": key, "peer.tls_ca": ca}
        missing = next(name for name, path in names.items() if path is None)
        raise ConfigError(
            f"{missing} is not set; TLS between machines needs peer.tls_cert, peer.tls_key and "
            "peer.tls_ca: set all three, or none"
        )

    @property
    def files(self) -> tuple[str, str, str]:
        """The three, in the order of the fields, for another process."""
        return str(self.cert), str(self.key), str(self.ca)

    def client(self) -> ssl.SSLContext:
        """For the side that connects."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server(self) -> ssl.SSLContext:
        """For the side that accepts."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def below(self, theirs: bytes | None, *, connects: bool) -> bytes:
        """What both sides of a connection see of it, for the seal above: one word of 32 bytes.

        Args:
            theirs: the other side's certificate, as it showed it.
            connects: whether this side is the one that connected.
        """
        try:
            ours = ssl.PEM_cert_to_DER_cert(_first(self.cert.read_text("ascii")))
        except (OSError, ValueError) as error:
            raise SealError(f"{self.cert} cannot be read any more ({error})") from None
        both = [hashlib.sha256(one).digest() for one in (ours, theirs or b"")]
        return hashlib.sha256(b"".join(both if connects else both[::-1])).digest()

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        path = self.ca
        try:
            context.load_verify_locations(self.ca)
            path = self.cert
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{path} cannot be used for TLS between machines ({why}); peer.tls_cert, "
                "peer.tls_key and peer.tls_ca are files in PEM format, the key without a password"
            ) from None
        return context


class Piped:
    """TLS as bytes in and bytes out, for whoever has many connections in one thread.

    Args:
        tls: the files, which are read anew for each connection.
        connects: whether this side is the one that connected.

    Attributes:
        below: what the seal above is bound to; b"" until the other side's certificate was seen.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, tls: Tls, *, connects: bool) -> None:
        self.below = b""
        self._tls = tls
        self._connects = connects
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.client() if connects else tls.server()
        self._ends = context.wrap_bio(self._came, self._goes, server_side=not connects)
        self._early = bytearray()  # to be sent once the other side is known

    def sent(self, data: bytes) -> bytes:
        """What goes out for ``data``: now, or with what ``came`` returns later.

        Raises:
            SealError: the connection is of no use any more.
        """
        if not self.below:
            self._early += data
            return self._shaken()
        return self._written(data)

    def came(self, data: bytes) -> tuple[bytes, bytes]:
        """Bytes of the other side's: what they say, and what has to go out in answer.

        Raises:
            SealError: it is not of this job's authority, or what came was altered.
        """
        self._came.write(data)
        answer = b""
        if not self.below:
            answer = self._shaken()
            if not self.below:
                return b"", answer
        said = bytearray()
        try:
            while part := self._ends.read(1 << 16):
                said += part
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise refusal(error) from None
        return bytes(said), answer + self._goes.read()

    def _shaken(self) -> bytes:
        try:
            self._ends.do_handshake()
        except ssl.SSLWantReadError:
            return self._goes.read()
        except ssl.SSLError as error:
            raise refusal(error) from None
        self.below = self._tls.below(self._ends.getpeercert(True), connects=self._connects)
        early, self._early = bytes(self._early), bytearray()
        return self._written(early) if early else self._goes.read()

    def _written(self, data: bytes) -> bytes:
        try:
            self._ends.write(data)
        except ssl.SSLError as error:
            raise refusal(error) from None
        return self._goes.read()


def refusal(error: ssl.SSLError) -> SealError:
    """What it means that TLS does not come to be."""
    reason = (error.reason or "no TLS").lower().replace("_", " ")
    return SealError(f"its TLS is not this job's ({reason})")


def _first(text: str) -> str:
    """The machine's own certificate, of a file that may hold a chain."""
    start, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return start + text.partition(start)[2].partition(end)[0] + end

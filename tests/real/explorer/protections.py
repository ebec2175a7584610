"""Switch one of our protections off, in this process: an explorer that then sees nothing is blind.

Each entry of ``TABLE`` puts something else in the place of what it names, and gives what undoes
it. ``off_as_told`` does so in a process under test, where ``EXPLORER_WITHOUT`` names one; it is
called before anything else.
"""

import contextlib
import os
import stat
from types import SimpleNamespace
from unittest import mock

VARIABLE = "EXPLORER_WITHOUT"
_for_good = contextlib.ExitStack()


def _directory_fsync():
    """Names are not made durable."""
    from outlast import durable
    from outlast.ledger import file, job
    from outlast.storage import directory

    users = (directory, durable, file, job)
    return [mock.patch.object(one, "sync_directory") for one in users]


def _directories_of_others():
    """A directory that is there already is taken for durable, whoever made it."""
    from outlast import durable
    from outlast.ledger import job
    from outlast.storage import directory

    class All:
        def __contains__(self, _):
            return True

    make = durable.make_directories

    def trusting(path, mode=0o777, durable=()):
        return make(path, mode, All())

    return [mock.patch.object(one, "make_directories", trusting) for one in (directory, job)]


def _ledgers_name():
    """The ledger's lines are made durable, and its name is not."""
    from outlast.ledger import file

    return [mock.patch.object(file, "sync_directory")]


def _file_fsync():
    """Bytes are not made durable before a file has its name."""
    fsync = os.fsync

    def only_directories(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            fsync(fd)

    return [mock.patch.object(os, "fsync", only_directories)]


def _manifest_last():
    """A file that belongs to a save gets its name after the manifest that counts on it."""
    from outlast.storage.directory import Directory, FileBlob

    finish, put_new = FileBlob.finish, Directory.put_new
    late = []

    def finish_late(self):
        if self._path.name.startswith("rank-"):
            late.append(self)
        else:
            finish(self)

    def put_new_first(self, name, data, **options):
        done = put_new(self, name, data, **options)
        while name.endswith("manifest.json") and late:
            finish(late.pop())
        return done

    return [
        mock.patch.object(FileBlob, "finish", finish_late),
        mock.patch.object(Directory, "put_new", put_new_first),
    ]


def _manifest_goes_first():
    """Of a save that is removed, the files go before the manifest."""
    from outlast.storage.directory import Directory

    remove = Directory.remove

    def keep(self, name):
        if not name.endswith("manifest.json"):
            remove(self, name)

    return [mock.patch.object(Directory, "remove", keep)]


def _checksum():
    """What was read is not compared with its hash."""
    from outlast.checkpoint import transfer

    class Equal(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __ne__(self, _):
            return False

    blind = SimpleNamespace(xxh3_128_hexdigest=lambda _: Equal())
    return [mock.patch.object(transfer, "xxhash", blind)]


def _retention_guard():
    """One fewer is kept than was promised, and the newest is no exception."""
    from outlast.checkpoint import catalog

    def removable(committed, unfinished, *, keep, invalid, in_use=(), **_):
        gone = {*sorted(set(committed) - set(invalid))[: -keep + 1 or None], *unfinished}
        return sorted(gone - set(in_use))

    return [mock.patch.object(catalog, "removable", removable)]


def _claim():
    """A name that is taken is given all the same."""
    from outlast.storage import directory

    def rename(part, path):
        part.rename(path)
        return True

    return [mock.patch.object(directory, "name_new", rename)]


def _note():
    """A save's directory does not say whose it is before anything else is in it.

    Nobody asks for the note then: else a save without one is never committed.
    """
    from outlast.checkpoint import mend
    from outlast.keeper import conclude, copies, flight

    unsigned = [mock.patch.object(one, "sign") for one in (flight, copies, mend)]
    asking = [
        mock.patch.object(one, "is_still_there", return_value=True) for one in (conclude, copies)
    ]
    return unsigned + asking


def _own_names():
    """All saves of a step have one directory."""
    from outlast.checkpoint.manifest import SaveName

    return [mock.patch.object(SaveName, "__str__", lambda self: f"step-{self.step:012d}")]


TABLE = {
    "directory fsync": _directory_fsync,
    "directories of others": _directories_of_others,
    "ledger's name": _ledgers_name,
    "file fsync": _file_fsync,
    "manifest last": _manifest_last,
    "manifest goes first": _manifest_goes_first,
    "checksum": _checksum,
    "retention guard": _retention_guard,
    "claim": _claim,
    "note": _note,
    "own names": _own_names,
}


@contextlib.contextmanager
def off(name):
    """Within, the protection is switched off in this process."""
    with contextlib.ExitStack() as stack:
        for patch in TABLE[name]() if name else ():
            stack.enter_context(patch)
        yield


def off_as_told():
    """Switch off what the environment names, for good."""
    _for_good.enter_context(off(os.environ.get(VARIABLE, "")))

"""Frames between agent and server."""

import os
import socket
import struct

import pytest

from outlast.launch.warm.wire import MAX_FRAME, Exited, ForkedWorker, Script, Start, Wire, readable


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    pair = Wire(ours), Wire(theirs)
    yield pair
    for one in pair:
        one.close()


def worker(**changes):
    given = {
        "arguments": [b"a\xff", b""],
        "command": [b"python"],
        "environ": {b"N\xfe": b"v\xff\n"},
        "redirected": [1],
    }
    return ForkedWorker(**(given | changes))


def test_bytes_of_any_kind_and_descriptors(ends):
    ours, theirs = ends
    read, write = os.pipe()
    ours.send(Start(workers=[worker()]), [write])
    os.close(write)
    message, (fd,) = theirs.receive(1.0)
    assert message == Start(workers=[worker()])
    os.write(fd, b"x")
    os.close(fd)
    assert os.read(read, 2) == b"x"
    assert not os.get_inheritable(read)
    os.close(read)


def test_messages_keep_their_order_and_their_descriptors(ends):
    ours, theirs = ends
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, write) in enumerate(pipes):
        ours.send(Exited(pid=number, code=-9))
        ours.send(Script(arguments=[b"x"]), [write])
    for number, (read, write) in enumerate(pipes):
        assert theirs.receive(1.0) == (Exited(pid=number, code=-9), [])
        _, (fd,) = theirs.receive(1.0)
        os.write(fd, b"%d" % number)
        assert os.read(read, 1) == b"%d" % number
        for one in (fd, read, write):
            os.close(one)


def test_more_descriptors_than_the_kernel_takes_at_once(ends):
    ours, theirs = ends
    read, write = os.pipe()
    ours.send(Start(workers=[worker()]), [write] * 600)
    ours.send(Exited(pid=1, code=0))
    os.close(write)
    message, fds = theirs.receive(1.0)
    assert message == Start(workers=[worker()])
    assert len(set(fds)) == 600
    for fd in fds:
        os.write(fd, b"x")
        os.close(fd)
    assert os.read(read, 1000) == b"x" * 600
    os.close(read)
    assert theirs.receive(1.0) == (Exited(pid=1, code=0), [])


def test_nothing_yet_and_an_end(ends):
    ours, theirs = ends
    assert theirs.receive(0.0) is None
    ours.sock.send(b"\1")
    assert theirs.receive(0.0) is None
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive(1.0)
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(Exited(pid=1, code=0))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", MAX_FRAME + 1, 0),
        struct.pack("<II", 1, 1 << 20),
        struct.pack("<II", 1, 0) + b"\xc1",
        struct.pack("<II", 2, 0) + b"\x81\xa1",
    ],
)
def test_what_is_no_message(ends, data):
    ours, theirs = ends
    ours.sock.send(data)
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        theirs.receive(1.0)


def test_which_can_be_read(ends):
    ours, theirs = ends
    both = [ours.sock.fileno(), theirs.sock.fileno()]
    assert readable(both, 0.0) == set()
    ours.sock.send(b"x")
    assert readable(both, None) == {theirs.sock.fileno()}

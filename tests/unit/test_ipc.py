"""Frames and packets between processes of one machine, and what is refused of them."""

import os
import socket
import struct
import zlib

import msgspec
import pytest

from outlast import ipc


class Start(ipc.Message):
    """Bytes of any kind."""

    environ: dict[bytes, bytes]


class Exited(ipc.Message, tag="Left"):
    """A message without descriptors."""

    pid: int
    code: int


class Wire(ipc.FrameSocket):
    """A stream."""

    codec = ipc.Codec(Start | Exited, msgspec.msgpack)
    max_bytes = 1 << 20


class BulkWire(Wire):
    """A stream with bulk bytes."""

    codec = ipc.Codec(Start | Exited)
    has_bulk = True


class Line(ipc.PacketSocket):
    """Packets."""

    codec = ipc.Codec(Start | Exited, msgspec.msgpack, pack_over=100, mark=b"z")
    max_bytes = 1 << 17


class BusyLine(Line):
    """Packets to an end that is not waited for."""

    waits = False


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    pair = Wire(ours), Wire(theirs)
    yield pair
    for one in pair:
        one.close()
        one.drop_descriptors()


START = Start(environ={b"N\xfe": b"v\xff\n"})


def test_bytes_of_any_kind_and_descriptors(ends):
    ours, theirs = ends
    read, write = os.pipe()
    ours.send(START, fds=[write])
    os.close(write)
    message, _, (fd,) = theirs.receive(1.0)
    assert message == START
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
        ours.send(START, fds=[write])
    for number, (read, write) in enumerate(pipes):
        assert theirs.receive(1.0) == (Exited(pid=number, code=-9), b"", [])
        _, _, (fd,) = theirs.receive(1.0)
        os.write(fd, b"%d" % number)
        assert os.read(read, 1) == b"%d" % number
        for one in (fd, read, write):
            os.close(one)


def test_more_descriptors_than_the_kernel_takes_at_once(ends):
    ours, theirs = ends
    read, write = os.pipe()
    ours.send(START, fds=[write] * 600)
    ours.send(Exited(pid=1, code=0))
    os.close(write)
    message, _, fds = theirs.receive(1.0)
    assert message == START
    assert len(set(fds)) == 600
    for fd in fds:
        os.write(fd, b"x")
        os.close(fd)
    assert os.read(read, 1000) == b"x" * 600
    os.close(read)
    assert theirs.receive(1.0) == (Exited(pid=1, code=0), b"", [])


def test_nothing_yet_and_an_end(ends):
    ours, theirs = ends
    for part in (b"", b"\1"):
        ours.sock.send(part)
        with pytest.raises(TimeoutError):
            theirs.receive(0.0)
    ours.close()
    assert theirs.receive(1.0) is None
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(Exited(pid=1, code=0))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", Wire.max_bytes + 1, 0),
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
    assert ipc.readable(both, 0.0) == set()
    ours.sock.send(b"x")
    assert ipc.readable(both, None) == {theirs.sock.fileno()}


def test_the_bytes_of_a_frame(ends):
    ours, theirs = ends
    text = msgspec.msgpack.encode({"type": "Left", "pid": 1, "code": 0})
    theirs.send(Exited(pid=1, code=0))
    assert ours.sock.recv(1000) == struct.pack("<II", len(text), 0) + text
    here, there = (BulkWire(one) for one in socket.socketpair())
    here.send(Exited(pid=1, code=0), b"bulk")
    text = b'{"type":"Left","pid":1,"code":0}'
    assert there.sock.recv(1000) == struct.pack("<III", len(text), 4, 0) + text + b"bulk"
    for one in (here, there):
        one.close()


@pytest.fixture(name="lines")
def _lines():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines = Line(pair[0]), BusyLine(pair[1])
    yield lines
    for one in lines:
        one.close()


def test_packets_do_not_run_together_and_large_ones_are_packed(lines):
    large = Start(environ={b"a": b"x" * 100_000})
    for sender, receiver in (lines, lines[::-1]):
        for message in (Exited(pid=1, code=0), large, Exited(pid=2, code=0)):
            assert sender.send(message)
        heard = [receiver.receive() for _ in range(3)]
        assert heard == [Exited(pid=1, code=0), large, Exited(pid=2, code=0)]
    lines[0].send(large)
    assert lines[1].sock.recv(1 << 17) == b"z" + zlib.compress(msgspec.msgpack.encode(large), 1)


def test_a_packet_that_is_too_large_or_finds_no_room_is_not_sent(lines, caplog):
    assert not lines[0].send(Start(environ={b"a": os.urandom(1 << 18)}))
    while lines[1].send(Exited(pid=1, code=0)):
        pass
    assert [words.partition(" was lost: ")[2] for words in caplog.messages] == [
        "Message too long",
        "Resource temporarily unavailable",
    ]


@pytest.mark.parametrize(
    "data", [b"\xc1 nothing", b"z nothing", b"z" + zlib.compress(bytes(100))[:-3]]
)
def test_a_packet_that_is_not_understood_is_an_end(lines, data):
    lines[0].sock.send(data)
    assert lines[1].receive() is None
    lines[0].close()
    assert lines[1].receive() is None
    assert not lines[1].send(Exited(pid=1, code=0))


def test_a_packed_message_that_would_fill_the_memory_is_refused(monkeypatch):
    codec = ipc.Codec(Start | Exited, pack_over=100)
    bomb = zlib.compress(b"{" + b" " * (1 << 20))
    monkeypatch.setattr(ipc, "MAX_UNPACKED_BYTES", 1 << 16)
    with pytest.raises(ValueError, match="larger than"):
        codec.decode(bomb)


def test_the_kernel_says_whose_the_other_end_is(lines):
    assert ipc.peer_credentials(lines[0].sock) == (os.getpid(), os.getuid())

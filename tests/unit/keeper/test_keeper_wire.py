"""Frames with descriptors, and what a connection does with those that make no sense."""

import gc
import os
import socket
import struct
import threading
from typing import Union

import msgspec
import pytest
from unit_fakes import num_descriptors

from outlast import ipc
from outlast.keeper import wire
from outlast.keeper.server import Connection


@pytest.fixture(name="ends")
def _ends():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ends = [wire.KeeperSocket(sock) for sock in pair]
    yield ends
    for end in ends:
        end.close()


def frame(text, blob=b"", num_fds=0):
    return struct.pack("<III", len(text), len(blob), num_fds) + text + blob


@pytest.mark.parametrize("count", [0, 1, 7, 250])
def test_descriptors_come_with_their_message(ends, count):
    fds = [os.memfd_create(str(n)) for n in range(count)]
    ends[0].send(wire.Recall(), b"blob", tuple(fds))
    ends[0].send(wire.Drop(arena=3))
    message, blob, found = ends[1].receive()
    assert (message, blob, len(found)) == (wire.Recall(), b"blob", count)
    assert [os.fstat(fd).st_ino for fd in found] == [os.fstat(fd).st_ino for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in found)
    assert ends[1].receive()[0] == wire.Drop(arena=3)
    for fd in (*fds, *found):
        os.close(fd)


def test_a_message_larger_than_the_buffers_arrives(ends):
    blob = os.urandom(3 << 20)
    sender = threading.Thread(target=ends[0].send, args=(wire.Recall(), blob))
    sender.start()
    assert ends[1].receive()[1] == blob
    sender.join()


GARBAGE = [
    frame(b"{}"),
    frame(b"not json"),
    frame(b'"\xff\xfe"'),
    frame(b'{"type":"Nothing"}'),
    frame(b'{"type":"Hello"}'),
    frame(msgspec.json.encode(wire.Goodbye()), num_fds=1),
    frame(b"[" * 100_000),
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10,
    b"\xff" * 4096,
]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_is_no_message_is_refused(ends, data):
    ends[0].sock.sendall(data)
    ends[0].sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ValueError, match=r"."):
        ends[1].receive()


def test_half_a_message_is_the_end(ends):
    ends[0].sock.sendall(frame(b"{}")[:5])
    ends[0].close()
    assert ends[1].receive() is None


class Owner:
    """Who hears a connection."""

    def __init__(self):
        self.heard, self.over = [], threading.Event()

    def handle(self, peer, message, blob, fds):
        self.heard.append(message)
        for fd in fds:
            os.close(fd)

    def gone(self, _):
        self.over.set()


@pytest.mark.parametrize("data", [*GARBAGE, b""])
def test_garbage_costs_its_connection_alone_and_no_descriptor(data, caplog):
    gc.collect()  # what tests before this one have left is none of its business
    before = num_descriptors()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    owner = Owner()
    peer = Connection(owner, there)
    fd = os.memfd_create("x")
    with caplog.at_level("CRITICAL"):
        socket.send_fds(here, [b"\x02"], [fd])  # comes with a message that never is one
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        assert owner.over.wait(20)
    assert peer.is_gone
    peer.send(wire.Drop(arena=1), fds=(fd,))  # nobody is there to take it
    os.close(fd)
    here.close()
    assert num_descriptors() <= before
    assert owner.heard == []


def test_an_end_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(ipc, "SEND_TIMEOUT_S", 1)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    owner = Owner()
    peer = Connection(owner, there)
    peer.send(wire.Recall(), bytes(64 << 20))
    peer.send(wire.Drop(arena=1))
    assert owner.over.wait(30)
    here.close()


# --- the version ---------------------------------------------------------------------------------


class Old(ipc.Message, tag="Drop"):
    """What Drop was once."""

    arena: int
    why: str = ""


def version_of(monkeypatch, *messages):
    monkeypatch.setattr(wire, "Message", Union[wire.Goodbye, *messages])
    wire.version.cache_clear()
    try:
        return wire.version()
    finally:
        monkeypatch.undo()
        wire.version.cache_clear()


def test_the_version_follows_from_what_is_said(monkeypatch):
    assert len(wire.version()) == 8
    now = version_of(monkeypatch, wire.Drop)
    assert now == version_of(monkeypatch, wire.Drop) != wire.version()
    assert version_of(monkeypatch, Old) != now
    assert version_of(monkeypatch, wire.Drop, wire.Hold) != now


def test_the_version_is_not_that_of_the_words_around_it(monkeypatch):
    documented = wire._without_words({"title": "A", "description": "B", "type": "object"})
    assert documented == {"type": "object"}
    # A field of this name is no word for people.
    fields = {"properties": {"title": {"type": "string"}}}
    assert wire._without_words(fields) == fields

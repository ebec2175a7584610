"""What keepers say to each other while one of them is not ready to answer, or never answers."""

import socket
import threading
import types

import msgspec
import pytest

from outlast.keeper import peers, protocol
from outlast.keeper.peers import PeerTier
from outlast.keeper.replicas import ReplicaServer
from outlast.keeper.wire import PeerMachine

MEMBER = PeerMachine(node="n1", host="127.0.0.1", port=1)


class Channel:
    """The other end says what it is told to, or nothing."""

    peer = "127.0.0.1:1"
    bulk_bytes = 0

    def __init__(self, *answers):
        self.answers = list(answers)
        self.sent, self.waited_s = [], []
        self.is_closed = False
        self.on_sent = lambda: None

    def send(self, payload, bulk=(), pace=None):
        self.sent.append(msgspec.json.decode(payload, type=protocol.Message))
        self.on_sent()

    def receive(self, timeout_s):
        self.waited_s.append(timeout_s)
        if not self.answers:
            raise TimeoutError("nothing came")
        return msgspec.json.encode(self.answers.pop(0))

    def close(self):
        self.is_closed = True


def test_who_asks_for_patience_is_waited_for():
    channel = Channel(protocol.Later(), protocol.Later(), protocol.Listing())
    answer = protocol.ask(channel, protocol.List(attempt=2), protocol.Listing, timeout_s=5.0)
    assert isinstance(answer, protocol.Listing)
    assert channel.waited_s == [5.0] * 3


def test_patience_has_an_end(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(protocol, "time", types.SimpleNamespace(monotonic=lambda: float(next(now))))
    channel = Channel(*[protocol.Later()] * 100)
    with pytest.raises(TimeoutError, match="does not end"):
        protocol.ask(channel, protocol.List(attempt=2), protocol.Listing, timeout_s=5.0)
    assert len(channel.waited_s) == protocol.PATIENCE_S


@pytest.mark.parametrize(
    "answers", [(), (protocol.Later(),)], ids=["nothing", "later, then nothing"]
)
def test_who_says_nothing_has_nothing_and_is_not_asked_again_for_a_while(monkeypatch, answers):
    now = types.SimpleNamespace(s=100.0)
    monkeypatch.setattr(peers, "time", types.SimpleNamespace(monotonic=lambda: now.s))
    channels = []

    def open_channel(_):
        channels.append(Channel(*answers))
        return channels[-1]

    others = PeerTier(2, [MEMBER], open_channel)
    assert others.children() == []
    assert others.children() == []
    assert len(channels) == 1
    assert channels[0].is_closed
    assert max(channels[0].waited_s) <= 10.0
    now.s += peers.MUTE_S
    others.children()
    assert len(channels) == 2


def test_who_has_something_in_flight_says_so_until_it_has_not(monkeypatch):
    is_asked_twice, asked = threading.Event(), []
    server = ReplicaServer(
        socket.create_server(("127.0.0.1", 0)),
        b"",
        None,
        types.SimpleNamespace(inventory=dict),
        wait_for_earlier=lambda attempt: asked.append(is_asked_twice.wait(60)),
        gives_way=False,
        record=None,
    )
    channel = Channel()
    channel.on_sent = lambda: is_asked_twice.set() if len(channel.sent) == 2 else None
    monkeypatch.setattr(protocol, "LATER_S", 0.01)
    server._list(channel, protocol.List(attempt=2))
    server.close()
    names = [type(message).__name__ for message in channel.sent]
    assert names[:2] == ["Later", "Later"]
    assert names[-1] == "Listing"
    assert asked == [True]

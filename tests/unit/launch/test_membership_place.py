"""Where a job's machines meet, as people write it."""

import socket
from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.launch.first_look import own_address, place_of, reached_at


def test_a_directory_or_a_bucket():
    assert place_of("s3://bucket/job") == "s3://bucket/job"
    assert place_of("job") == str(Path("job").absolute())
    assert place_of("/shared/run:7") == "/shared/run:7"


@pytest.mark.parametrize("address", ["node0:29400", "10.0.0.1:0", ":29400", "[::1]:29400"])
def test_an_address_is_none(address):
    with pytest.raises(ConfigError, match="name a directory or bucket"):
        place_of(address)


class Network:
    """What this machine has routes to, and a name server."""

    def __init__(self, monkeypatch, routes, names=None):
        self.routes, self.names = routes, names or {}
        monkeypatch.setattr(socket, "socket", self._socket)
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _socket(self, family, kind):
        self.family = family
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def connect(self, where):
        if self.family not in self.routes:
            raise OSError(101, "Network is unreachable")

    def getsockname(self):
        return (self.routes[self.family], 1)

    def _look_up(self, host, *_, **__):
        if host not in self.names:
            raise socket.gaierror(-2, "Name or service not known")
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [
            (families[":" in found], None, 0, "", (found, 0, 0, 0)) for found in self.names[host]
        ]


@pytest.mark.parametrize(
    ("routes", "address"),
    [
        ({socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd77::7"}, "10.0.0.7"),
        ({socket.AF_INET6: "fd77::7"}, "fd77::7"),
        ({}, "127.0.0.1"),
    ],
    ids=["both", "IPv6 alone", "none"],
)
def test_the_address_of_a_route_of_either_kind(monkeypatch, routes, address):
    Network(monkeypatch, routes)
    assert own_address() == address


@pytest.mark.parametrize(
    ("found", "number"),
    [
        (["10.0.0.7"], "10.0.0.7"),
        (["fd77::7", "10.0.0.7"], "10.0.0.7"),
        (["fd77::7"], "fd77::7"),
        (["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        (["::1", "127.0.0.1", "fd77::7"], "fd77::7"),
    ],
)
def test_a_name_is_looked_up_once(monkeypatch, found, number):
    Network(monkeypatch, {}, {"node-a": found})
    told = []
    assert reached_at("node-a", told.append) == number
    assert told == []


def test_a_name_that_is_nobody_s(monkeypatch):
    Network(monkeypatch, {})
    with pytest.raises(ConfigError, match="at node-a: Name or service not known; name an address"):
        reached_at("node-a", print)
    with pytest.raises(ConfigError, match="name an address"):
        reached_at("a" * 70 + ".example", print)


def test_who_cannot_be_reached_is_told(monkeypatch):
    Network(monkeypatch, {}, {"node-a": ["127.0.1.1"], "127.0.0.1": ["127.0.0.1"]})
    told = []
    assert reached_at(None, told.append) == "127.0.0.1"
    assert reached_at("node-a", told.append) == "127.0.1.1"
    why = ["it has no route, and listens on 127.0.0.1", "node-a is 127.0.1.1"]
    todo = "name an address of this machine with --local-addr"
    assert told == [f"other machines cannot reach this one ({one}); {todo}" for one in why]
    assert reached_at("127.0.0.1", told.append) == "127.0.0.1"  # as was asked for
    assert len(told) == 2
